"""Run by the Python that has vLLM: greedy answers to one prompt by vLLM's offline engine, without and with adapters.

`vllm_answers.py BASE ADAPTER...` writes {folder: [ids, log-probabilities]} to stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from vllm_names import TorchvisionStandIn

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPT, NEW_TOKENS = list(range(3, 23)), 8


def main() -> None:
    base, *adapters = sys.argv[1:]
    answers = {}
    with contextlib.redirect_stdout(sys.stderr):
        sys.meta_path.insert(0, TorchvisionStandIn())
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda run: run()
        has_images = "vision_config" in json.loads((Path(base) / "config.json").read_text())
        images = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if has_images else {}
        model = LLM(
            base, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2, skip_tokenizer_init=True,
            enable_lora=True, max_lora_rank=16, max_loras=1, enable_prefix_caching=False, **images,
        )  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1, detokenize=False)
        for number, folder in enumerate([base, *adapters]):
            request = LoRARequest(folder, number, folder) if number else None
            prompts = [{"prompt_token_ids": PROMPT}]
            answer = model.generate(prompts, sampling, lora_request=request, use_tqdm=False)[0].outputs[0]
            given = [found[token].logprob for found, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            answers[folder] = [list(answer.token_ids), given]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

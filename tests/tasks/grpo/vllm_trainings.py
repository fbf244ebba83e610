"""Trainings of the toy in one process of vLLM's Python, which reads vLLM once for all of them.

`main` writes found.json to its folder: name of a training -> its metrics and the folder of its result. The server at
`url` has loaded `model`, from which all begin.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from in_process import train
from small_run import Inputs

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "data" / "mistaken_words"
STEPS = 5

GREEDY = {
    "grpo__top_k": 1, "grpo__entropy_coef": 0.05, "grpo__sampler_correction": "none",
    "grpo__logprob_check_steps": 0,
    "grpo__stop_without_signal": 0, "train__learning_rate": 1e-3,
}  # fmt: skip
"""All answers of a group are the likeliest one, so that no advantage is left; what is learned is the reward for being
unsure, of the tokens that were sampled. vLLM says probability 1 of such tokens, which TRL would correct for, and the
check of the sampler would call a fault."""


def toy(**changes: Any) -> dict[str, Any]:
    """Changes to the small run that make it the toy of rewards, of five steps."""
    return {
        "task_mode": "grpo",
        "tuning__mode": "full",
        "model__max_seq_len": 64,
        "rewards": [{"name": "tests", "use": "code_tests"}, {"name": "syntax", "use": "syntax", "weight": 0.1}],
        "grpo__num_generations": 4,
        "grpo__max_completion_length": 24,
        "grpo__logprob_check_steps": 1,
        "train__effective_batch_size": 16,
        "train__max_steps": STEPS,
        "train__learning_rate": 1e-3,
        "train__eval_steps": STEPS,
        **changes,
    }


def warm_start(home: Path) -> Path:
    """A model that imitates the toy's demonstrator a little."""
    inputs = Inputs(ROOT / "data" / "base" / "tiny", DATA / "noisy.jsonl", DATA / "held_out.jsonl")
    changes = {"tuning__mode": "full", "train__max_steps": 70, "train__effective_batch_size": 16, "eval__limit": 1}
    done = train(home / "warm", inputs, model__max_seq_len=64, train__learning_rate=2e-3, **changes)
    assert done.folder.result is not None
    return done.folder.result


def main(folder: str, url: str, model: str) -> None:
    home, found = Path(folder), {}
    inputs = Inputs(Path(model), DATA / "train.jsonl", DATA / "held_out.jsonl")
    served = {"grpo__generation": "vllm_server", "grpo__vllm__url": url}
    lora = {"tuning__mode": "lora", "train__learning_rate": 1e-2}
    trainings = {
        # The first: it needs the base that the server has loaded, which full weights replace.
        "vllm_server, adapter": served | lora | {"grpo__vllm__sync": "adapter"},
        "greedy by transformers": GREEDY,
        "greedy by vllm_server": GREEDY | served,
        "vllm_server": served,
        "vllm_server, lora": served | lora,
        "greedy by vllm_colocate": GREEDY | {"grpo__generation": "vllm_colocate"},
        "vllm_colocate": {"grpo__generation": "vllm_colocate"},
    }
    for name, changes in trainings.items():
        done = train(home / name.replace(" ", "-"), inputs, **toy(**changes))
        print(name, flush=True)
        found[name] = {"metrics": done.metrics, "result": str(done.folder.result)}
    (home / "found.json").write_text(json.dumps(found))

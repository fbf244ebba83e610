"""Short trainings with planted faults between trainer and vLLM, in one process of vLLM's Python.

`main` writes found.json to its folder: name of a fault -> the metrics, the events that accuse the sampler, and the
dtype that it said to have. The server at `url` has loaded `model` and `vllm_faulty_worker`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import requests
from grpo_run import grpo_inputs, grpo_options
from in_process import train
from processes import HANG_S
from safetensors.torch import load_file, save_file
from small_run import WORDS, Inputs
from trl.generation.vllm_client import VLLMClient

from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.grpo import vllm_weights
from sftplay.tasks.grpo.sampler_check import DIFFERS

STEPS, PROMPTS, ANSWERS = 2, 4, 4


def long_prompts(model: Path, folder: Path) -> Inputs:
    """Prompts of more than the 32 tokens that vLLM's prefix cache keeps together, all of them in each step."""
    inputs = grpo_inputs(model, folder, prompts=PROMPTS)
    rows = [json.loads(line) for line in inputs.train.read_text().splitlines()]
    for n, row in enumerate(rows):
        row["prompt"] = f"{n} {' '.join(WORDS[n:] + WORDS[:n])}"
    inputs.train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return inputs


@contextmanager
def asked(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Inside, requests for answers are changed on their way to the server."""
    post = VLLMClient._post

    def post_changed(self: Any, url: str, **named: Any) -> Any:
        if url.endswith("/v1/completions"):
            named["json"] = named["json"] | change(named["json"])
        return post(self, url, **named)

    with patch.object(VLLMClient, "_post", post_changed):
        yield


@contextmanager
def half_loaded() -> Iterator[None]:
    """Inside, the second layer is not in the files of adapters that the server is told to load."""
    write = vllm_weights.mountable_by_vllm

    def write_half(*given: Any, **named: Any) -> Path:
        folder: Path = write(*given, **named)
        (path,) = folder.glob("*.safetensors")
        save_file({name: weight for name, weight in load_file(path).items() if ".layers.1." not in name}, path)
        return folder

    with patch.object(vllm_weights, "mountable_by_vllm", write_half):
        yield


def tell(url: str, method: str) -> None:
    """Have the server's workers call a method of `vllm_faulty_worker`."""
    requests.post(f"{url}/collective_rpc", json={"method": method}, timeout=HANG_S).raise_for_status()


@contextmanager
def head_kept(url: str) -> Iterator[None]:
    """Inside, the server computes with the head that it got first."""
    finish = VLLMClient._finish_weight_update

    def finish_and_keep(self: Any) -> None:
        finish(self)
        tell(url, "keep_the_head")

    with patch.object(VLLMClient, "_finish_weight_update", finish_and_keep):
        yield
    tell(url, "pack_the_head")


@contextmanager
def dropped_out(url: str) -> Iterator[None]:
    """From here on the server computes with dropout."""
    tell(url, "drop_out")
    yield


def trainings(url: str) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """The name of a fault, changes to the run, and what plants it. Adapters come first, as full weights replace the
    base that they need.
    """

    def stale_cache() -> Any:
        return patch.object(VLLMClient, "reset_prefix_cache", lambda self: None)

    full = {"grpo__generation": "vllm_server", "grpo__vllm__url": url}
    adapter = full | {"grpo__vllm__sync": "adapter", "tuning__mode": "lora"}
    yield "none, adapter", adapter, nullcontext()
    yield "half-loaded adapter", adapter, half_loaded()
    yield "stale prefix cache, adapter", adapter, stale_cache()
    yield "none", full, nullcontext()
    yield "temperature", full, asked(lambda body: {"temperature": 1.1})
    yield "top_p", full, asked(lambda body: {"top_p": 0.9})
    yield "template", full, asked(lambda body: {"prompt": [[*ids[:3], 9, *ids[3:]] for ids in body["prompt"]]})
    yield "stale prefix cache", full, stale_cache()
    yield "old head", full, head_kept(url)
    yield "dropout", full, dropped_out(url)
    colocated = {"grpo__generation": "vllm_colocate"}
    yield "none, in one process", colocated, nullcontext()
    yield "another dtype", colocated, patch.object(vllm_weights, "cpu_dtype", lambda cfg: "bfloat16")


def main(folder: str, url: str, model: str) -> None:
    home, found = Path(folder), {}
    inputs = long_prompts(Path(model), home / "prompts")
    toy = {
        "model__max_seq_len": 128, "train__max_steps": STEPS, "train__effective_batch_size": PROMPTS * ANSWERS,
        "train__learning_rate": 3e-3, "train__eval_steps": STEPS, "grpo__num_generations": ANSWERS,
        "grpo__max_completion_length": 24, "grpo__logprob_check_steps": 1, "eval__limit": 1,
        "rewards": [{"name": "short", "use": "overlong", "options": {"most": 24, "soft": 20}}],
    }  # fmt: skip
    for name, changes, planted in trainings(url):
        with planted:
            done = train(home / name.replace(" ", "-"), inputs, **grpo_options(inputs, **toy, **changes))
        events = [event for event in RunFolder(done.folder.path).read_events() if event["event"] == DIFFERS]
        found[name] = {"metrics": done.metrics, "events": events, "dtype": done.trainer.logprob_check.facts.dtype}
        print(name, flush=True)
    (home / "found.json").write_text(json.dumps(found))

"""A run on rewards whose weights are sharded: every rank draws, and all learn the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from grpo_run import grpo_inputs, grpo_options
from small_run import write_small_run

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
CPU_FSDP = ROOT / "benchmarks" / "cpu_fsdp"
"""accelerate shards by FSDP on accelerators only; this lets it do so here."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [("zero2", "full"), ("zero3", "full"), ("zero3", "lora"), ("fsdp", "full"), ("fsdp", "lora")],
)
def test_a_sharded_run_draws_judges_learns_and_measures(
    strategy: str, mode: str, tiny_llama: Path, tmp_path: Path, sftplay: Callable[..., CompletedProcess[str]]
):
    inputs = grpo_inputs(tiny_llama, tmp_path / "prompts")
    options = grpo_options(
        inputs, tuning__mode=mode, cluster__strategy=strategy, train__batch_size=2, train__max_steps=3,
        train__save_steps=2, train__optim="adamw_torch", eval__after=True, grpo__beta=0.05,
    )  # fmt: skip
    config = write_small_run(tmp_path, inputs, **options)
    done = sftplay("train", "--config", config, "--nproc", 2, env={"PYTHONPATH": str(CPU_FSDP)})
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "outputs" / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["reward_std"] > 0 and line["grad_norm"] > 0 for line in lines)
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert lines[2]["kl"] > 0
    samples = (folder / "samples" / "step-3.jsonl").read_text().splitlines()
    assert len({json.loads(line)["completion"] for line in samples}) > 2
    last, after = (json.loads((folder / "eval" / f"{name}.json").read_text()) for name in ("step-3", "after"))
    assert after["reward"] == pytest.approx(last["reward"], abs=0.05)
    assert list((folder / ("model" if mode == "full" else "adapter")).glob("*.safetensors"))

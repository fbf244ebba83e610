"""Really launched runs on preferences: memory that runs out on one of two processes, and another run as reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from out_of_memory import hooked
from pair_files import random_pairs, write_pairs
from run_outputs import Outputs
from safetensors.torch import load_file
from small_run import Inputs, write_small_run

pytestmark = pytest.mark.slow

Verb = Callable[..., CompletedProcess[str]]

SETTINGS = {
    "model__max_seq_len": 128, "train__max_steps": 3, "train__batch_size": 4, "train__effective_batch_size": 16,
    "train__learning_rate": 0.3, "train__optim": "sgd", "train__precision": "fp32", "train__eval_steps": 3,
    "eval__limit": 2, "eval__batch_size": 8, "preference__beta": 0.5,
}  # fmt: skip
"""Plain descent: AdamW makes whole steps of what is only the rounding of a small gradient."""


@pytest.fixture(scope="module")
def pairs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    home = tmp_path_factory.mktemp("pairs")
    files = [write_pairs(home / f"{n}.jsonl", random_pairs(n, seed=n)) for n in (48, 12)]
    return Inputs(tiny_llama, *files)


def figures(shop: Outputs, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shop.folder(name).eval / "step-3.json").read_text())
    return found


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_memory_that_runs_out_on_one_of_two_processes_changes_no_loss_and_no_reference(
    task: str, pairs: Inputs, tmp_path: Path, sftplay: Verb
):
    shop = Outputs(tmp_path)

    def run(name: str, failures: list[Any], **environment: str) -> str:
        config = write_small_run(
            tmp_path, pairs, **SETTINGS, task_mode=task, data__processed_dir=str(tmp_path / name), run_name=name
        )
        done = sftplay("train", "--config", config, "--nproc", 2, **hooked(tmp_path, failures, **environment))
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "the same rows again" not in run("whole", [])
    # A window of two micro-batches has four once the first step has failed.
    failures = [(1, 1, 1, "forward"), (0, 2, 4, "backward")]
    said = run("short", failures, OUT_OF_MEMORY_EVAL_ROWS="5")
    assert said.count("the same rows again") == 2
    sizes = [(event["step"], event["batch_size"]) for event in shop.folder("short").read_events()]
    assert [size for size in sizes if size[0]] == [(1, 2), (2, 1)]
    for mine, its in zip(shop.metrics("short"), shop.metrics("whole"), strict=True):
        assert mine["row_ids"] == its["row_ids"]
        assert mine["loss"] == pytest.approx(its["loss"], abs=4e-6)
        for name in ("rewards/margins", "logps/chosen", "tokens/rejected"):
            assert mine[name] == pytest.approx(its[name], rel=1e-5, abs=1e-5), name
    tables = [load_file(shop.folder(name).path / "reference.safetensors") for name in ("short", "whole")]
    for side, table in tables[0].items():
        assert torch.allclose(table, tables[1][side], rtol=1e-6, atol=0), side
    assert figures(shop, "short") == pytest.approx(figures(shop, "whole"), rel=1e-4, abs=1e-5)
    ends = zip(shop.weights("short").values(), shop.weights("whole").values(), strict=True)
    assert max(float((one - two).abs().max()) for one, two in ends) < 1e-5


def test_a_run_takes_another_run_for_its_reference(pairs: Inputs, tmp_path: Path, sftplay: Verb):
    """What the first run measured of the held-out pairs at its end is what the second one starts from."""
    shop = Outputs(tmp_path)
    for name, processes, words in (("first", 1, []), ("second", 2, ["preference.reference=first"])):
        config = write_small_run(tmp_path, pairs, **SETTINGS, task_mode="dpo")
        words = [*words, f"run_name={name}", "--nproc", str(processes)]
        done = sftplay("train", "--config", config, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    table = load_file(shop.folder("second").path / "reference.safetensors")["held_out"].double()
    measured = figures(shop, "first")
    means = table.mean(0).tolist()
    assert means == pytest.approx([measured["logps/chosen"], measured["logps/rejected"]], rel=1e-6)
    start = load_file(shop.folder("first").path / "reference.safetensors")["held_out"].double()
    assert abs(means[0] - float(start.mean(0)[0])) > 0.01, "the first run has learned"
    kl = (torch.tensor(means) - start.mean(0)).mean()
    assert shop.metrics("second")[0]["loss"] != pytest.approx(0.6931, abs=1e-3)
    assert abs(float(kl)) > 0.01

"""Whole runs and their reference: the first loss, the second run on the same rows, a resume, several processes."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from in_process import assert_same_course, stop_and_resume, train
from processes import HANG_S
from safetensors.torch import load_file
from small_run import WORDS, Inputs, write_small_run

ROOT = Path(__file__).resolve().parents[3]
CPU_FSDP = ROOT / "benchmarks" / "cpu_fsdp"


def write_pairs(path: Path, n: int, seed: int) -> Path:
    """Pairs of which the chosen answers speak of the river, and the others of salt."""
    rng, lines = random.Random(seed), list[str]()
    for number in range(n):
        asked = " ".join(rng.choices(WORDS, k=rng.randint(2, 9)))
        answers = [" ".join([word, *rng.choices(WORDS, k=rng.randint(1, 12))]) for word in ("river", "salt")]
        lines.append(json.dumps({"prompt": f"{number} {asked}", "chosen": answers[0], "rejected": answers[1]}) + "\n")
    path.write_text("".join(lines))
    return path


@pytest.fixture(scope="module")
def pairs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    home = tmp_path_factory.mktemp("pairs")
    return Inputs(tiny_llama, write_pairs(home / "train.jsonl", 24, 0), write_pairs(home / "held_out.jsonl", 7, 1))


SETTINGS = {
    "task_mode": "dpo", "train__batch_size": 2, "train__learning_rate": 0.005, "train__optim": "adamw_torch",
    "train__precision": "fp32", "preference__beta": 0.5,
}  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


OTHER_CASES = [("lora", "dpo"), ("full", "kto")]


@pytest.mark.parametrize(
    ("mode", "task"),
    [("full", "dpo"), ("lora", "kto"), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CASES)],
)
def test_a_run_starts_at_its_reference_and_learns(mode: str, task: str, tmp_path: Path, pairs: Inputs, capsys: Any):
    changes = {**SETTINGS, "task_mode": task, "tuning__mode": mode, "eval__before": True, "eval__after": True}
    changes |= {"train__eval_steps": 3, "train__max_steps": 6}
    run = train(tmp_path, pairs, **changes)
    first = math.log(2) if task == "dpo" else 0.5
    assert run.losses[0] == pytest.approx(first, abs=1e-6)
    assert run.losses[-1] < first
    before, step, after = (read(run.folder.eval / f"{name}.json") for name in ("before", "step-3", "after"))
    assert (before["accuracy"], before["margin"]) == (0.5, 0)
    assert before["loss"] == pytest.approx(first, abs=1e-6)
    assert after["accuracy"] > 0.8
    assert after["margin"] > step["margin"] > 0
    assert {"n", "loss", "accuracy", "stderr", "margin", "rewards/chosen", "logps/rejected", "kl"} <= step.keys()
    last = read(run.folder.eval / "step-6.json")
    for name in ("loss", "accuracy", "margin", "logps/chosen", "kl"):
        # A margin is half of four sums near 60, which fp32 holds to 2 ** -18 each.
        tolerance = 2**-17 if name == "margin" else 1e-6
        assert last[name] == pytest.approx(after[name], rel=1e-5, abs=tolerance), name
    answers = [json.loads(line) for line in (run.folder.eval / "after.jsonl").read_text().splitlines()]
    assert {"row", "prompt", "reference", "prediction"} <= answers[0].keys()
    assert "river" in " ".join(line["reference"] for line in answers)
    evaluated = [line for line in run.metrics if "eval_accuracy" in line]
    assert evaluated[0]["eval_margin"] == step["margin"]


def test_a_resume_at_its_reference_has_the_bits_of_a_run_without_a_stop(tmp_path: Path, pairs: Inputs):
    whole = train(tmp_path / "whole", pairs, **SETTINGS, tuning__mode="full")
    resumed = stop_and_resume(tmp_path / "stopped", pairs, 2, **SETTINGS, tuning__mode="full")
    assert_same_course(whole, resumed)


def test_the_next_run_on_the_same_pairs_makes_no_pass(tmp_path: Path, pairs: Inputs, capsys: Any):
    processed = str(tmp_path / "processed")
    first = train(tmp_path / "one", pairs, **SETTINGS, data__processed_dir=processed)
    assert "computing the log-probabilities of 31 rows" in capsys.readouterr().out
    second = train(tmp_path / "two", pairs, **SETTINGS, data__processed_dir=processed)
    said = capsys.readouterr().out
    assert "log-probabilities of 31 rows come from" in said
    assert "computing the log-probabilities" not in said
    assert first.losses == second.losses


Launch = Callable[..., Path]


@pytest.fixture(scope="module")
def launch(
    pairs: Inputs, sftplay: Callable[..., CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> Launch:
    """Trains on so many processes; what was asked for before is not trained again."""

    @cache
    def run(processes: int, **changes: Any) -> Path:
        home = tmp_path_factory.mktemp("run")
        values = {**SETTINGS, "train__max_steps": 3, "train__warmup_ratio": 0.0, "train__eval_steps": 3, **changes}
        config = write_small_run(home, pairs, **values)
        env = {"PYTHONPATH": str(CPU_FSDP)}
        done = sftplay("train", "--config", config, "--nproc", processes, env=env, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return home / "outputs" / "run"

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ("ddp", {"tuning__mode": "full"}),
        ("zero3", {"tuning__mode": "full"}),
        ("fsdp", {"tuning__mode": "full"}),
        ("zero3", {"tuning__mode": "lora", "preference__reference": "adapter_off"}),
        ("fsdp", {"tuning__mode": "lora", "preference__reference": "adapter_off"}),
        ("zero3", {"tuning__mode": "full", "preference__reference": "PATH"}),
        ("fsdp", {"task_mode": "kto", "tuning__mode": "full"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_processes_that_split_the_model_compute_the_reference_of_one(
    strategy: str, changes: dict[str, Any], launch: Launch, pairs: Inputs
):
    if "preference__reference" in changes and changes["preference__reference"] == "PATH":
        changes = {**changes, "preference__reference": str(pairs.model)}
    alone, split = launch(1, **changes), launch(2, **changes, cluster__strategy=strategy)
    tables = [load_file(run / "reference.safetensors") for run in (alone, split)]
    for side, n in (("train", 24), ("held_out", 7)):
        rows = 2 * n if changes.get("task_mode") == "kto" else n
        assert tables[0][side].shape == (rows, 2)
        assert torch.allclose(tables[0][side], tables[1][side], rtol=1e-6, atol=0)
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (alone, split)]
    losses = [[json.loads(line)["loss"] for line in of_run] for of_run in lines]
    assert losses[1][0] == pytest.approx(0.5 if changes.get("task_mode") == "kto" else math.log(2), abs=1e-6)
    assert losses[1] == pytest.approx(losses[0], abs=4e-6)
    found = [read(run / "eval" / "step-3.json") for run in (alone, split)]
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-5), name

"""Runs on preferences that are killed again and again, or go on with another number of processes, end as one that
nobody disturbed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from killed_worker import killed_at, killed_in
from pair_files import random_pairs, write_pairs
from run_outputs import Outputs
from safetensors.torch import load_file
from small_run import Inputs, write_small_run
from untimed_metrics import lines_of

pytestmark = pytest.mark.slow

Verb = Callable[..., CompletedProcess[str]]

STEPS = 6
SETTINGS = {
    "model__max_seq_len": 128, "train__max_steps": STEPS, "train__batch_size": 2, "train__learning_rate": 0.005,
    "train__optim": "adamw_torch", "train__precision": "fp32", "train__save_steps": 2, "train__eval_steps": 2,
    "train__save_total_limit": 9, "eval__limit": 2, "preference__beta": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    home = tmp_path_factory.mktemp("pairs")
    files = [write_pairs(home / f"{n}.jsonl", random_pairs(n, seed=n)) for n in (24, 7)]
    return Inputs(tiny_llama, *files)


def somewhere(rng: Random, *steps: int) -> Callable[[Path], dict[str, str]]:
    """Any moment of one of these steps, whose window is two micro-batches or more."""
    phase, step = rng.choice(("forward", "backward", "optimizer")), rng.choice(steps)
    time = 1 if phase == "optimizer" else rng.randint(1, 4)
    return lambda home: killed_in(home, phase, step, time=time)


RANDOM = Random(33)
KILLS: dict[tuple[str, str], dict[str, Callable[[Path], dict[str, str]]]] = {
    ("dpo", "lora"): {
        "in the pass of the reference": lambda home: killed_in(home, "evaluation", 1, time=3),
        "the reference is in the cache, not in the run folder": lambda home: killed_at(
            home, "os.rename", r"killed/reference\.safetensors$"
        ),
        "before the first checkpoint": somewhere(RANDOM, 1, 2),
        "the first checkpoint is half written": lambda home: killed_at(
            home, "open", r"checkpoint-2/trainer_state\.json$"
        ),
        "while held-out pairs are measured": lambda home: killed_in(home, "evaluation", 4, time=3),
        "behind a checkpoint": somewhere(RANDOM, 5, 6),
    },
    ("kto", "full"): {
        "the reference is not in the cache yet": lambda home: killed_at(
            home, "os.rename", r"references/[^/]*\.safetensors$"
        ),
        "in the pass over mismatched answers": lambda home: killed_in(home, "forward", 2, time=2),
        "between checkpoints": somewhere(RANDOM, 3, 4),
        "the second checkpoint has no marker yet": lambda home: killed_at(
            home, "os.rename", r"checkpoint-4/COMPLETE\.json$"
        ),
        "the result is not saved": lambda home: killed_at(home, "os.mkdir", r"\.model\.part$"),
    },
}  # fmt: skip


@pytest.mark.contract
@pytest.mark.parametrize(("task", "mode"), KILLS)
def test_a_run_killed_again_and_again_ends_with_the_bits_of_one_that_was_not(
    task: str, mode: str, pairs: Inputs, tmp_path: Path, sftplay: Verb
):
    def run(verb: str, name: str, env: dict[str, str]) -> CompletedProcess[str]:
        processed = str(tmp_path / name)  # else the pass of one would serve the other
        changes = {**SETTINGS, "task_mode": task, "tuning__mode": mode, "data__processed_dir": processed}
        config = write_small_run(tmp_path, pairs, f"{name}.yaml", **changes)
        return sftplay(verb, "--config", config, f"run_name={name}", env=env)

    done = run("train", "whole", {})
    assert done.returncode == 0, done.stdout + done.stderr
    verb, passes = "train", 0
    for moment, environment in KILLS[task, mode].items():
        done = run(verb, "killed", environment(tmp_path))
        assert done.returncode == 5, (moment, done.stdout + done.stderr)
        passes += "computing the log-probabilities" in done.stdout
        verb = "resume"
    done = run("resume", "killed", {})
    assert done.returncode == 0, done.stdout + done.stderr
    assert passes == 2  # the first kill loses one, and no later one does
    whole, killed = (tmp_path / "outputs" / name for name in ("whole", "killed"))
    assert lines_of(killed) == lines_of(whole)
    assert [line["step"] for line in lines_of(whole)] == list(range(1, STEPS + 1))
    results = [*whole.rglob("adapter/*.safetensors"), *whole.rglob("model/*.safetensors")]
    evaluations = list((whole / "eval").iterdir())
    assert {"step-2.json", "step-6.json", "step-4.jsonl"} <= {path.name for path in evaluations}
    assert len(results) == 1
    for path in results + evaluations:
        assert (killed / path.relative_to(whole)).read_bytes() == path.read_bytes(), path.name
    references = [load_file(run / "reference.safetensors") for run in (whole, killed)]
    assert all(torch.equal(table, references[1][side]) for side, table in references[0].items())


@pytest.mark.parametrize(
    ("task", "mode", "numbers"), [("dpo", "lora", (2, 1, 2)), ("kto", "full", (1, 2, 1))], ids=lambda value: str(value)
)
def test_a_run_goes_on_with_another_number_of_processes_on_the_same_curve(
    task: str, mode: str, numbers: tuple[int, ...], pairs: Inputs, tmp_path: Path, sftplay: Verb
):
    """Steps 1 and 2, 3 and 4, 5 and 6 are on these numbers of processes."""
    config = write_small_run(tmp_path, pairs, **SETTINGS, task_mode=task, tuning__mode=mode)
    shop = Outputs(tmp_path)

    def run(verb: str, name: str, processes: int) -> str:
        done = sftplay(verb, "--config", config, f"run_name={name}", "--nproc", processes)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("train", "whole", numbers[0])
    shutil.copytree(shop.folder("whole").path, shop.folder("moved").path)
    for step, before, now in zip((2, 4), numbers, numbers[1:], strict=False):
        shop.cut_off("moved", step)
        said = run("resume", "moved", now)
        assert f"began on {before} process(es) and continues on {now}" in said
        assert "computing the log-probabilities" not in said
    moved, whole = shop.metrics("moved"), shop.metrics("whole")
    sizes = [len(line["row_ids"]) for line in moved]
    assert sizes == [number for number in numbers for _ in (1, 2)]
    names = ("loss", "rewards/chosen", "rewards/margins", "logps/rejected", "kl", "tokens/chosen")
    for mine, its in zip(moved, whole, strict=True):
        rows, others = (sorted(row for rank in line["row_ids"] for row in rank) for line in (mine, its))
        assert rows == others
        assert mine["loss"] == pytest.approx(its["loss"], abs=4e-6)
        for name in names:
            assert mine[name] == pytest.approx(its[name], rel=1e-5, abs=1e-4), (mine["step"], name)
    figures: list[dict[str, Any]] = [
        json.loads((shop.folder(name).eval / "step-6.json").read_text()) for name in ("moved", "whole")
    ]
    assert figures[0] == pytest.approx(figures[1], rel=1e-4, abs=1e-5)

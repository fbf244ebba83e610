"""The rest of a drawing in a checkpoint: what is kept, and for which sizes it can be used again."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sftplay import log
from sftplay.errors import RunError
from sftplay.tasks.grpo.rollouts import load_window, save_window, window_path


def trainer_with(*, accum: int, steps: int = 2, iterations: int = 1, step: int = 0) -> Any:
    """A trainer whose drawings feed `steps` optimizer steps, each of `accum` micro-batches, `iterations` times."""
    return SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=accum, steps_per_generation=steps * accum),
        num_iterations=iterations,
        state=SimpleNamespace(global_step=step),
        accelerator=SimpleNamespace(device=torch.device("cpu", 0)),  # so accelerate calls it for several processes
        rollout_figures={"reward": 0.25, "true_reward": None},
        _step=0,
        _buffered_inputs=None,
    )


def drawing(micro_batches: int, rows: int) -> list[dict[str, Any]]:
    """Micro-batches of different widths, as they are where padding is cut off."""
    return [
        {
            "completion_ids": torch.arange(rows * (3 + n)).reshape(rows, 3 + n) + 100 * n,
            "advantages": torch.arange(rows) / 7 + n,
            "row": torch.arange(rows) + 10 * n,
            "num_items_in_batch": torch.tensor(5.0),
            "old_per_token_logps": None,
        }
        for n in range(micro_batches)
    ]


def saved(folder: Path, *, step: int, **sizes: Any) -> Path:
    trainer = trainer_with(step=step, **sizes)
    trainer._buffered_inputs = drawing(trainer.args.steps_per_generation, rows=4)
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    save_window(trainer, checkpoint)
    return checkpoint


@pytest.mark.parametrize(("step", "iterations", "is_kept"), [(4, 1, False), (5, 1, True), (6, 2, True), (8, 2, False)])
def test_only_a_drawing_that_is_still_learned_from_is_kept(step: int, iterations: int, is_kept: bool, tmp_path: Path):
    checkpoint = saved(tmp_path, step=step, accum=1, iterations=iterations)
    assert window_path(checkpoint).exists() is is_kept
    trainer = trainer_with(accum=1, iterations=iterations)
    load_window(trainer, checkpoint)
    assert (trainer._buffered_inputs is not None) is is_kept
    assert trainer._step == step


def test_smaller_micro_batches_after_memory_ran_out_are_parts_of_the_kept_ones(tmp_path: Path):
    checkpoint = saved(tmp_path, step=1, accum=1)
    trainer = trainer_with(accum=2)
    load_window(trainer, checkpoint)
    assert trainer._step == 2
    assert [batch["row"].tolist() for batch in trainer._buffered_inputs] == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert (
        trainer._buffered_inputs[3]["completion_ids"].tolist() == drawing(2, rows=4)[1]["completion_ids"][2:].tolist()
    )


@pytest.mark.parametrize("change", ["more processes", "larger micro-batches"])
def test_a_drawing_of_other_sizes_is_refused_with_both(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint = saved(tmp_path, step=1, accum=2)
    if change == "more processes":
        monkeypatch.setattr(log, "world_size", lambda: 2)
    accum = 1 if change == "larger micro-batches" else 2
    said = "inside a rollout batch of 1 processes with 4 micro-batches each; now there are"
    with pytest.raises(RunError, match=re.escape(said)):
        load_window(trainer_with(accum=accum), checkpoint)

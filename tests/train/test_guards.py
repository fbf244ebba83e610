"""A run ends in good order: after the step in which a signal came, and before a step that is not finite."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from sftplay.errors import RunError
from sftplay.heartbeat import Heartbeat
from sftplay.train.guards import FP16_PATIENCE, StopOnBadStep, StopOnSignal


def model_with_gradient(value: float) -> Any:
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def check(guard: StopOnBadStep, loss: float, gradient: float, *, fp16: bool = False) -> None:
    guard.attach(
        SimpleNamespace(
            last_loss=torch.tensor(loss), heartbeat=Heartbeat(), last_rows=[8, 5, 2], rows_not_finite=lambda: [5]
        )
    )
    state = TrainerState(global_step=6)
    guard.on_pre_optimizer_step(
        SimpleNamespace(fp16=fp16), state, TrainerControl(), model=model_with_gradient(gradient)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_or_gradient_that_is_not_finite_ends_the_run_and_names_the_rows(bad: float, tmp_path: Path):
    path = tmp_path / "bad_step.json"
    guard = StopOnBadStep(path)
    check(guard, 2.0, 1.0)
    assert not path.exists()
    with pytest.raises(RunError, match="the loss of step 7 is not finite on rank 0; rows that are not finite alone: 5"):
        check(guard, bad, 1.0)
    with pytest.raises(RunError, match="the gradient of step 7 is not finite"):
        check(guard, 2.0, bad)
    written = json.loads(path.read_text())
    assert written["step"] == 7
    assert [(each["rank"], each["row_ids"], each["rows_not_finite"]) for each in written["ranks"]] == [
        (0, [8, 5, 2], [5])
    ]


def test_fp16_run_may_skip_as_many_steps_as_its_scale_can_be_halved(tmp_path: Path):
    guard = StopOnBadStep(tmp_path / "bad_step.json")
    for _ in range(FP16_PATIENCE):
        check(guard, 2.0, math.inf, fp16=True)
    check(guard, 2.0, 1.0, fp16=True)  # one good step and the count starts again
    for _ in range(FP16_PATIENCE):
        check(guard, math.nan, 1.0, fp16=True)
    with pytest.raises(RunError, match="the loss of step 7"):
        check(guard, math.nan, 1.0, fp16=True)


def test_the_norm_of_sharded_gradients_is_whole(tmp_path: Path):
    guard = StopOnBadStep(tmp_path / "bad_step.json")
    norm = SimpleNamespace(full_tensor=lambda: torch.tensor(math.nan))
    guard.attach(SimpleNamespace(last_loss=1.0, clipped_norm=norm, heartbeat=None, rows_not_finite=list, last_rows=[3]))
    with pytest.raises(RunError, match="the gradient of step 5 is not finite"):
        guard.on_pre_optimizer_step(SimpleNamespace(fp16=False), TrainerState(global_step=4), TrainerControl())


def test_a_signal_counts_on_all_ranks_at_the_next_step_and_once(monkeypatch: pytest.MonkeyPatch):
    stop = StopOnSignal()
    stop.attach(SimpleNamespace(heartbeat=Heartbeat()))
    sigterm = int(signal.SIGTERM)
    others = iter([0, sigterm])  # another rank reports it at the second step

    def gather(numbers: list[int], _heartbeat: Any) -> list[list[int]]:
        return [list(numbers), [next(others)]]

    monkeypatch.setattr("sftplay.train.guards.gather_numbers", gather)
    stops = [stop.on_step_end(None, TrainerState(), TrainerControl()).should_training_stop for _ in range(2)]
    assert (stops, stop.received) == ([False, True], sigterm)
    stop._on_signal(sigterm, None)  # this rank's own first one: a second one would end this very process
    assert stop.received == sigterm

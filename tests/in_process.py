"""Runs a task of the kit inside the test process, as a worker would, and hands out what it really built."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import documents
import torch
from safetensors.torch import load_file
from small_run import Inputs, write_small_run
from untimed_metrics import untimed

from sftplay.atomic import write_text
from sftplay.config.load import load_config, load_resolved
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe
from sftplay.plan.sizing import size_run
from sftplay.tasks.worker import find_runner
from sftplay.train.guards import StopOnSignal
from sftplay.train.train_run import TrainResult, TrainRun


@dataclass
class Finished:
    """A run that has ended, with the trainer it used."""

    cfg: RunConfig
    folder: RunFolder
    outcome: TrainResult
    trainer: Any

    @property
    def metrics(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.folder.metrics.read_text().splitlines()]
        for line in lines:
            documents.check(line, "files/metrics.jsonl")
        return lines

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the result by file and name."""
        assert self.folder.result is not None
        found = {}
        for path in sorted(self.folder.result.rglob("*.safetensors")):
            found |= {f"{path.parent.name}/{name}": tensor for name, tensor in load_file(path).items()}
        return found


class StopAfter(StopOnSignal):
    """Behaves as if SIGTERM had come during step `step`."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == self.step:
            self.received = int(signal.SIGTERM)
        return super().on_step_end(args, state, control)


def written_config(home: Path, inputs: Inputs, **changes: Any) -> Path:
    """A small run's YAML below `home`, without warm-up; keyword `a__b=c` sets the key a.b."""
    return write_small_run(home, inputs, **{"train__warmup_ratio": 0.0, **changes})


def sized(config: Path) -> RunConfig:
    """The config as a worker reads it: every `auto` decided."""
    cfg = load_config(config)
    vocab = None if cfg.model.name.startswith("builtin:") else 400
    return size_run(cfg, probe(), vocab_size=vocab).cfg


def new_run(home: Path, inputs: Inputs, **changes: Any) -> tuple[RunConfig, RunFolder]:
    """A run folder as `train` leaves it for its workers, and the config read back from it."""
    cfg = sized(written_config(home, inputs, **changes))
    folder = RunFolder(home / "outputs" / "run")
    folder.create()
    write_text(folder.resolved, dump_resolved(cfg))
    folder.write_json("plan.json", {"batch_size": cfg.train.batch_size})
    return load_resolved(folder.resolved), folder


def train(home: Path, inputs: Inputs, *, stop: StopOnSignal | None = None, **changes: Any) -> Finished:
    """Train a fresh run below `home`."""
    cfg, folder = new_run(home, inputs, **changes)
    return train_in(cfg, folder, stop)


def train_in(cfg: RunConfig, folder: RunFolder, stop: StopOnSignal | None = None) -> Finished:
    """Train in a run folder that is there already; `cfg.train.resume` says from where."""
    seen: list[Any] = []
    real = TrainRun.train

    def train_and_keep(self: TrainRun, trainer: Any) -> TrainResult:
        seen.append(trainer)
        return real(self, trainer)

    torch.set_num_threads(1)
    with patch.object(TrainRun, "train", train_and_keep):
        outcome = find_runner(cfg.task_mode)(cfg, folder=folder, stop=stop or StopOnSignal())
    return Finished(cfg, folder, outcome, seen[0])


def stop_and_resume(home: Path, inputs: Inputs, step: int, **changes: Any) -> Finished:
    """The run of `train` with a SIGTERM during `step`, resumed to its end."""
    cfg, folder = new_run(home, inputs, **changes)
    stopped = train_in(cfg, folder, StopAfter(step))
    assert (stopped.outcome.stop_signal, stopped.outcome.step) == (signal.SIGTERM, step)
    assert folder.result is None
    return train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)


def assert_same_course(one: Finished, other: Finished) -> None:
    """Both ended with the same bits, line by line and weight by weight."""
    assert untimed(one.metrics) == untimed(other.metrics)
    first, second = one.weights, other.weights
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def built(home: Path, inputs: Inputs, **changes: Any) -> Finished:
    """Everything up to the first step: model, rows, arguments, callbacks; nothing is trained."""
    cfg, folder = new_run(home, inputs, **changes)
    seen: list[Any] = []

    def keep(self: TrainRun, trainer: Any) -> TrainResult:
        self.attach(trainer)
        seen.append(trainer)
        return TrainResult(0, 0.0, 0.0, stop_signal=int(signal.SIGTERM))

    torch.set_num_threads(1)
    with patch.object(TrainRun, "train", keep):
        outcome = find_runner(cfg.task_mode)(cfg, folder=folder, stop=StopOnSignal())
    return Finished(cfg, folder, outcome, seen[0])

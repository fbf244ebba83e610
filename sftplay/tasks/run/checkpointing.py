"""Ties the Trainer's checkpoints to the kit's rule of which ones count, and picks the one to resume from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, DataError, RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.monitor.checkpoints import (
    find_damage,
    mark_complete,
    newest_complete,
    read_marker,
    rotate,
    set_aside,
    step_of,
)
from sftplay.monitor.disk import checkpoint_bytes, demand_room
from sftplay.monitor.guards import StopOnBadStep, StopOnSignal
from sftplay.monitor.metrics import Meters, print_progress
from sftplay.tasks.run.fingerprint import config_changes, data_changes, weights_changes


@dataclass(frozen=True)
class Watched:
    """The callbacks whose findings go into a checkpoint, or end the run behind one."""

    meters: Meters
    bad_step: StopOnBadStep
    stop: StopOnSignal


class MarkComplete(TrainerCallback):
    """Looks for room before a save. After it all ranks meet, the main one brings the files to disk, marks them, then
    removes old ones."""

    def __init__(self, folder: RunFolder, facts: dict[str, Any], limit: int, watched: Watched) -> None:
        self.folder, self.facts, self.limit, self.watched = folder, facts, limit, watched

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        # A line of metrics ends with each checkpoint; else a resumed run's next line would miss the steps before it.
        control.should_log = control.should_log or control.should_save
        if control.should_save and log.is_main():
            checkpoints = self.folder.checkpoints
            demand_room(checkpoints, checkpoint_bytes(checkpoints, more["model"], more["optimizer"]))
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._meet()
        if log.is_main():
            self._mark(state)
        self._meet()  # no rank ends, and lets the launcher end the others, while files are written
        # A signal that came while this checkpoint was written needs neither another step nor another checkpoint.
        if self.watched.stop.agree():
            control.should_training_stop = True

    def _meet(self) -> None:
        if log.world_size() > 1:
            with self.watched.stop.heartbeat.within("communication"):
                torch.distributed.barrier()

    def _mark(self, state: Any) -> None:
        checkpoint = self.folder.checkpoints / f"checkpoint-{state.global_step}"
        if self.watched.bad_step.in_a_row:
            log.say(f"{checkpoint.name} does not count: the step before it was skipped, its numbers were not finite")
            return
        mark_complete(checkpoint, self.facts | {"counters": self.watched.meters.seen})
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        rotate(self.folder.checkpoints, self.limit, best)
        self.folder.update_status(step=state.global_step, last_checkpoint=str(checkpoint))
        print_progress(state, state.save_steps, f"checkpoint at step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        loss = logs.get("loss")
        if log.is_main() and loss is not None and math.isfinite(loss):
            self.folder.update_status(step=state.global_step, **self.watched.meters.seen)


def choose_checkpoint(cfg: RunConfig, folder: RunFolder, facts: dict[str, Any]) -> Path | None:
    """The checkpoint `train.resume` asks for, None to start from the beginning. `facts` are this run's, as
    `MarkComplete` would mark them.

    Raises:
        ConfigError: the path named is no complete checkpoint, or config or starting weights have changed since.
        DataError: the rows have changed since.
        RunError: it belongs to another order of the data. In all three, going on would not be the same run.
    """
    wanted = cfg.train.resume
    if wanted == "never":
        return None
    if wanted == "auto":
        checkpoint, passed_over = newest_complete(folder.checkpoints)
        for line in passed_over:
            log.say(line, "resume")
        if checkpoint is None:
            log.say("no complete checkpoint: starting from the beginning", "resume")
            _clear_the_way(folder, after_step=0)
            return None
    else:
        checkpoint = Path(wanted)
        damage = find_damage(checkpoint) if checkpoint.is_dir() else "no such folder"
        if damage:
            raise ConfigError(
                f"{wanted} cannot be resumed: {damage}",
                where=f"{cfg.origins.get('train.resume', '')} train.resume".strip(),
                fix="use train.resume=auto, which finds the newest complete checkpoint",
            )
    check_same_run(checkpoint, facts, resized=folder.is_resized)
    log.say(f"continuing from {checkpoint}", "resume")
    _clear_the_way(folder, after_step=step_of(checkpoint))
    return checkpoint


def check_same_run(checkpoint: Path, facts: dict[str, Any], *, resized: bool = False) -> None:
    """Raise what `choose_checkpoint` raises unless the checkpoint comes from a run with the same `facts`."""
    marked = read_marker(checkpoint)
    if changed := config_changes(marked, facts, resized=resized):
        raise ConfigError(
            "the config has changed since this checkpoint: " + "; ".join(changed),
            where=str(checkpoint),
            fix="restore it (processes: NPROC=), or train under a new run_name",
        )
    if changed := weights_changes(marked, facts):
        raise ConfigError(
            "the model that the run starts from has changed since this checkpoint: " + "; ".join(changed),
            where=str(checkpoint),
            fix="restore its files, or train under a new run_name",
        )
    if changed := data_changes(marked, facts):
        raise DataError(
            "the rows have changed since this checkpoint: " + "; ".join(changed),
            where=str(checkpoint),
            fix="restore the data of the first start, or train under a new run_name",
        )
    if marked.get("order_hash") != facts["order_hash"]:
        raise RunError(
            "the order of the rows has changed since this checkpoint",
            where=str(checkpoint),
            fix="continue with the kit and the data it was made with, or train under a new run_name",
        )


def accept_numbered_cpus() -> None:
    """Let torch.load put tensors on `cpu:0`: transformers asks for that when several processes resume on CPUs, where
    accelerate numbers the one device there is (transformers 5.17, `_load_optimizer_and_scheduler`)."""
    torch.serialization.register_package(
        priority=100,
        tagger=lambda _storage: None,
        deserializer=lambda storage, location: storage if location.startswith("cpu:") else None,
    )


def _clear_the_way(folder: RunFolder, *, after_step: int) -> None:
    if log.is_main():
        for name in set_aside(folder.checkpoints, after_step=after_step):
            log.say(f"{name} is not continued: moved to {folder.checkpoints / 'incomplete'}", "resume")

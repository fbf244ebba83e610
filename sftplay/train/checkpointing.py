"""Marks the Trainer's checkpoints complete, and chooses the one to resume from."""

from __future__ import annotations

import math
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sftplay import log
from sftplay.atomic import use_umask
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError, RunError, SftplayError
from sftplay.launch.checkpoints import (
    find_damage,
    mark_complete,
    newest_complete,
    read_marker,
    read_step,
    rotate,
    set_aside,
)
from sftplay.launch.run_folder import RunFolder
from sftplay.train.disk import check_room, checkpoint_bytes
from sftplay.train.fingerprint import config_changes, data_changes, weights_changes
from sftplay.train.guards import StopOnBadStep, StopOnSignal
from sftplay.train.metrics import MetricsWriter, print_progress
from sftplay.train.observer import Observer
from sftplay.train.readable import find_unreadable


class MarkComplete(Observer):
    """Checks the room on the disk before a save, and marks the checkpoint complete after it.

    All ranks wait while the main one syncs the files to disk, marks the checkpoint and removes old ones. A resume
    compares `facts`; `limit` checkpoints are kept. A thread notes steps in status.json, so that a step waits
    for no more than the note before it.
    """

    def __init__(
        self, folder: RunFolder, facts: dict[str, Any], *,
        limit: int, metrics: MetricsWriter, bad_step: StopOnBadStep, stop: StopOnSignal,
    ) -> None:  # fmt: skip
        self.folder, self.facts, self.limit = folder, facts, limit
        self.metrics, self.bad_step, self.stop = metrics, bad_step, stop
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="status")
        self._note: Future[None] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        # A line of metrics ends at each checkpoint; otherwise a resumed run's next line would miss the steps before it.
        control.should_log = control.should_log or control.should_save
        if control.should_save and log.is_main():
            checkpoints = self.folder.checkpoints
            check_room(checkpoints, checkpoint_bytes(checkpoints, more["model"], optimizer=more["optimizer"]))
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._barrier()
        if log.is_main():
            self._mark(state)
        self._barrier()  # while files are written no rank may end: its launcher would end the others
        # A signal that came while this checkpoint was written needs no other step and no other checkpoint.
        if self.stop.agree():
            control.should_training_stop = True

    def _barrier(self) -> None:
        if log.world_size() > 1:
            with self.trainer.heartbeat.within("communication"):
                torch.distributed.barrier()

    def _mark(self, state: Any) -> None:
        checkpoint = self.folder.checkpoints / f"checkpoint-{state.global_step}"
        if self.bad_step.skipped_in_a_row:
            log.say(f"{checkpoint.name} does not count: the step before it was skipped (its numbers were not finite)")
            return
        use_umask(checkpoint)
        sources = {name: asdict(totals) for name, totals in self.metrics.sources.items()}
        mark_complete(checkpoint, self.facts | {"counters": self.metrics.totals, "sources": sources})
        best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
        rotate(self.folder.checkpoints, self.limit, best=best)
        self._finish_note()
        self.folder.update_status(step=state.global_step, last_checkpoint=str(checkpoint))
        print_progress(state, state.save_steps, text=f"checkpoint at step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        loss = logs.get("loss")
        if log.is_main() and loss is not None and math.isfinite(loss):
            self._finish_note()
            facts = {"step": state.global_step, **self.metrics.totals}
            self._note = self._thread.submit(self.folder.update_status, **facts)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._finish_note()

    def _finish_note(self) -> None:
        """Wait until the last step is noted. Raises what went wrong with it, such as a full disk."""
        if self._note is not None:
            self._note.result()

    def close(self) -> None:
        """Wait likewise, whatever went wrong; nothing is noted afterwards."""
        self._thread.shutdown()


def choose_checkpoint(cfg: RunConfig, folder: RunFolder, *, facts: dict[str, Any]) -> Path | None:
    """Choose the checkpoint that `train.resume` asks for; None to start from the beginning.

    `facts` are those of this run, which `MarkComplete` would write.

    Raises:
        ConfigError: the path is no complete checkpoint, or config or starting weights have changed since.
        DataError: the rows have changed since.
        RunError: it belongs to another order of the rows. In all three cases it would not be the same run.
    """
    wanted = cfg.train.resume
    if wanted == "never":
        return None
    if wanted == "auto":
        checkpoint, skipped = newest_complete(folder.checkpoints, find_unreadable)
        for line in skipped:
            log.say(line, "resume")
        if checkpoint is None:
            log.say("no complete checkpoint: starting from the beginning", "resume")
            _set_others_aside(folder, after_step=0)
            return None
    else:
        checkpoint = Path(wanted)
        damage = find_damage(checkpoint) or find_unreadable(checkpoint) if checkpoint.is_dir() else "no such folder"
        if damage:
            raise ConfigError(
                f"{wanted} cannot be resumed: {damage}",
                where=f"{cfg.origins.get('train.resume', '')} train.resume".strip(),
                fix="use train.resume=auto, which finds the newest complete checkpoint",
            )
    _check_same_run(checkpoint, facts, resized=folder.is_resized)
    log.say(f"continuing from {checkpoint}", "resume")
    _set_others_aside(folder, after_step=read_step(checkpoint))
    return checkpoint


def _check_same_run(checkpoint: Path, facts: dict[str, Any], *, resized: bool) -> None:
    marked, new_name = read_marker(checkpoint), "or train under a new run_name"
    changes: list[tuple[type[SftplayError], str, list[str], str]] = [
        (ConfigError, "config", config_changes(marked, facts, resized=resized), "restore it (processes: NPROC=)"),
        (ConfigError, "model that the run starts from", weights_changes(marked, facts), "restore its files"),
        (DataError, "rows", data_changes(marked, facts), "restore the data of the first start"),
    ]
    for error, what, changed, fix in changes:
        if changed:
            verb = "have" if what == "rows" else "has"
            raise error(
                f"the {what} {verb} changed since this checkpoint: {'; '.join(changed)}",
                where=str(checkpoint),
                fix=f"{fix}, {new_name}",
            )
    if marked.get("order_hash") != facts["order_hash"]:
        raise RunError(
            "the order of the rows has changed since this checkpoint",
            where=str(checkpoint),
            fix=f"continue with the kit and the data it was made with, {new_name}",
        )


def accept_numbered_cpus() -> None:
    """Let torch.load put tensors on `cpu:0`.

    Several processes that resume on CPUs ask for it, because accelerate gives the only device a number (transformers
    5.17, `_load_optimizer_and_scheduler`; 5.23 no longer asks).
    """
    torch.serialization.register_package(
        priority=100,
        tagger=lambda _storage: None,
        deserializer=lambda storage, location: storage if location.startswith("cpu:") else None,
    )


def _set_others_aside(folder: RunFolder, *, after_step: int) -> None:
    if log.is_main():
        for name in set_aside(folder.checkpoints, after_step=after_step):
            log.say(f"{name} is not continued: moved to {folder.checkpoints / 'incomplete'}", "resume")

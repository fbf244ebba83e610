"""Ties the Trainer's checkpoints to the kit's rule of which ones count, and picks the one to resume from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sftplay import log
from sftplay.config.schema import RunConfig
from sftplay.errors import ConfigError, RunError
from sftplay.launch.folder import RunFolder
from sftplay.watch.checkpoints import (
    find_damage,
    mark_complete,
    newest_complete,
    read_marker,
    rotate,
    set_aside,
    step_of,
)
from sftplay.watch.meters import tell


class MarkComplete(TrainerCallback):
    """After each save: all ranks meet, the main one brings the files to disk, marks them, then removes old ones."""

    def __init__(self, folder: RunFolder, facts: dict[str, Any], limit: int) -> None:
        self.folder, self.facts, self.limit = folder, facts, limit

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        # A line of metrics ends with each checkpoint; else a resumed run's next line would miss the steps before it.
        control.should_log = control.should_log or control.should_save
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if log.world_size() > 1:
            torch.distributed.barrier()
        if log.is_main():
            checkpoint = self.folder.checkpoints / f"checkpoint-{state.global_step}"
            mark_complete(checkpoint, self.facts)
            best = Path(state.best_model_checkpoint) if state.best_model_checkpoint else None
            rotate(self.folder.checkpoints, self.limit, best)
            self.folder.update_status(step=state.global_step, last_checkpoint=str(checkpoint))
            tell(state, state.save_steps, f"checkpoint at step {state.global_step}")
        if log.world_size() > 1:
            torch.distributed.barrier()  # no rank ends, and lets the launcher end the others, while files are written

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        loss = logs.get("loss")
        if log.is_main() and loss is not None and math.isfinite(loss):
            self.folder.update_status(step=state.global_step)


def choose_checkpoint(cfg: RunConfig, folder: RunFolder, order_hash: str) -> Path | None:
    """The checkpoint `train.resume` asks for, None to start from the beginning.

    Raises:
        ConfigError: the path named is no complete checkpoint.
        RunError: it belongs to another order of the data, so going on would not be the same run.
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
    if read_marker(checkpoint).get("order_hash") != order_hash:
        raise RunError(
            "the rows or their order have changed since this checkpoint",
            where=str(checkpoint),
            fix="restore the data files and data options of the first start, or train under a new run_name",
        )
    log.say(f"continuing from {checkpoint}", "resume")
    _clear_the_way(folder, after_step=step_of(checkpoint))
    return checkpoint


def _clear_the_way(folder: RunFolder, *, after_step: int) -> None:
    if log.is_main():
        for name in set_aside(folder.checkpoints, after_step=after_step):
            log.say(f"{name} is not continued: moved to {folder.checkpoints / 'incomplete'}", "resume")

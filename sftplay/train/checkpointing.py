"""The fingerprint of a run, its checkpoints marked complete with it, and the choice of the one to resume from."""

from __future__ import annotations

import hashlib
import math
import pickle
import random
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError, safe_open
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from sftplay import __version__, log
from sftplay.atomic import use_umask
from sftplay.config.keys import DRAWN, SIZES, differences, held_out_decides, values_that_decide_weights
from sftplay.config.run import RunConfig
from sftplay.config.section import find_spec
from sftplay.data.render.render import Renderer
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
from sftplay.model.source import describe_pickle, locate
from sftplay.model.start_point import weights_digest, weights_digests
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.guards import StopOnBadStep, StopOnSignal, check_room, checkpoint_bytes
from sftplay.train.metrics import MetricsWriter, Observer, print_progress
from sftplay.train.task import Rows

if TYPE_CHECKING:
    from sftplay.model.new_tokens import NewToken


BATCH_ROWS = 1000


def describe_renderer(renderer: Renderer) -> dict[str, Any]:
    """Return what a renderer adds to the fingerprint and the manifest of a run."""
    return {
        "template_sha256": renderer.template_hash,
        "tokenizer_sha256": hashlib.sha256(renderer.recipe().tokenizer.encode()).hexdigest(),
        "mask_method": renderer.method,
    }


def compute_fingerprint(cfg: RunConfig, rows: Rows, *, new_tokens: Sequence[NewToken] = ()) -> dict[str, Any]:
    """Return config, files, rows, template, tokenizer, starting weights, processes and kit of this run; plain JSON."""
    digests = [rows.order.digest if rows.order else rows_digest(part) for part in (rows.train, rows.held_out)]
    return {
        "kit": __version__,
        "config": values_that_decide_weights(cfg),
        "world_size": log.world_size(),
        "data_files": rows.report["files"],
        "rows": len(rows.train),
        "rows_sha256": digests[0],
        "held_out_sha256": digests[1] if rows.held_out is not None else None,
        "template_sha256": rows.recipe.get("template_sha256"),
        "tokenizer_sha256": rows.recipe.get("tokenizer_sha256"),
        "new_tokens": {token.content: token.id for token in new_tokens},
        "weights": starting_weights(cfg),
    }


def starting_weights(cfg: RunConfig) -> dict[str, str]:
    """Map each file of weights that the run starts from to its digest; empty where it starts from its seed."""
    if not cfg.task.reads_text:
        start = find_spec(cfg).start_from(cfg)
        return {} if start is None else {start: weights_digest(Path(start))}
    return weights_digests(locate(cfg.model.name)) | weights_digests(cfg.model.adapter)


def weights_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each changed file of the base, or of the adapter that the run starts from.

    A file that has the same name and content in another folder, as in a cache that was moved, has not changed.
    """
    if "weights" not in before or "weights" not in now:
        return []
    old, new = before["weights"], now["weights"]
    kept = {(Path(path).name, old[path]) for path in old} & {(Path(path).name, new[path]) for path in new}
    return [
        f"{path} has changed (content {_shorten(old.get(path))} then, {_shorten(new.get(path))} now)"
        for path in sorted({*old, *new})
        if old.get(path) != new.get(path)
        and any((Path(path).name, side[path]) not in kept for side in (old, new) if path in side)
    ]


def rows_digest(rows: Any) -> str:
    """Return a hex sha256 of all token ids and labels, row by row; it does not depend on how they are stored."""
    digest = hashlib.sha256()
    tables = [] if rows is None else rows.select_columns(["input_ids", "labels"]).with_format("arrow").iter(BATCH_ROWS)
    for table in tables:
        for chunk in (chunk for name in table.column_names for chunk in table[name].chunks):
            for numbers in (chunk.value_lengths(), chunk.flatten()):
                digest.update(numbers.cast(pa.int64()).to_numpy(zero_copy_only=False).tobytes())
    return digest.hexdigest()


def config_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, resized: bool = False) -> list[str]:
    """Return a line for each config key, and for the number of processes, that makes this another run.

    `resized` allows other sizes and another number of processes: the launching command keeps the sizes of the first
    start unless they do not fit this machine or that number.
    """
    if "config" not in before or "config" not in now:
        return []
    changed = [
        f"{key} was {old!r} and is {new!r} now"
        for key, old, new in differences(before["config"], now["config"])
        if not (resized and key in (*SIZES, DRAWN))
    ]
    if before.get("world_size") not in (None, now["world_size"]) and not resized:
        changed.append(f"it ran on {before['world_size']} processes and runs on {now['world_size']} now")
    return changed


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return lines that say why the rows have changed, their own digests last; empty when every token is the same."""
    if "rows_sha256" not in before or "rows_sha256" not in now:
        return []
    compared = {"rows_sha256": "training rows"}
    if held_out_decides(now["config"]):
        compared["held_out_sha256"] = "held-out rows"
    lines = [
        f"{what}: fingerprint {_shorten(before[key])} then, {_shorten(now[key])} now"
        for key, what in compared.items()
        if before[key] != now[key]
    ]
    if not lines:
        return []
    if before["rows"] != now["rows"]:
        lines[0] += f", {before['rows']:,} then, {now['rows']:,} now"
    causes = [
        f"{path} has changed (content {_shorten(old)} then, {_shorten(now['data_files'].get(path))} now)"
        for path, old in before["data_files"].items()
        if now["data_files"].get(path) != old
    ]
    for key, what in (("tokenizer_sha256", "tokenizer"), ("template_sha256", "chat template")):
        if before[key] != now[key]:
            causes.append(f"the {what} has changed ({_shorten(before[key])} then, {_shorten(now[key])} now)")
    if before["kit"] != now["kit"]:
        causes.append(f"the kit was {before['kit']} and is {now['kit']} now")
    return [*causes, *lines]


def _shorten(digest: str | None) -> str:
    return digest[:12] if digest else "none"


STATE, ODD = "trainer_state.json", "is not what the Trainer writes"

PICKLES = {
    "optimizer.pt": {"state", "param_groups"},
    "optimizer.bin": set(),
    "scheduler.pt": set(),
    "scaler.pt": set(),
    "rng_state*.pth": {"python", "numpy", "cpu"},
    "pytorch_model*.bin": set(),
    "adapter_model.bin": set(),
}
"""The pickles that the Trainer opens when it resumes, and the keys that it must find in them. DeepSpeed keeps its own
in folders."""

PICKLE_ERRORS = (
    pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, EOFError,
    OSError, AssertionError, MemoryError, struct.error,
)  # fmt: skip
"""Errors of torch.load on a forged pickle."""


def find_unreadable(checkpoint: Path) -> str:
    """Return the first file of a checkpoint that the Trainer could not go on from, and why; empty without one.

    Tensors of pickles are mapped, not read: an optimizer's state may be as large as memory.
    """
    if problem := _find_state_problem(checkpoint):
        return f"{STATE} {problem}"
    for pattern, keys in PICKLES.items():
        for path in sorted(checkpoint.glob(pattern)):
            try:
                with safe_globals():
                    content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except PICKLE_ERRORS as error:
                return f"{path.name} {describe_pickle(error)}"
            is_whole = isinstance(content, dict) and keys <= content.keys()
            if not is_whole or ("numpy" in keys and not _are_random_states(content)):
                return f"{path.name} {ODD}"
    for path in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return f"{path.name} holds no tensors that can be read"
    return ""


def _find_state_problem(checkpoint: Path) -> str:
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return ODD
    if type(state.global_step) is not int or state.global_step != read_step(checkpoint):
        return f"is not of step {read_step(checkpoint)}"
    best, callbacks = state.best_model_checkpoint, state.stateful_callbacks
    numbers = (
        *(state.epoch, state.total_flos, state.num_input_tokens_seen, state.max_steps, state.num_train_epochs),
        *(state.logging_steps, state.eval_steps, state.save_steps),
    )
    shapes = (
        isinstance(state.log_history, list) and all(isinstance(line, dict) for line in state.log_history),
        isinstance(callbacks, dict) and "TrainerControl" in callbacks and all(map(_is_callback, callbacks.values())),
        best is None or isinstance(best, str),
        state.best_metric is None or isinstance(state.best_metric, int | float),
        all(isinstance(number, int | float) and number >= 0 for number in numbers),
    )
    return "" if all(shapes) else ODD


def _is_callback(state: Any) -> bool:
    parts = state if isinstance(state, list) else [state]
    return all(isinstance(part, dict) and all(isinstance(value, dict) for value in part.values()) for part in parts)


def _are_random_states(content: dict[str, Any]) -> bool:
    try:
        with random_numbers_kept():
            random.setstate(content["python"])
            np.random.set_state(content["numpy"])
            torch.set_rng_state(content["cpu"])
    except PICKLE_ERRORS:
        return False
    return True


class MarkComplete(Observer):
    """Checks the room on the disk before a save, and marks the checkpoint complete after it, while all ranks wait.

    A thread notes steps in status.json, so that a step waits for no more than the note before it.
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
        may_save = control.should_save or (control.should_evaluate and args.metric_for_best_model == "loss")
        control.should_log = control.should_log or may_save
        if control.should_save and log.is_main():
            checkpoints = self.folder.checkpoints
            check_room(checkpoints, checkpoint_bytes(checkpoints, more["model"], optimizer=more["optimizer"]))
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **more: Any) -> None:
        """Save the best weights so far, where no checkpoint is due: the Trainer keeps only those that were saved."""
        lowest = math.inf if state.best_metric is None else state.best_metric
        is_best = args.metric_for_best_model == "loss" and metrics["eval_loss"] < lowest
        if is_best and not control.should_save:
            control.should_save = True
            self.on_step_end(args, state, control, **more)

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

    Raise ConfigError, DataError or RunError where the path is no complete checkpoint, or config, starting weights, rows
    or their order have changed since: it would not be the same run.
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
                where=cfg.describe_origin("train.resume", unset=""),
                fix="use train.resume=auto, which finds the newest complete checkpoint",
            )
    marked, new_name = read_marker(checkpoint), "or train under a new run_name"
    changed_keys = config_changes(marked, facts, resized=folder.is_resized)
    changes: list[tuple[type[SftplayError], str, list[str], str]] = [
        (ConfigError, "config", changed_keys, "restore it (processes: NPROC=)"),
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
    log.say(f"continuing from {checkpoint}", "resume")
    _set_others_aside(folder, after_step=read_step(checkpoint))
    return checkpoint


def accept_numbered_cpus() -> None:
    """Let torch.load put tensors on `cpu:0`, for which several processes that resume on CPUs ask (transformers 5.17,
    `_load_optimizer_and_scheduler`; 5.23 no longer does).
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

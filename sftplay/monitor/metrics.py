"""Measures a run while it trains: one line of metrics.jsonl a logged step, eval/step-N.json, and the progress line.

Rate and gradient norm are the Trainer's own numbers; counts and losses come from the window, times from the heartbeat.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from sftplay import log
from sftplay.atomic import write_text
from sftplay.heartbeat import Heartbeat
from sftplay.json_files import read_lines
from sftplay.monitor.interval import CostModel, RankShare, describe_ranks, describe_speed, mean_loss, scalars
from sftplay.monitor.observer import Observer
from sftplay.units import format_bytes, format_count, format_seconds

PROGRESS_EVERY_S = 1.0

SHOWN_LINES = 20
"""Lines of one kind that a run puts on the screen; all of them are in metrics.jsonl and logs/."""


class MetricsWriter(Observer):
    """Writes metrics.jsonl on the main rank and keeps the progress line moving. Every rank takes part in gathering.

    `counters` are the totals of earlier attempts.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int,
        keep_row_ids: bool,
        costs: CostModel,
        counters: Mapping[str, int] | None = None,
    ) -> None:
        self.path, self.attempt, self.keep_row_ids, self.costs = path, attempt, keep_row_ids, costs
        self.last_loss: float | None = None
        self.seen = {"tokens_seen": 0, "label_tokens_seen": 0, **(counters or {})}
        """Totals since the run's first step, over all attempts and ranks."""

        self.train_seconds = self.train_cpu_seconds = self._cpu_started = 0.0
        self._started = self._shown_at = 0.0
        self._shown_tokens = self._logged_step = 0
        self._largest_memory: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = self._shown_at = time.monotonic()
        self._logged_step = state.global_step
        self.trainer.heartbeat.take_seconds()  # what came before is no part of the first line
        self._cpu_started = time.process_time()
        # Metrics of earlier, unfinished steps must not survive beside those about to be trained again.
        if log.is_main():
            cut_back(self.path, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if now - self._shown_at < PROGRESS_EVERY_S:
            return
        tokens = self.trainer.counts.tokens
        speed = max(0, tokens - self._shown_tokens) * log.world_size() / (now - self._shown_at)
        self._shown_at, self._shown_tokens = now, tokens
        loss = float(self.trainer.last_loss)
        log.status(f"step {state.global_step}/{state.max_steps}  loss {loss:.3f}  {format_count(speed)} tokens/s")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" not in logs:
            return
        held = memory_fields()
        everyone = gather_objects((*self._take(), {**held, **self.costs.predicted_bytes}), self.trainer.heartbeat)
        shares = [share for share, _, _ in everyone]
        line = self._line(logs, state, shares=shares)
        line |= {**held, "ranks_memory": [memory for _, _, memory in everyone]}
        if self.keep_row_ids:
            line["row_ids"] = [rows for _, rows, _ in everyone]
        self._logged_step, self._shown_tokens = state.global_step, 0
        self.last_loss = line["loss"]
        memory = line["ranks_memory"]
        self._largest_memory = {key: max(rank[key] for rank in memory) for key in memory[0]}
        logs |= {"loss": line["loss"], **scalars(line)}
        if log.is_main():
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
            self._say(line, state)

    def _take(self) -> tuple[RankShare, list[int]]:
        """This rank's share since the last line, and the ids of its rows where they are kept."""
        counts, costs = self.trainer.take_counts(), self.costs
        share = RankShare(
            tokens=counts.tokens,
            padded_tokens=counts.padded_tokens,
            label_tokens=counts.label_tokens,
            samples=len(counts.rows),
            loss_sum=None if counts.loss_sum is None else float(counts.loss_sum),
            flops=costs.count_flops(counts.lengths, counts.label_tokens) if costs.count_flops else None,
            peak_flops=costs.peak_flops,
            seconds=self.trainer.heartbeat.take_seconds(),
        )
        return share, counts.rows if self.keep_row_ids else []

    def _line(self, logs: dict[str, Any], state: Any, *, shares: list[RankShare]) -> dict[str, Any]:
        tokens, label_tokens = (sum(getattr(share, key) for share in shares) for key in ("tokens", "label_tokens"))
        self.seen = {
            "tokens_seen": self.seen["tokens_seen"] + tokens,
            "label_tokens_seen": self.seen["label_tokens_seen"] + label_tokens,
        }
        loss = mean_loss(shares)
        return {
            "step": state.global_step,
            "attempt": self.attempt,
            "loss": logs["loss"] if loss is None else loss,
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "label_tokens": label_tokens,
            **self.seen,
            **describe_speed(shares, state.global_step - self._logged_step),
            "ranks": describe_ranks(shares),
        }

    def _say(self, line: dict[str, Any], state: Any) -> None:
        reached = f"  MFU {line['mfu']:.0%}" if line["mfu"] is not None else ""
        print_progress(
            state,
            state.logging_steps,
            text=f"step {line['step']}/{state.max_steps}  loss {line['loss']:.4f}  rate {line['learning_rate']:.2e}  "
            f"{format_count(line['tokens_per_s'])} tokens/s  padding {line['padding_share']:.0%}{reached}",
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        if log.is_main():
            figures = {"step": state.global_step, "loss": metrics["eval_loss"]}
            path = self.path.parent / "eval" / f"step-{state.global_step}.json"
            write_text(path, json.dumps(figures, indent=1) + "\n")
        text = f"step {state.global_step}/{state.max_steps}  held-out loss {metrics['eval_loss']:.4f}"
        print_progress(state, state.eval_steps, text=text)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.train_seconds = time.monotonic() - self._started
        self.train_cpu_seconds = time.process_time() - self._cpu_started
        log.say(f"trained to step {state.global_step} in {format_seconds(self.train_seconds)}")
        if compared := compare_memory(self._largest_memory):
            log.say(compared)


def print_progress(state: Any, every: float, *, text: str) -> None:
    """Say `text`, which comes every `every` steps, about twenty times a run; otherwise only show it as progress."""
    stride = max(1, int(state.max_steps // (SHOWN_LINES * max(1, every)))) * max(1, int(every))
    if state.global_step % stride and state.global_step != state.max_steps:
        log.status(text)
    else:
        log.say(text)


def gather_objects(mine: Any, heartbeat: Heartbeat | None = None) -> list[Any]:
    """`mine` of every rank, in rank order; a list of one on a single process. The time counts as communication."""
    if log.world_size() == 1:
        return [mine]
    everyone: list[Any] = [None] * log.world_size()
    with heartbeat.within("communication") if heartbeat else nullcontext():
        torch.distributed.all_gather_object(everyone, mine)
    return everyone


def memory_fields() -> dict[str, int]:
    """Bytes this process holds: on a GPU allocated, reserved and peak, else the peak resident set."""
    if torch.cuda.is_available():
        return {
            "allocated_bytes": torch.cuda.memory_allocated(),
            "reserved_bytes": torch.cuda.memory_reserved(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
        }
    return {"peak_rss_bytes": peak_rss_bytes()}


def peak_rss_bytes() -> int:
    """The most memory that was resident in this process so far. The kernel counts in bytes on macOS, else in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compare_memory(held: dict[str, int]) -> str:
    """The plan's peak beside the most that any rank held; empty where nothing was planned or measured.

    `held` has the keys of `ranks_memory`. On a GPU both figures are those of torch's allocator, without the memory of
    the process beside it and without the plan's margin.
    """
    if "predicted_allocated_bytes" in held and "peak_bytes" in held:
        planned = f"{format_bytes(held['predicted_allocated_bytes'])} in torch's allocator"
        margin = f" ({format_bytes(held['predicted_peak_bytes'])} with process and margin)"
        return f"memory: planned {planned}{margin}, most held {format_bytes(held['peak_bytes'])}"
    if "predicted_peak_bytes" in held and "peak_rss_bytes" in held:
        planned, most = (format_bytes(held[key]) for key in ("predicted_peak_bytes", "peak_rss_bytes"))
        return f"memory: planned at most {planned} with its margin, most held {most}"
    return ""


def cut_back(path: Path, step: int) -> None:
    """Drop what lies after `step` in metrics.jsonl and eval/step-N.json, and a line that a crash cut short.

    Lines that are broken otherwise are named, and the file that has them is kept beside the new one.
    """
    for measured in (path.parent / "eval").glob("step-*.json"):
        at = measured.stem.removeprefix("step-")
        if at.isdecimal() and int(at) > step:
            measured.unlink()
    if not path.is_file():
        return
    records, broken = read_lines(path)
    whole = [record for record in records if type(record.get("step")) is int]
    if broken or len(whole) < len(records):
        shutil.copyfile(path, path.with_name(f"{path.name}.broken"))
        what = f"line {', '.join(map(str, broken))}" if broken else "a line without a step"
        log.say(f"{path.name}: {what} cannot be read: passed over, and kept in {path.name}.broken", "resume")
    write_text(path, "".join(f"{json.dumps(record)}\n" for record in whole if record["step"] <= step))

"""Measures a run while it trains: one line of metrics.jsonl a logged step, eval/step-N.json, and the progress line.

Rate and gradient norm are the Trainer's own numbers; counts and losses come from the window, times from the heartbeat.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from sftplay import log
from sftplay.heartbeat import Heartbeat
from sftplay.monitor.interval import CostModel, RankShare, describe_ranks, describe_speed, mean_loss, scalars
from sftplay.units import format_bytes, format_count, format_seconds

PROGRESS_EVERY_S = 1.0

TOLD_TIMES = 20
"""Lines of one kind a run puts on the screen; all of them are in metrics.jsonl and logs/."""


class MetricsWriter(TrainerCallback):
    """Writes metrics.jsonl on the main rank and keeps the progress line moving.

    `window` is the trainer whose `counts` tell what this rank trained on. Every rank takes part in the gathering.
    """

    def __init__(self, path: Path, *, attempt: int, keep_row_ids: bool) -> None:
        self.path, self.attempt, self.keep_row_ids = path, attempt, keep_row_ids
        self.window: Any = None
        self.facts = CostModel()
        self.last_loss: float | None = None
        self.seen = {"tokens_seen": 0, "label_tokens_seen": 0}
        """Totals since the run's first step, of all attempts and ranks."""
        self.train_seconds = self.train_cpu_seconds = self._cpu_started = 0.0
        self._started = self._shown_at = 0.0
        self._shown_tokens = self._logged_step = 0
        self._most_held: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = self._shown_at = time.monotonic()
        self._logged_step = state.global_step
        self.window.heartbeat.take_seconds()  # what came before is no part of the first line
        self._cpu_started = time.process_time()
        # Metrics of earlier, unfinished steps must not survive beside those about to be trained again.
        if log.is_main():
            cut_back(self.path, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if now - self._shown_at < PROGRESS_EVERY_S:
            return
        tokens = self.window.counts.tokens
        speed = max(0, tokens - self._shown_tokens) * log.world_size() / (now - self._shown_at)
        self._shown_at, self._shown_tokens = now, tokens
        loss = float(self.window.last_loss)
        log.status(f"step {state.global_step}/{state.max_steps}  loss {loss:.3f}  {format_count(speed)} tokens/s")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" not in logs:
            return
        held = memory_fields()
        everyone = gather_objects((*self._take(), {**held, **self.facts.predicted_bytes}), self.window.heartbeat)
        shares = [share for share, _, _ in everyone]
        line = self._line(logs, state, shares)
        line |= {**held, "ranks_memory": [memory for _, _, memory in everyone]}
        if self.keep_row_ids:
            line["row_ids"] = [rows for _, rows, _ in everyone]
        self._logged_step, self._shown_tokens = state.global_step, 0
        self.last_loss = line["loss"]
        self._most_held = {key: max(memory[key] for memory in line["ranks_memory"]) for key in line["ranks_memory"][0]}
        logs |= {"loss": line["loss"], **scalars(line)}
        if log.is_main():
            with self.path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(line) + "\n")
            self._say(line, state)

    def _take(self) -> tuple[RankShare, list[int]]:
        """This rank's share since the last line, and the ids of its rows where they are kept."""
        counts, facts = self.window.take_counts(), self.facts
        share = RankShare(
            tokens=counts.tokens,
            padded_tokens=counts.padded_tokens,
            label_tokens=counts.label_tokens,
            samples=len(counts.rows),
            loss_sum=None if counts.loss_sum is None else float(counts.loss_sum),
            flops=facts.count_flops(counts.lengths, counts.label_tokens) if facts.count_flops else None,
            peak_flops=facts.peak_flops,
            seconds=self.window.heartbeat.take_seconds(),
        )
        return share, counts.rows if self.keep_row_ids else []

    def _line(self, logs: dict[str, Any], state: Any, shares: list[RankShare]) -> dict[str, Any]:
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
            f"step {line['step']}/{state.max_steps}  loss {line['loss']:.4f}  rate {line['learning_rate']:.2e}  "
            f"{format_count(line['tokens_per_s'])} tokens/s  padding {line['padding_share']:.0%}{reached}",
        )

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        if log.is_main():
            figures = {"step": state.global_step, "loss": metrics["eval_loss"]}
            write_figures(self.path.parent / "eval" / f"step-{state.global_step}.json", figures)
        text = f"step {state.global_step}/{state.max_steps}  held-out loss {metrics['eval_loss']:.4f}"
        print_progress(state, state.eval_steps, text)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.train_seconds = time.monotonic() - self._started
        self.train_cpu_seconds = time.process_time() - self._cpu_started
        log.say(f"trained to step {state.global_step} in {format_seconds(self.train_seconds)}")
        if compared := compare_memory(self._most_held):
            log.say(compared)


def print_progress(state: Any, every: float, text: str) -> None:
    """Say what comes every `every` steps, but no more than some twenty times a run; the rest is progress only."""
    stride = max(1, int(state.max_steps // (TOLD_TIMES * max(1, every)))) * max(1, int(every))
    if state.global_step % stride and state.global_step != state.max_steps:
        log.status(text)
    else:
        log.say(text)


def gather_objects(mine: Any, heartbeat: Heartbeat | None = None) -> list[Any]:
    """`mine` of every rank, in rank order; a list of one without a process group. `heartbeat` shows the waiting."""
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
    """The most memory that was resident in this process so far; the kernel counts it in bytes on macOS, else in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def compare_memory(held: dict[str, int]) -> str:
    """The plan's peak beside what the fullest rank held at most; empty where nothing was planned or measured.

    `held` has the names of `ranks_memory`. On a GPU like is compared with like: both are torch's allocator, without
    the process beside it and the plan's margin.
    """
    if "predicted_allocated_bytes" in held and "peak_bytes" in held:
        planned = f"{format_bytes(held['predicted_allocated_bytes'])} in torch's allocator"
        margin = f" ({format_bytes(held['predicted_peak_bytes'])} with process and margin)"
        return f"memory: planned {planned}{margin}, most held {format_bytes(held['peak_bytes'])}"
    if "predicted_peak_bytes" in held and "peak_rss_bytes" in held:
        planned, most = (format_bytes(held[key]) for key in ("predicted_peak_bytes", "peak_rss_bytes"))
        return f"memory: planned at most {planned} with its margin, most held {most}"
    return ""


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Write a small JSON file that is whole whenever it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def cut_back(path: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl behind `step`, one that was cut short by a crash, and later eval/step-N.json."""
    for measured in (path.parent / "eval").glob("step-*.json"):
        at = measured.stem.removeprefix("step-")
        if at.isdecimal() and int(at) > step:
            measured.unlink()
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record["step"] <= step:
            kept.append(line)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    scratch.replace(path)  # killed here, the run still has its old lines

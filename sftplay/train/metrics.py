"""Measures a run while it trains: a line of metrics.jsonl for each logged step, eval/step-N.json, the progress line.

Rate and gradient norm are the Trainer's own numbers. Counts and losses come from the window, times from the heartbeat.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sftplay import log
from sftplay.atomic import read_lines, write_text
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects, memory_fields
from sftplay.train.observer import (
    CostModel,
    Observer,
    RankShare,
    TokenTotals,
    describe_ranks,
    describe_sources,
    describe_speed,
    mean_loss,
    scalars,
)
from sftplay.units import format_bytes, format_count, format_seconds

SHOWN_LINES = 20  # lines of one kind that a run prints on the screen; all of them are in metrics.jsonl and logs/


class MetricsWriter(Observer):
    """Writes metrics.jsonl on the main rank, and shows the progress line. Every rank takes part in gathering.

    `counters` and `sources` are the totals of earlier attempts.
    """

    def __init__(
        self, path: Path, *, attempt: int, keep_row_ids: bool, costs: CostModel,
        counters: Mapping[str, int] | None = None, sources: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        self.path, self.attempt, self.keep_row_ids, self.costs = path, attempt, keep_row_ids, costs
        self.last_loss: float | None = None
        # Since the run's first step, over all attempts and ranks; the same for each source of a mixture.
        self.totals = {"tokens_seen": 0, "label_tokens_seen": 0, **(counters or {})}
        self.sources = {name: TokenTotals(**totals) for name, totals in (sources or {}).items()}
        self.train_seconds = self.train_cpu_seconds = self._cpu_started = 0.0
        self._started = self._shown_at = 0.0
        self._shown_tokens = self._logged_step = 0
        self._largest_memory: dict[str, int] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._started = self._shown_at = time.monotonic()
        self._logged_step = state.global_step
        self.trainer.heartbeat.take_seconds()  # time before training does not belong to the first line
        self._cpu_started = time.process_time()
        # Steps after the checkpoint are trained again. Their metrics from the earlier attempt must go.
        if log.is_main():
            cut_back(self.path, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if control.should_log or now - self._shown_at < 1.0:
            return  # a step whose line of metrics follows is shown with the loss of that line
        tokens = self.trainer.counts.tokens
        speed = max(0, tokens - self._shown_tokens) * log.world_size() / (now - self._shown_at)
        self._shown_at, self._shown_tokens = now, tokens
        rate = self.trainer.lr_scheduler.get_last_lr()[0]
        text = format_figures(float(self.trainer.last_loss), rate, tokens_per_s=speed)
        log.progress(state.global_step, state.max_steps, what="step", text=text)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" not in logs:
            return
        counts, memory = self.trainer.take_counts(), memory_fields()
        share = RankShare(
            tokens=counts.tokens,
            padded_tokens=counts.padded_tokens,
            label_tokens=counts.label_tokens,
            samples=len(counts.rows),
            loss_sum=counts.read().loss_sum,
            flops=self.costs.count_flops(counts.lengths, counts.label_tokens) if self.costs.count_flops else None,
            peak_flops=self.costs.peak_flops,
            seconds=self.trainer.heartbeat.take_seconds(),
            sources={self.trainer.source_names[source]: found.read() for source, found in counts.sources.items()},
        )
        row_ids = counts.rows if self.keep_row_ids else []
        gathered = gather_objects((share, row_ids, {**memory, **self.costs.predicted_bytes}), self.trainer.heartbeat)
        shares, row_ids_by_rank, ranks_memory = map(list, zip(*gathered, strict=True))
        line = self._make_line(logs, state, shares=shares)
        figures = self.trainer.take_figures(logs)
        line |= {**memory, "ranks_memory": ranks_memory, **figures}
        if self.keep_row_ids:
            line["row_ids"] = row_ids_by_rank
        self._logged_step, self._shown_tokens = state.global_step, 0
        self.last_loss = line["loss"]
        self._largest_memory = {key: max(rank[key] for rank in ranks_memory) for key in ranks_memory[0]}
        known = {name: value for name, value in figures.items() if value is not None}
        logs |= {"loss": line["loss"], **scalars(line), **known}
        if log.is_main():
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            mfu = f"  MFU {line['mfu']:.0%}" if line["mfu"] is not None else ""
            shown = f"reward {line['reward']:.3f}  " if line.get("reward") is not None else ""
            shown += format_figures(line["loss"], line["learning_rate"], tokens_per_s=line["tokens_per_s"])
            text = f"step {line['step']}/{state.max_steps}  {shown}  padding {line['padding_share']:.0%}{mfu}"
            print_progress(state, state.logging_steps, text=text)
            log.progress(state.global_step, state.max_steps, what="step", text=shown)

    def _make_line(self, logs: dict[str, Any], state: Any, *, shares: list[RankShare]) -> dict[str, Any]:
        label_tokens = sum(share.label_tokens for share in shares)
        self.totals = {
            "tokens_seen": self.totals["tokens_seen"] + sum(share.tokens for share in shares),
            "label_tokens_seen": self.totals["label_tokens_seen"] + label_tokens,
        }
        loss = mean_loss(shares)
        line = {
            "step": state.global_step,
            "attempt": self.attempt,
            "loss": logs["loss"] if loss is None else loss,
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "label_tokens": label_tokens,
            **self.totals,
            **describe_speed(shares, state.global_step - self._logged_step),
            "ranks": describe_ranks(shares),
        }
        if names := self.trainer.source_names:
            nothing = TokenTotals()
            recent = {name: sum((share.sources.get(name, nothing) for share in shares), nothing) for name in names}
            self.sources = {name: self.sources.get(name, nothing) + recent[name] for name in names}
            line["sources"] = describe_sources(self.sources)  # since the first step
            line["source_losses"] = {name: totals.loss for name, totals in recent.items()}  # since the last line
        return line

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **_: Any) -> None:
        if log.is_main():
            figures = {"step": state.global_step, "loss": metrics["eval_loss"]}
            if self.trainer.held_out_sources:
                figures["sources"] = self.trainer.held_out_sources
            path = self.path.parent / "eval" / f"step-{state.global_step}.json"
            write_text(path, json.dumps(figures, indent=1) + "\n")
        text = f"step {state.global_step}/{state.max_steps}  held-out loss {metrics['eval_loss']:.4f}"
        text += "".join(f"  {name} {source['loss']:.4f}" for name, source in self.trainer.held_out_sources.items())
        print_progress(state, state.eval_steps, text=text)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.train_seconds = time.monotonic() - self._started
        self.train_cpu_seconds = time.process_time() - self._cpu_started
        log.say(f"trained to step {state.global_step} in {format_seconds(self.train_seconds)}")
        if comparison := compare_memory(self._largest_memory):
            log.say(comparison)


def format_figures(loss: float, rate: float, *, tokens_per_s: float) -> str:
    """Round a step's figures alike wherever they are shown."""
    return f"loss {loss:.4f}  rate {rate:.2e}  {format_count(tokens_per_s)} tokens/s"


def print_progress(state: Any, every: float, *, text: str) -> None:
    """Print `text`, which comes every `every` steps, about twenty times a run."""
    stride = max(1, int(state.max_steps // (SHOWN_LINES * max(1, every)))) * max(1, int(every))
    if not state.global_step % stride or state.global_step == state.max_steps:
        log.say(text)


def compare_memory(memory: dict[str, int]) -> str:
    """Compare the plan's peak with the most that any rank held; empty when nothing was planned or measured.

    `memory` has the keys of `ranks_memory`. On a GPU both figures are those of torch's allocator alone, without other
    memory of the process and without the plan's margin.
    """
    if "predicted_allocated_bytes" in memory and "peak_bytes" in memory:
        planned = f"{format_bytes(memory['predicted_allocated_bytes'])} in torch's allocator"
        margin = f" ({format_bytes(memory['predicted_peak_bytes'])} with process and margin)"
        return f"memory: planned {planned}{margin}, most held {format_bytes(memory['peak_bytes'])}"
    if "predicted_peak_bytes" in memory and "peak_rss_bytes" in memory:
        planned, most = (format_bytes(memory[key]) for key in ("predicted_peak_bytes", "peak_rss_bytes"))
        return f"memory: planned at most {planned} with its margin, most held {most}"
    return ""


def cut_back(path: Path, step: int) -> None:
    """Remove what lies after `step` in metrics.jsonl and eval/step-N, and a line that a crash cut short.

    Lines that are broken otherwise are named, and the file that has them is kept next to the new one.
    """
    for evaluation in (path.parent / "eval").glob("step-*.json"):
        number = evaluation.stem.removeprefix("step-")
        if number.isdecimal() and int(number) > step:
            evaluation.with_suffix(".jsonl").unlink(missing_ok=True)
            evaluation.unlink()
    if not path.is_file():
        return
    records, broken = read_lines(path)
    whole = [record for record in records if type(record.get("step")) is int]
    if broken or len(whole) < len(records):
        shutil.copyfile(path, path.with_name(f"{path.name}.broken"))
        what = f"line {', '.join(map(str, broken))}" if broken else "a line without a step"
        log.say(f"{path.name}: {what} cannot be read: skipped, and kept in {path.name}.broken", "resume")
    write_text(path, "".join(f"{json.dumps(record)}\n" for record in whole if record["step"] <= step))


class TrackPhases(TrainerCallback):
    """Must be the last callback: what the others do in an event belongs to the phase before it."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("data", step=state.global_step + 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("forward", step=state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate:
            self.heartbeat.enter("evaluation")
        else:
            self.on_evaluate(args, state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_save:
            self.heartbeat.enter("save")
        else:
            self.heartbeat.enter("data", step=state.global_step + 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("data", step=state.global_step + 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("idle")

"""The counts and times of steps as figures, the files and lines they go to, and how callbacks get the trainer.

Rate and gradient norm are the Trainer's own numbers. Counts and losses come from the window, times from the heartbeat.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sftplay import log
from sftplay.atomic import read_lines, write_text
from sftplay.config.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects, memory_fields
from sftplay.units import format_bytes, format_count, format_seconds

STEP_PARTS = {
    "data_s": ("data",), "generation_s": ("generation",), "reward_s": ("reward",),
    "forward_backward_s": ("forward", "backward"), "optimizer_s": ("optimizer",),
    "communication_s": ("communication",), "evaluation_s": ("evaluation",), "save_s": ("save",),
}  # fmt: skip
"""Part of a step -> phases of the heartbeat. The remaining time is `other_s`.

The clock is the host's. A GPU works asynchronously, and its time counts for the part that waits for it. Forward and
backward count for `forward_backward_s`, which ends with reading the gradient's norm. The optimizer's kernels count for
the next wait: at the start of the next step, or in a line of metrics. DDP may send gradients while it computes. The
part of sending that computing does not cover is taken from DDP's own log and moved from backward to
`communication_s`, one step late. The rest of `communication_s` is the ranks' own collective operations. An evaluation
or a checkpoint that follows a line at the same step belongs to the next line.
"""

CURVES = (
    "tokens_per_s", "padded_tokens_per_s", "samples_per_s", "padding_share", "label_tokens", "step_s",
    "exposed_communication_share", "communication_max_s", "model_tflops_per_s", "mfu",
)  # fmt: skip
"""Figures of a line that a tracker shows."""


@dataclass
class TokenCounts:
    """Tokens and losses of one source on this rank since the last line of metrics."""

    tokens: int = 0
    label_tokens: int = 0
    loss_sum: Any = None  # sum of the label tokens' losses, a tensor; None where a micro-batch holds several sources

    def add_loss(self, loss_sum: Any) -> None:
        """Add the sum of a micro-batch."""
        self.loss_sum = loss_sum if self.loss_sum is None else self.loss_sum + loss_sum

    def read(self) -> TokenTotals:
        """Return plain numbers; waits for the losses."""
        known = None if self.loss_sum is None else float(self.loss_sum)
        return TokenTotals(tokens=self.tokens, label_tokens=self.label_tokens, loss_sum=known)


@dataclass
class StepCounts(TokenCounts):
    """Tokens and losses of all sources on this rank. Only a line of metrics waits for the value of `loss_sum`."""

    padded_tokens: int = 0
    rows: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # real tokens of each of `rows`
    sources: defaultdict[int, TokenCounts] = field(default_factory=lambda: defaultdict(TokenCounts))
    """By the number of a mixture's source."""


@dataclass(frozen=True)
class CostModel:
    """Costs of a step that are known before the first one."""

    count_flops: Callable[[Sequence[int], int], float] | None = None
    """(real tokens of each row, label tokens of all) -> model FLOPs; None when the model's shape is not known."""

    peak_flops: float | None = None  # operations a second of this rank's GPU in the run's precision, where known
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    """`predicted_peak_bytes`, the plan's peak of a whole process with its margin; `predicted_allocated_bytes`, the
    plan's peak of torch's allocator alone. Empty when memory was not planned."""


@dataclass(frozen=True, kw_only=True)
class TokenTotals:
    """Tokens and losses of one source or of all, in plain numbers that can be added and kept."""

    tokens: int = 0
    label_tokens: int = 0
    loss_sum: float | None = 0.0  # None where a micro-batch held several sources

    def __add__(self, other: TokenTotals) -> TokenTotals:
        is_known = self.loss_sum is not None and other.loss_sum is not None
        return TokenTotals(
            tokens=self.tokens + other.tokens,
            label_tokens=self.label_tokens + other.label_tokens,
            loss_sum=(self.loss_sum or 0.0) + (other.loss_sum or 0.0) if is_known else None,
        )

    @property
    def loss(self) -> float | None:
        """Mean over the label tokens; None without any, and where the sum is not known."""
        return self.loss_sum / self.label_tokens if self.loss_sum is not None and self.label_tokens else None


def describe_sources(totals: Mapping[str, TokenTotals]) -> dict[str, dict[str, Any]]:
    """Return tokens, label tokens, share of all label tokens, and mean loss of each source."""
    everything = sum(source.label_tokens for source in totals.values())
    return {
        name: {
            "tokens": source.tokens,
            "label_tokens": source.label_tokens,
            "share": round(_rate(source.label_tokens, everything), 6),
            "loss": source.loss,
        }
        for name, source in totals.items()
    }


@dataclass(frozen=True, kw_only=True)
class RankShare(TokenTotals):
    """The work of one rank since the last line, in plain numbers that can be sent to other ranks."""

    padded_tokens: int
    samples: int
    flops: float | None
    peak_flops: float | None
    seconds: Mapping[str, float]
    """Phase of the heartbeat -> seconds. Their sum is the whole time since the last line."""

    sources: Mapping[str, TokenTotals] = field(default_factory=dict)  # by the name of a mixture's source

    @property
    def wall_s(self) -> float:
        return sum(self.seconds.values())


def mean_loss(shares: Sequence[RankShare]) -> float | None:
    """Return the mean over the label tokens of all ranks; None when a rank's sum is not known."""
    label_tokens = sum(share.label_tokens for share in shares)
    total = _sum_known([share.loss_sum for share in shares])
    return total / label_tokens if label_tokens and total is not None else None


def describe_speed(shares: Sequence[RankShare], steps: int) -> dict[str, Any]:
    """Return rates of all ranks over rank 0's wall time, and the parts of that time in mean seconds of a step.

    `mfu` is model FLOPs over the most that the GPUs could have done in that time; None when one of them is not known.
    """
    wall_s, seconds = shares[0].wall_s, shares[0].seconds
    tokens, padded = sum(share.tokens for share in shares), sum(share.padded_tokens for share in shares)
    flops = _sum_known([share.flops for share in shares])
    peak = _sum_known([share.peak_flops for share in shares])
    speed = None if flops is None else _rate(flops, wall_s)
    return {
        "tokens_per_s": round(_rate(tokens, wall_s), 1),
        "padded_tokens_per_s": round(_rate(padded, wall_s), 1),
        "samples_per_s": round(_rate(sum(share.samples for share in shares), wall_s), 3),
        "padding_share": compute_padding_share(tokens, padded),
        "model_tflops_per_s": None if speed is None else float(f"{speed / 1e12:.5g}"),
        "mfu": None if speed is None or peak is None else float(f"{speed / peak:.5g}"),
        "step_s": round(wall_s / max(1, steps), 6),
        "step_split": split_step(seconds, steps),
        # The share of the time in which a rank exchanged data or waited for others, and computed nothing.
        "exposed_communication_share": round(_rate(seconds.get("communication", 0.0), wall_s), 4),
        "communication_max_s": max(split_step(share.seconds, steps)["communication_s"] for share in shares),
    }


def compute_padding_share(tokens: int, padded_tokens: int) -> float:
    """Return the share of padding in `padded_tokens`, which include the real `tokens`."""
    return round(1 - tokens / padded_tokens, 4) if padded_tokens else 0.0


def describe_ranks(shares: Sequence[RankShare]) -> list[dict[str, Any]]:
    """Return the figures of each rank, in rank order."""
    return [
        {
            "loss": share.loss,
            "tokens_per_s": round(_rate(share.tokens, share.wall_s), 1),
            "label_tokens": share.label_tokens,
            "padding_share": compute_padding_share(share.tokens, share.padded_tokens),
        }
        for share in shares
    ]


def split_step(seconds: Mapping[str, float], steps: int) -> dict[str, float]:
    """Return mean seconds of a step by part; they add up to all of `seconds` over `steps`."""
    split = {part: sum(seconds.get(phase, 0.0) for phase in phases) for part, phases in STEP_PARTS.items()}
    split = {part: spent for part, spent in split.items() if spent or part not in ("generation_s", "reward_s")}
    split["other_s"] = max(0.0, sum(seconds.values()) - sum(split.values()))
    return {part: round(spent / max(1, steps), 6) for part, spent in split.items()}


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line that a tracker shows as curves. Those of rank 0 are named `rank0/...`, and so on."""
    flat = {name: line[name] for name in CURVES}
    flat |= {f"step_split/{part}": spent for part, spent in line["step_split"].items()}
    for name, source in line.get("sources", {}).items():
        flat |= {f"source/{name}/share": source["share"], f"source/{name}/loss": line["source_losses"][name]}
    for rank, (figures, memory) in enumerate(zip(line["ranks"], line["ranks_memory"], strict=True)):
        flat |= {f"rank{rank}/{name}": value for name, value in {**figures, **memory}.items()}
    return {name: value for name, value in flat.items() if value is not None}


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _sum_known(values: Sequence[float | None]) -> float | None:
    return None if any(value is None for value in values) else sum(value or 0.0 for value in values)


class Observer(TrainerCallback):
    """A callback that uses the trainer itself."""

    trainer: Any
    """transformers' Trainer with the attributes of `StepTrainerMixin`, and `take_figures`."""

    def attach(self, trainer: Any) -> None:
        """Take the trainer, once it is built and before it wraps its model or trains."""
        self.trainer = trainer

    def measures_at(self, step: int, state: Any) -> bool:
        """Return whether this callback itself measures held-out rows at the end of that step."""
        return False


def write_measured(path: Path, figures: Mapping[str, Any], *, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the figures, and the answers for people next to them (.jsonl); the folder may be missing."""
    write_lines(path.with_suffix(".jsonl"), lines)
    write_text(path, json.dumps(figures, indent=1) + "\n")


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines as JSON Lines; the folder may be missing."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))


class EvaluateAtSteps(Observer):
    """Measures held-out rows while a run trains; writes eval/step-N.json and .jsonl.

    The figures go to the next line of metrics. Existing files are read: after a resume nothing is measured twice.
    """

    prefix = "eval_"  # of the names of figures in metrics
    logs_start = True  # whether the figures of step 0 are logged, where a tracker's curve starts

    def __init__(self, cfg: RunConfig, rows: Any, *, folder: Path, every: int, extra_step: int = 0) -> None:
        """`rows` are held out; `folder` is the run's eval/; `every` is the steps between two evaluations.

        It measures at `extra_step` too.
        """
        self.cfg, self.rows, self.folder, self.every, self.extra_step = cfg, rows, folder, every, extra_step

    def measure(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return figures, and on the main rank answers for people."""
        raise NotImplementedError

    def summarize(self, figures: dict[str, Any]) -> tuple[dict[str, float], str]:
        """Return the figures for a line of metrics by their names, and all in a line for people."""
        raise NotImplementedError

    def measures_at(self, step: int, state: Any) -> bool:
        return step > 0 and (step % self.every == 0 or step in (self.extra_step, state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.measures_at(state.global_step, state):
            control.should_log = True  # a line for the figures
            self.evaluate(state.global_step)

    def evaluate(self, step: int) -> dict[str, Any]:
        """Return the figures of a step, measured or read from the step's file. All ranks call it."""
        path, trainer = self.folder / f"step-{step}.json", self.trainer
        kept = path.read_text(encoding="utf-8") if log.is_main() and path.exists() else None
        if known := gather_objects(kept)[0]:
            figures = json.loads(known)
        else:
            began = time.monotonic()
            found, lines = self.measure()
            figures = {"step": step, **found, "seconds": round(time.monotonic() - began, 3)}
            if log.is_main():
                write_measured(path, figures, lines=lines)
        selected, summary = self.summarize(figures)
        logged = {f"{self.prefix}{name}": value for name, value in selected.items()}
        if step:
            trainer.held_out_figures = logged
        elif self.logs_start:
            trainer.log(logged)
        log.say(f"step {step}/{trainer.state.max_steps}  {summary}", "eval")
        return figures


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
        self._started = self._shown_at = self._rate = 0.0
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

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._rate = self.trainer.lr_scheduler.get_last_lr()[0]  # at the end of the step it is the next one's

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        if control.should_log or now - self._shown_at < 1.0:
            return  # a step whose line of metrics follows is shown with the loss of that line
        tokens = self.trainer.counts.tokens
        speed = max(0, tokens - self._shown_tokens) * log.world_size() / (now - self._shown_at)
        self._shown_at, self._shown_tokens = now, tokens
        text = format_figures(float(self.trainer.last_loss), self._rate, tokens_per_s=speed)
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
        known = {name: value for name, value in figures.items() if value is not None and not isinstance(value, str)}
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


class LineBoard:
    """A writer of TensorBoard that sends a line of metrics as one event: the same curves in a seventh of the time."""

    def __init__(self, writer: Any) -> None:
        """`writer` is torch's SummaryWriter."""
        self._writer, self._figures = writer, list[tuple[str, float, int]]()

    def add_scalar(self, *figure: Any) -> None:
        """Keep name, value and step of a figure for the line that `flush` sends."""
        self._figures.append(figure)

    def flush(self) -> None:
        """Send the line."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._figures:
            values = [Summary.Value(tag=name, simple_value=value) for name, value, _ in self._figures]
            self._writer.file_writer.add_summary(Summary(value=values), self._figures[0][2])
            self._figures = []
        self._writer.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


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

    on_save = on_train_begin

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heartbeat.enter("idle")

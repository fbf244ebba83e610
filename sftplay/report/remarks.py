"""What a reader of a run should not miss: failures, doubts about the figures, and what could not be read.

Each remark is a sentence with its figures. Nothing is decided here; the run has ended or continues regardless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from sftplay.evaluate.comparison import ENOUGH_ROWS
from sftplay.report.figures import as_number, capitalized, find_name, format_figure, is_better
from sftplay.report.learned import compare_memory, headlines, learns_from_rewards
from sftplay.report.run_files import RunFiles, mapping, texts
from sftplay.units import format_bytes

FEW_PROMPTS = 30


class Remark(NamedTuple):
    """How much it matters, and a sentence."""

    severity: Literal["stop", "warn", "note"]
    text: str


def find_remarks(run: RunFiles) -> list[Remark]:
    """Return all remarks, the most severe first."""
    parts = (_state, _attempts, _steps, _course, _figures, _data, _settings)
    order = ("stop", "warn", "note")
    return sorted((found for part in parts for found in part(run)), key=lambda remark: order.index(remark.severity))


def _sentence(text: str) -> str:
    return capitalized(text) + ("" if text.endswith((".", "!", "?")) else ".")


def _state(run: RunFiles) -> Iterator[Remark]:
    state = run.state
    if state == "failed":
        error = mapping(run.status.get("error"))
        what, where, fix = (text if isinstance(text := error.get(key), str) else "" for key in ("what", "where", "fix"))
        cause = run.attempts[-1].get("cause") if run.attempts else None
        why = f"{where}: {what}" if where and what else what
        why = why or (cause if isinstance(cause, str) else "no reason was left; look into logs/")
        remedy = f" Remedy: {fix}." if fix else ""
        yield Remark("stop", f"The run failed at step {run.step:,}. {why}.{remedy}")
    if state == "interrupted":
        text = f"The run ended at step {run.step:,} without a message (it was killed, or the machine went down)."
        yield Remark("stop", f"{text} `make resume` continues from the last complete checkpoint.")
    if state == "stopped":
        signal = run.status.get("signal")
        by = f" by {signal}" if isinstance(signal, str) else ""
        yield Remark("warn", f"The run was stopped{by} at step {run.step:,}; `make resume` continues from there.")
    if state == "running":
        yield Remark("note", f"The run is still going; this page shows it as of step {run.step:,}.")
    if state == "done" and run.folder.result is None:
        yield Remark("stop", "The run is done, but neither adapter/ nor model/ is there.")


def _attempts(run: RunFiles) -> Iterator[Remark]:
    for number, attempt in enumerate(run.attempts[:-1], 1):
        cause = attempt.get("cause")
        if cause != "done":
            start, end = (as_number(attempt.get(key)) for key in ("from_step", "to_step"))
            to = "" if end is None else f" to {format_figure('step', end)}"
            ending = cause if isinstance(cause, str) else "ended without a message"
            yield Remark("note", f"Attempt {number} ran from step {format_figure('step', start)}{to}: {ending}.")
    for name in run.set_aside[:10]:
        yield Remark("note", f"{name} was not continued; it lies in checkpoints/incomplete/.")
    for name in run.unmarked[:10]:
        yield Remark("warn", f"{name} is not marked complete: it does not count, and `make resume` skips it.")
    for line in run.notes:
        yield Remark("note", _sentence(line))


def _steps(run: RunFiles) -> Iterator[Remark]:
    history, steps = run.history, run.steps
    for key, at in history.bad_steps.items():
        places = ", ".join(f"{step:,}" for step in at)
        name = "training loss" if key == "loss" else find_name(key)
        yield Remark("stop", f"{capitalized(name)} was not finite, first at step {places}.")
    if steps is not None and steps < 50 and not any("few to learn" in line for line in run.notes):
        yield Remark("warn", f"{steps:,} steps in all are few to learn from; more epochs, or a smaller batch.")
    if history.n_broken:
        yield Remark("warn", f"{history.n_broken:,} lines of metrics.jsonl cannot be read and are left out.")
    if history.n_backwards:
        yield Remark("warn", f"{history.n_backwards:,} lines of metrics.jsonl repeat a step or go back.")
    if run.state != "done":
        return
    # What did not move in the right direction from the beginning of a finished run to its end.
    from_rewards = learns_from_rewards(run)
    for key, name, first, last, count in headlines(run)[:1]:
        if last <= first < 1:
            on = f" on {count:,} prompts" if count is not None else ""
            doubt = ", too few to tell" if count is not None and count < FEW_PROMPTS else ""
            figures = f"{format_figure(key, first)} → {format_figure(key, last)}"
            yield Remark("warn", f"{name}: {figures}{on}{doubt}; it did not rise.")
    key, name, word = ("reward", "sampled reward", "rise") if from_rewards else ("loss", "training loss", "fall")
    thirds, ends = history.thirds(key), history.ends(key)
    ends = (thirds[0], thirds[2]) if thirds else ends  # single lines are noisy
    is_worse = ends is not None and (ends[1] <= ends[0] if from_rewards else ends[1] >= ends[0])
    if ends and len(history.values[key]) > 1 and is_worse:
        figures = f"{format_figure(key, ends[0])} → {format_figure(key, ends[1])}"
        yield Remark("warn", f"The {name} did not {word}: {figures}.")


def _course(run: RunFiles) -> Iterator[Remark]:
    """What the curves show that a last figure hides."""
    speeds = run.history.thirds("tokens_per_s")
    if speeds and speeds[2] < 0.5 * max(speeds[:2]):  # no noise
        figures = f"{format_figure('tokens', max(speeds[:2]))} → {format_figure('tokens', speeds[2])} tokens a second"
        yield Remark("warn", f"Throughput collapsed: {figures} (medians of a third of the run).")
    losses = None if learns_from_rewards(run) else run.history.thirds("loss")
    if losses and 0 <= losses[0] - losses[2] < 0.01 * abs(losses[0]):  # it has learned next to nothing
        figures = f"{format_figure('loss', losses[0])} → {format_figure('loss', losses[2])}"
        yield Remark("warn", f"The training loss hardly moved: {figures} (medians); a higher rate, or more steps.")
    held_out = [(loss, step) for step, loss in run.held_out if math.isfinite(loss)]
    # A held-out loss 2 % above its lowest has turned; less is noise.
    if held_out and held_out[-1][0] > 1.02 * min(held_out)[0] and held_out[-1] != min(held_out):
        (low, lowest_at), (end, _) = min(held_out), held_out[-1]
        text = f"Held-out loss was lowest at step {lowest_at:,.0f} ({format_figure('loss', low)}), then rose to"
        yield Remark("warn", f"{text} {format_figure('loss', end)}: fewer steps, or train.best_metric: loss.")


def _figures(run: RunFiles) -> Iterator[Remark]:
    before, after = run.evals.get("before", {}), run.evals.get("after", {})
    perplexity = mapping(run.evals.get("perplexity"))
    compares = perplexity.get("perplexity_compares") is not False
    per_token = () if compares else ("loss", "perplexity")
    for key in after:
        if key in before and key not in per_token and is_better(key, before[key], after=after[key]) is False:
            values = f"{format_figure(key, before[key])} → {format_figure(key, after[key])}"
            name = "held-out loss" if key == "loss" else find_name(key)
            yield Remark("warn", f"{capitalized(name)} got worse by training: {values}.")
    count = as_number(after.get("n"))
    if count is not None and 0 < count < FEW_PROMPTS:
        yield Remark("note", f"Answers were compared on {count:,.0f} prompts only; shares of them are rough.")
    if after and not before:
        yield Remark("note", "The base was not measured (eval.before), so there is nothing to compare with.")
    memory = compare_memory(run)
    if memory and memory.held > memory.planned:
        sizes = f"{format_bytes(memory.planned)} planned at most, {format_bytes(memory.held)} held"
        yield Remark("warn", f"Peak memory was above the plan: {sizes}.")
    if not compares:
        text = "The tokenizer is another one after training: loss and perplexity per token do not compare"
        yield Remark("note", f"{text}; bits per byte does.")
    for name, row in mapping(perplexity.get("anchor")).items():
        rise, rows = (as_number(mapping(row).get(key)) for key in ("forgetting_percent", "rows"))
        if rise is not None and 5.0 < rise < math.inf and (rows is None or rows >= ENOUGH_ROWS):
            text = f"Training has cost chat skills: the loss on {name} rose by {rise:.1f} %"
            yield Remark("warn", f"{text}; a larger weight for it, a lower rate or fewer steps keep more.")


def _data(run: RunFiles) -> Iterator[Remark]:
    data = run.data
    for note in (*texts(data.get("warnings")), *texts(data.get("notes"))):
        yield Remark("warn", _sentence(note))
    if refused := as_number(data.get("refused")):
        where = data.get("refused_rows")
        listed = f", listed in {where}" if isinstance(where, str) else ""
        yield Remark("warn", f"{format_figure('rows', refused)} rows were refused{listed}.")
    for reason, count in mapping(data.get("dropped")).items():
        if as_number(count):
            yield Remark("warn", f"{format_figure('rows', count)} rows were dropped: {reason.replace('_', ' ')}.")
    if cut := as_number(data.get("cut")):
        text = f"{format_figure('rows', cut)} rows were longer than model.max_seq_len"
        yield Remark("warn", f"{text} and lost their end.")
    ended = as_number(data.get("eos_in_loss_share"))
    if ended is not None and 0 <= ended < 1 and not learns_from_rewards(run):
        text = f"Only {format_figure('eos_share', ended)} of the rows teach the model to end its turn"
        yield Remark("warn", f"{text}; the others lost their end.")


def _settings(run: RunFiles) -> Iterator[Remark]:
    if run.value("model.trust_remote_code") is True:
        yield Remark("warn", "Python code that ships with the model was allowed to run (model.trust_remote_code).")
    for note in texts(run.plan.get("notes")):
        yield Remark("note", _sentence(note))
    verdict: Any = run.plan.get("verdict")
    if verdict in ("tight", "does_not_fit"):
        yield Remark("warn", f"The plan's verdict on memory was: {verdict.replace('_', ' ')}.")
    for trouble in run.troubles:
        yield Remark("note" if trouble.endswith("is not there") else "warn", f"{trouble}.")

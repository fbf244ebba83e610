"""What a reader of a run should not miss: failures, doubts about the figures, and what could not be read.

Each remark is a sentence with its figures. Nothing is decided here; the run has ended or continues regardless.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sftplay.report.figures import (
    FEW_PROMPTS,
    as_number,
    as_size,
    capitalized,
    find_name,
    format_course,
    format_figure,
)
from sftplay.report.page import Remark
from sftplay.report.run_files import RunFiles, mapping, texts
from sftplay.units import format_bytes

Headline = tuple[str, str, float, float, float | None]
"""Key, name, first value, last value, and the prompts that were answered."""


def find_remarks(run: RunFiles) -> list[Remark]:
    """Return all remarks, the most severe first."""
    parts = [_find_state, _find_logged, _find_course, _find_data, _find_settings]
    if run.is_evaluated:
        from sftplay.report import evaluation

        parts.append(evaluation.find_remarks)
    if run.learns_from_rewards:
        parts.append(_find_sampler)
    if run.parity:
        from sftplay.report import engines

        parts.append(engines.find_remarks)
    order = ("stop", "warn", "note")
    return sorted((found for part in parts for found in part(run)), key=lambda remark: order.index(remark[0]))


def _find_sampler(run: RunFiles) -> Iterator[Remark]:
    """What made a sampler give other log-probabilities than the model that learns."""
    for event in run.rows("events.jsonl"):
        gap, bound, step = (as_number(event.get(key)) for key in ("gap", "bound", "step"))
        words, fix = (text if isinstance(text := event.get(key), str) else "" for key in ("words", "fix"))
        if event.get("event") == "sampler_differs" and words and gap is not None and bound is not None:
            found = f"By {gap:.2g} where {bound:.2g} is allowed, in step {step or 0:,.0f}: {words}."
            yield (
                "warn",
                f"The sampler's log-probabilities are not those of the model that learns. {found} Remedy: {fix}.",
            )


def headlines(run: RunFiles) -> list[Headline]:
    """Return the telling figures; none for a task that learns from labels."""
    found = []
    for key, name in run.task.headlines if run.task else ():
        if points := run.curve(key):
            last = next(figures for step, figures in run.measured() if step == points[-1][0])
            found.append((key, name, points[0][1], points[-1][1], as_number(last.get("n"))))
    return found


def compare_memory(run: RunFiles) -> tuple[str, float, float] | None:
    """Return what is compared, what the plan allows a process with its margin, and the most that the main process held.

    Both are bytes in the same terms: torch's allocator on a GPU, the whole process on a CPU.
    """
    planned, parts = as_number(run.plan.get("peak_bytes")), mapping(run.plan.get("components"))
    on_gpu, on_cpu = run.history.largest("peak_bytes"), run.history.largest("peak_rss_bytes")
    runtime = as_number(parts.get("runtime")) or 0.0
    held = as_size(on_gpu or on_cpu)
    planned = as_size(planned - runtime if planned is not None and on_gpu else planned)
    return ("torch's allocator" if on_gpu else "the process", planned, held) if planned and held else None


def _sentence(text: str) -> str:
    return capitalized(text) + ("" if text.endswith((".", "!", "?")) else ".")


def _find_state(run: RunFiles) -> Iterator[Remark]:
    """How the run ended, and how each earlier attempt did."""
    state, attempts = run.state, run.attempts
    if state == "failed":
        error = mapping(run.status.get("error"))
        what, where, fix = (text if isinstance(text := error.get(key), str) else "" for key in ("what", "where", "fix"))
        cause = attempts[-1].get("cause") if attempts else None
        why = f"{where}: {what}" if where and what else what
        why = why or (cause if isinstance(cause, str) else "no reason was left; look into logs/")
        remedy = f" Remedy: {fix}." if fix else ""
        yield "stop", f"The run failed at step {run.step:,}. {why}.{remedy}"
    elif state == "died":
        text = f"The run ended at step {run.step:,} without a message (it was killed, or the machine went down)."
        yield "stop", f"{text} `make resume` continues from the last complete checkpoint."
    elif state == "stopped":
        by = f" by {run.status['signal']}" if isinstance(run.status.get("signal"), str) else ""
        yield "warn", f"The run was stopped{by} at step {run.step:,}; `make resume` continues from there."
    elif state == "running":
        yield "note", f"The run is still going; this page shows it as of step {run.step:,}."
    elif state == "done" and run.folder.result is None:
        yield "stop", "The run is done, but neither adapter/ nor model/ is there."
    for number, attempt in enumerate(attempts[:-1], 1):
        if (cause := attempt.get("cause")) != "done":
            start, end = (as_number(attempt.get(key)) for key in ("from_step", "to_step"))
            to = "" if end is None else f" to {format_figure('step', end)}"
            ending = cause if isinstance(cause, str) else "ended without a message"
            yield "note", f"Attempt {number} ran from step {format_figure('step', start)}{to}: {ending}."
    for name in run.set_aside[:10]:
        yield "note", f"{name} was not continued; it lies in checkpoints/incomplete/."
    for name in run.unmarked[:10]:
        yield "warn", f"{name} is not marked complete: it does not count, and `make resume` skips it."
    for line in run.notes:
        yield "note", _sentence(line)


def _find_logged(run: RunFiles) -> Iterator[Remark]:
    """What is wrong with the log, and what a finished run has not moved in the right direction."""
    history = run.history
    for key, at in history.bad_steps.items():
        name = "training loss" if key == "loss" else find_name(key)
        places = ", ".join(f"{step:,}" for step in at[:5])
        yield "stop", f"{capitalized(name)} was not finite, first at step {places}."
    if run.steps is not None and run.steps < 50 and not any("few to learn" in line for line in run.notes):
        yield "warn", f"{run.steps:,} steps in all are few to learn from; more epochs, or a smaller batch."
    if history.n_broken:
        yield "warn", f"{history.n_broken:,} lines of metrics.jsonl cannot be read and are left out."
    if history.n_backwards:
        yield "warn", f"{history.n_backwards:,} lines of metrics.jsonl repeat a step or go back."
    if run.state != "done":
        return
    for key, name, first, last, count in headlines(run)[:1]:
        if last <= first < 1:
            on = f" on {format_figure('n', count)} prompts" if count is not None else ""
            doubt = ", too few to tell" if count is not None and count < FEW_PROMPTS else ""
            yield "warn", f"{name}: {format_course(key, first, last=last)}{on}{doubt}; it did not rise."
    from_rewards = run.learns_from_rewards
    key, name, word = ("reward", "sampled reward", "rise") if from_rewards else ("loss", "training loss", "fall")
    values = history.values.get(key)
    if values and len(values) > 1:
        begin, _, end = history.thirds(key) or (values[0], 0.0, values[-1])  # single lines are noisy
        if end <= begin if from_rewards else end >= begin:
            yield "warn", f"The {name} did not {word}: {format_course(key, begin, last=end)}."


def _find_course(run: RunFiles) -> Iterator[Remark]:
    """What the curves show that a last figure hides, and memory above the plan."""
    speeds = run.history.thirds("tokens_per_s")
    if speeds and speeds[2] < 0.5 * max(speeds[:2]):  # no noise
        figures = format_course("tokens", max(speeds[:2]), last=speeds[2])
        yield "warn", f"Throughput collapsed: {figures} tokens a second (medians of a third of the run)."
    losses = None if run.learns_from_rewards else run.history.thirds("loss")
    if losses and 0 <= losses[0] - losses[2] < 0.01 * abs(losses[0]):  # it has learned next to nothing
        figures = format_course("loss", losses[0], last=losses[2])
        yield "warn", f"The training loss hardly moved: {figures} (medians); a higher rate, or more steps."
    compared = compare_memory(run)
    if compared and compared[2] > compared[1]:
        sizes = f"{format_bytes(compared[1])} planned at most, {format_bytes(compared[2])} held"
        yield "warn", f"Peak memory was above the plan: {sizes}."
    held_out = [(loss, step) for step, loss in run.curve("loss") if math.isfinite(loss)]
    # A held-out loss 2 % above its lowest has turned; less is noise.
    if held_out and held_out[-1][0] > 1.02 * min(held_out)[0] and held_out[-1] != min(held_out):
        (low, lowest_at), (end, _) = min(held_out), held_out[-1]
        text = f"Held-out loss was lowest at step {lowest_at:,.0f} ({format_figure('loss', low)}), then rose to"
        yield "warn", f"{text} {format_figure('loss', end)}: fewer steps, or train.best_metric: loss."


def _find_data(run: RunFiles) -> Iterator[Remark]:
    data = run.data
    for note in (*texts(data.get("warnings")), *texts(data.get("notes"))):
        yield "warn", _sentence(note)
    if refused := as_number(data.get("refused")):
        where = data.get("refused_rows")
        listed = f", listed in {where}" if isinstance(where, str) else ""
        yield "warn", f"{format_figure('rows', refused)} rows were refused{listed}."
    for reason, count in mapping(data.get("dropped")).items():
        if as_number(count):
            yield "warn", f"{format_figure('rows', count)} rows were dropped: {reason.replace('_', ' ')}."
    if cut := as_number(data.get("cut")):
        yield "warn", f"{format_figure('rows', cut)} rows were longer than model.max_seq_len and lost their end."
    ended = as_number(data.get("eos_in_loss_share"))
    if ended is not None and 0 <= ended < 1 and not run.learns_from_rewards:
        text = f"Only {format_figure('eos_share', ended)} of the rows teach the model to end its turn"
        yield "warn", f"{text}; the others lost their end."


def _find_settings(run: RunFiles) -> Iterator[Remark]:
    if run.value("model.trust_remote_code") is True:
        yield "warn", "Python code that ships with the model was allowed to run (model.trust_remote_code)."
    for note in texts(run.plan.get("notes")):
        yield "note", _sentence(note)
    verdict = run.plan.get("verdict")
    if verdict == "tight" or verdict == "does_not_fit":
        yield "warn", f"The plan's verdict on memory was: {verdict.replace('_', ' ')}."
    for trouble in run.troubles:
        yield "note" if trouble.endswith("is not there") else "warn", f"{trouble}."

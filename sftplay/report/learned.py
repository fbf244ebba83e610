"""The report's part about what was learned: the headline, the course of figures, tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

from sftplay.report.answers import MOST_CHARACTERS, Answer
from sftplay.report.charts import Chart, Curve
from sftplay.report.figures import capitalized, change, format_figure, name_of, rounded
from sftplay.report.history import Point, as_bytes, as_number
from sftplay.report.page import Table, cut
from sftplay.report.run_files import RunFiles, by_step, mapping
from sftplay.report.samples import FIRST, LAST, Line, content_names, pass_share, passes, read_samples, sampled_steps

Headline = tuple[str, str, float, float, int | None]
"""Key, name, first value, last value, and the prompts that were answered."""

SAMPLED = ("reward", "true_reward")
BESIDE = ("zero_variance_share", "clipped_ratio", "completion_tokens", "entropy", "kl")
COLOURS = "abcd"


def headlines(run: RunFiles) -> list[Headline]:
    """The telling figures; none for a task that learns from labels."""
    measured = [figures for _, figures in sorted(by_step(run.evals), key=lambda pair: pair[0])]
    found = []
    for key, name in run.task.headlines if run.task else ():
        values = [(value, figures) for figures in measured if (value := as_number(figures.get(key))) is not None]
        if values:
            (first, _), (last, figures) = values[0], values[-1]
            count = as_number(figures.get("n"))
            found.append((key, name, first, last, None if count is None else int(count)))
    return found


def learns_from_rewards(run: RunFiles) -> bool:
    """True for a task whose loss says nothing."""
    return run.task is not None and run.task.learns_from_rewards


def learned_table(run: RunFiles) -> Table | None:
    """Each figure at the beginning and at the end; None for a run that has no rewards."""
    if "reward" not in run.history.values:
        return None
    named = [name for name in run.history.values if name.startswith("reward/")]
    rows = [_row(name_of(key), key=key, ends=_ends(run, key)) for key in (*SAMPLED, *named)]
    steps = sampled_steps(run)
    shares = (pass_share(run, steps[:FIRST]), pass_share(run, steps[-LAST:]))
    rows.append(_row("pass@1, sampled", key="pass", ends=shares))
    rows += [_row(name_of(key), key=key, ends=_ends(run, key)) for key in BESIDE]
    held_out = sorted(by_step(run.evals), key=lambda pair: pair[0])
    for key, name in (("reward", "reward of held-out prompts, greedy"), ("pass", "pass@1 of held-out prompts, greedy")):
        values = [as_number(figures.get(key)) for _, figures in held_out if key in figures]
        rows.append(_row(name, key=key, ends=(values[0], values[-1]) if values else (None, None)))
    head = ["Figure", "First", "Last", "Change"]
    caption = (
        f"Sampled: means of the first {FIRST} and the last {LAST} logged steps. Held-out: first and last measurement"
    )
    return Table(head=head, rows=[row for row in rows if row], kinds=" nnn", caption=caption)


def learned_text(table: Table) -> str:
    """The table for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(table.head))]
    cells = [[line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
             for line in lines]  # fmt: skip
    return "\n".join("  ".join(line).rstrip() for line in cells)


def reward_charts(run: RunFiles, resumed: Sequence[float]) -> list[Chart]:
    """The reward over the steps with that of held-out prompts; then each reward by its name."""
    history = run.history
    noisy = [Curve(key, name_of(key), history.curve(key), colour, trend=history.trend(key))
             for key, colour in (("reward", "a"), ("true_reward", "c"))]  # fmt: skip
    held_out = [Curve("held_out_reward", "held-out, greedy", _held_out(run, "reward"), "b", dots=True)]
    named = [name for name in history.values if name.startswith("reward/")][: len(COLOURS)]
    each = [Curve(name, name.removeprefix("reward/"), history.curve(name), colour, trend=history.trend(name))
            for name, colour in zip(named, COLOURS, strict=False)]  # fmt: skip
    passed = [Curve("held_out_pass", "held-out, greedy", _held_out(run, "pass"), "b", dots=True)]
    all_curves = [
        ("Reward", "reward", [*noisy, *held_out]),
        ("Rewards by name", "value", each),
        ("Share that passes", "pass", passed),
    ]
    return [
        Chart(title=title, unit=unit, curves=known, last_step=run.step, resumed=resumed, is_wide=unit == "reward")
        for title, unit, curves in all_curves
        if (known := [curve for curve in curves if curve.points])
    ]


def _held_out(run: RunFiles, key: str) -> list[Point]:
    points = ((step, as_number(figures.get(key))) for step, figures in by_step(run.evals))
    return sorted((step, value) for step, value in points if value is not None)


def _ends(run: RunFiles, key: str) -> tuple[float | None, float | None]:
    values = run.history.values.get(key)
    return (fmean(values[:FIRST]), fmean(values[-LAST:])) if values else (None, None)


def _row(name: str, *, key: str, ends: tuple[float | None, float | None]) -> list[str]:
    first, last = ends
    if first is None and last is None:
        return []
    return [name, format_figure(key, first), format_figure(key, last), change(key, first, after=last)]


MEMORY = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_rss_bytes")
SEEN = ("label_tokens", "tokens_seen", "label_tokens_seen")
TIMES = ("tokens_per_s", "padded_tokens_per_s", "samples_per_s", "step_s", "communication_max_s")
MAIN = ("loss", "learning_rate", "grad_norm", *TIMES, *SEEN, *MEMORY)
"""Figures with a chart of their own, or with none on purpose."""

REWARDS = ("reward", "true_reward", "held_out_reward", "held_out_pass")
"""Figures that `learned` draws, beside one for each reward."""

AMONG_PROCESSES = ("exposed_communication_share", "communication_max_s")
"""Figures that say nothing of a single process."""

MOST_OTHERS = 8


def find_task_report(run: RunFiles) -> ModuleType | None:
    """Find the task's part of the report, imported only now; None for a task without one."""
    return run.task.part("report") if run.task else None


def has_other_chart(name: str, part: ModuleType | None) -> bool:
    """Return whether this figure of metrics.jsonl has a chart among those of rewards or of the task."""
    return name in REWARDS or name.startswith("reward/") or (part is not None and part.has_chart(name))


class Memory(NamedTuple):
    """What the plan allows a process, with its margin, and the most that the main process held, in bytes."""

    what: str
    planned: float
    held: float


def memory_of(run: RunFiles) -> Memory | None:
    """Planned and held memory in the same terms: of torch's allocator on a GPU, of the whole process on a CPU."""
    planned, parts = as_number(run.plan.get("peak_bytes")), mapping(run.plan.get("components"))
    on_gpu, on_cpu = run.history.largest("peak_bytes"), run.history.largest("peak_rss_bytes")
    beside = as_number(parts.get("runtime")) or 0.0
    held = as_bytes(on_gpu or on_cpu)
    planned = as_bytes(planned - beside if planned is not None and on_gpu else planned)
    if not planned or not held:
        return None
    return Memory("torch's allocator" if on_gpu else "the process", planned, held)


def resumed_steps(run: RunFiles) -> list[float]:
    """The steps after which the run was resumed."""
    steps = [step for a in run.attempts[1:] if (step := as_number(a.get("from_step"))) is not None and step >= 0]
    return [step for step in steps if step <= run.step][:50]


def charts_of(run: RunFiles) -> list[Chart]:
    """Loss, learning rate, gradient norm, speed and memory over the steps, then whatever else was logged."""
    history, resumed = run.history, resumed_steps(run)

    def noisy(key: str, name: str, *, colour: str = "a") -> Curve:
        return Curve(key, name, history.curve(key), colour, trend=history.trend(key))

    def plain(key: str, name: str, *, colour: str = "b") -> Curve:
        return Curve(key, name, history.curve(key), colour)

    silent = AMONG_PROCESSES if run.plan.get("world_size", 1) == 1 else ()
    part = find_task_report(run)
    others = [name for name in history.values if name not in (*MAIN, *silent) and not has_other_chart(name, part)]
    others = others[:MOST_OTHERS]
    held_out = Curve("held_out_loss", "held-out", held_out_points(run), "b", dots=True)
    is_padded = history.values.get("padded_tokens_per_s") != history.values.get("tokens_per_s")
    padded = [plain("padded_tokens_per_s", "padding included")] if is_padded else []
    waiting = [] if silent else [plain("communication_max_s", "between processes")]
    memory = [plain(key, name_of(key), colour=colour) for key, colour in zip(MEMORY, "cdab", strict=True)]
    loss = ("Loss", "loss", [noisy("loss", "training"), held_out])
    update = ("Loss of the update, near 0 by construction", "update_loss", [noisy("loss", "training")])
    from_rewards = learns_from_rewards(run)
    all_curves: list[tuple[str, str, list[Curve]]] = [
        *([] if from_rewards else [loss]),
        ("Learning rate", "learning_rate", [plain("learning_rate", "rate", colour="c")]),
        ("Gradient norm", "grad_norm", [noisy("grad_norm", "norm", colour="d")]),
        ("Speed", "tokens",
         [noisy("tokens_per_s", "all processes"), *padded]),
        ("Time of a step", "step_s", [noisy("step_s", "in all"), *waiting]),
        ("Memory of the main process", "_bytes", [*memory, *_plan_line(run)]),
        *((capitalized(name_of(key)), key, [noisy(key, name_of(key), colour="c")]) for key in others),
        *([update] if from_rewards else []),
    ]  # fmt: skip
    return [
        Chart(
            title=title, unit=unit, curves=[curve for curve in curves if curve.points], last_step=run.step,
            resumed=resumed, is_wide=unit == "loss", may_be_log=unit in ("loss", "grad_norm"),
        )
        for title, unit, curves in all_curves
        if any(value for curve in curves for _, value in curve.points)
    ]  # fmt: skip


def _plan_line(run: RunFiles) -> list[Curve]:
    """The planned memory as a level line over the steps that were logged."""
    memory = memory_of(run)
    steps = [step for key in MEMORY for step, _ in run.history.curve(key)]
    if memory is None or not steps:
        return []
    ends = sorted({min(steps), max(steps)})
    return [Curve("planned_bytes", "planned at most", [(step, memory.planned) for step in ends], "d", dashed=True)]


def held_out_points(run: RunFiles) -> list[Point]:
    """Held-out losses over the steps, that of the untrained model at step 0 included."""
    points = dict(run.held_out)
    if "perplexity" in run.evals:
        return sorted(points.items())  # before and after a sliding window has measured, other than while training
    before = as_number(run.evals.get("before", {}).get("loss"))
    if before is not None:
        points.setdefault(0.0, before)
    after = as_number(run.evals.get("after", {}).get("loss"))
    # With the best weights kept, the result is not that of the last step.
    keeps_best = run.value("train.best_metric") or run.value("train.early_stopping")
    if after is not None and run.state == "done" and not keeps_best:
        points.setdefault(float(run.step), after)
    return sorted(points.items())


STEPS, GROUPS, EACH = 3, 2, 3
"""Steps that are shown, prompts of each, and different completions of each prompt."""


class Tries(NamedTuple):
    """Groups of completions, and how many steps have kept theirs."""

    shown: list[Answer]
    n_steps: int


def tries_of(run: RunFiles) -> Tries | None:
    """Completions of a few steps; None for a run that has kept none, or whose are episodes."""
    steps = sampled_steps(run)
    if not steps or (run.task and run.task.turns == 2):
        return None
    chosen = sorted({steps[at * (len(steps) - 1) // (STEPS - 1)] for at in range(STEPS)})
    content = content_names(run)
    shown = [answer for step in chosen for answer in _groups(read_samples(run, step), step=step, content=content)]
    return Tries(shown, len(steps)) if shown else None


def _groups(lines: list[Line], *, step: int, content: list[str]) -> list[Answer]:
    """The groups of a step whose completions were paid most differently."""
    groups: dict[str, list[Line]] = {}
    for line in lines:
        groups.setdefault(cut(line.get("prompt_id"), 40), []).append(line)
    widest = sorted(groups.items(), key=lambda pair: -_reward_range(pair[1]))[:GROUPS]
    return [_answer(name, group, step=step, content=content) for name, group in widest]


def _reward_range(group: list[Line]) -> float:
    known = [value for line in group if math.isfinite(value := _advantage(line))]
    return max(known, default=0.0) - min(known, default=0.0)


def _advantage(line: Line) -> float:
    return as_number(line.get("advantage")) or 0.0


def _answer(name: str, group: list[Line], *, step: int, content: list[str]) -> Answer:
    """A prompt with the best, the middle and the worst of its completions; equal ones once."""
    different = {str(line.get("completion")): line for line in group}
    ranked = sorted(different.values(), key=_advantage, reverse=True)
    places = sorted({at * (len(ranked) - 1) // (EACH - 1) for at in range(EACH)})
    texts: list[tuple[str, bool | None, str]] = [("Prompt", None, cut(group[0].get("prompt") or "", MOST_CHARACTERS))]
    for line in (ranked[place] for place in places):
        text = cut(line.get("completion"), MOST_CHARACTERS)
        texts.append((_why(line), passes(line, content), text))
    title = f"Step {step:,}, prompt {name}: {len(group):,} completions, {len(different):,} different"
    return Answer(title, texts)


def _why(line: Line) -> str:
    """What a completion was paid, by each reward, and what became of its program."""
    rewards = [f"{cut(name, 40)} {_figure(value)}" for name, value in list(mapping(line.get("rewards")).items())[:8]]
    verdict = mapping(line.get("verdict"))
    ending = [str(verdict["status"])] if isinstance(verdict.get("status"), str) else []
    if verdict.get("total") is not None:
        ending.append(f"{_figure(verdict.get('passed'))} of {_figure(verdict.get('total'))} tests")
    said = "; ".join([", ".join(rewards), *([", ".join(ending)] if ending else [])])
    return cut(f"{said}. Advantage {_figure(line.get('advantage'))}", 300)


def _figure(value: Any) -> str:
    number = as_number(value)
    return "unknown" if number is None else rounded(number)

"""What a run learned: answers, samples, rewards, held-out figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from statistics import fmean
from types import ModuleType
from typing import Any, NamedTuple

from pydantic import ValidationError

from sftplay.config.rewards import RewardConfig
from sftplay.report.figures import Point, as_bytes, as_number, capitalized, change, find_name, format_figure, rounded
from sftplay.report.page import Chart, Curve, Table, cut
from sftplay.report.run_files import RunFiles, answer_rows, by_step, mapping, mappings, read_objects
from sftplay.reward.table import judges_form

EACH = 4
"""Rows shown of each kind."""

MOST_CHARACTERS = 700

Kind = tuple[bool | None, bool | None]
"""Correct before, correct after; None where that was not measured."""

KINDS: dict[Kind, str] = {
    (False, True): "wrong before, correct after",
    (True, False): "correct before, wrong after",
    (None, True): "correct",
    (False, False): "wrong before and after",
    (None, False): "wrong",
    (True, True): "correct before and after",
}


class Answer(NamedTuple):
    """One row: its heading, and its texts as (name, correct or not or unknown, text)."""

    title: str
    texts: list[tuple[str, bool | None, str]]


class Answers(NamedTuple):
    """The answers of one measurement."""

    counts: Table | None
    shown: list[Answer]
    n_rows: int
    n_shown: int = EACH
    """Of each kind."""


def pick_answers(run: RunFiles, prefix: str = "") -> Answers | None:
    """Return answers of eval/<prefix>before.jsonl and <prefix>after.jsonl; None when there are none after training."""

    def read_rows(side: str) -> Iterator[dict[str, Any]]:
        rows = answer_rows(run.folder, run.stands_for.get(f"{prefix}{side}", f"{prefix}{side}"))
        return (row for row in rows if isinstance(row.get("row"), int | str))

    # The files may be large: a first pass reads the verdicts, a second one the rows that are shown.
    before, after = (
        {row["row"]: row["correct"] if isinstance(row.get("correct"), bool) else None for row in read_rows(side)}
        for side in ("before", "after")
    )
    if not after:
        return None
    kinds: dict[Any, Kind] = {row: (before.get(row), verdict) for row, verdict in after.items()}
    known = [*KINDS, *sorted({kind for kind in kinds.values() if kind not in KINDS}, key=str)]
    chosen = [row for kind in known for row in [row for row, its_kind in kinds.items() if its_kind == kind][:EACH]]
    old, new = ({row["row"]: row for row in read_rows(side) if row["row"] in chosen} for side in ("before", "after"))
    shown = [_show(kinds[row], new[row], old=old.get(row)) for row in chosen if row in new]
    counts = Counter(kinds.values())
    rows = [
        [name, f"{counts[kind]:,}", format_figure("row_share", counts[kind] / len(kinds))]
        for kind, name in KINDS.items()
        if counts[kind]
    ]
    table = (
        Table(head=["Exact match", "Rows", "Share"], rows=rows, kinds=" nn") if set(counts) != {(None, None)} else None
    )
    return Answers(table, shown, len(after))


def _show(kind: Kind, new: dict[str, Any], *, old: dict[str, Any] | None) -> Answer:
    texts: list[tuple[str, bool | None, Any]]
    texts = [("Prompt", None, new.get("prompt")), ("Reference", None, new.get("reference"))]
    texts += [("Before", kind[0], old.get("prediction"))] if old is not None else []
    texts += [("After", kind[1], new.get("prediction"))]
    title = f"Row {cut(new['row'], 80)}: {KINDS.get(kind, 'without a verdict')}"
    return Answer(title, [(name, verdict, "" if v is None else cut(v, MOST_CHARACTERS)) for name, verdict, v in texts])


FIRST, LAST = 3, 10
"""Steps at the beginning and at the end that are compared: single steps are noisy."""

MOST_LINES = 4_096
"""Completions of a step that are looked at."""

Line = dict[str, Any]


def sampled_steps(run: RunFiles) -> list[int]:
    """Return the steps whose completions are kept, in order."""
    try:
        names = [path.stem.removeprefix("step-") for path in (run.folder.path / "samples").glob("step-*.jsonl")]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)


def read_samples(run: RunFiles, step: int) -> list[Line]:
    """Return the completions of a step that can be read."""
    return list(read_objects(run.folder.path / "samples" / f"step-{step}.jsonl", most_lines=MOST_LINES))


def content_names(run: RunFiles) -> list[str]:
    """Return the names of the rewards that only a right answer gets in full."""
    names = []
    for entry in mappings(run.value("rewards")):
        with suppress(ValidationError):  # a config that was spoilt by hand
            reward = RewardConfig.model_validate(entry)
            names += [] if judges_form(reward) else [reward.name]
    return names


def pass_share(run: RunFiles, steps: Sequence[int]) -> float | None:
    """Return the share of these steps' completions to which every reward for content gives 1; None: not known."""
    names = content_names(run)
    verdicts = [passes(line, names) for step in steps for line in read_samples(run, step)]
    known = [verdict for verdict in verdicts if verdict is not None]
    return fmean(known) if known else None


def passes(line: Line, names: Sequence[str]) -> bool | None:
    """Return whether each of these rewards gave 1; None where one gave no value, or there is none."""
    values = [as_number(mapping(line.get("rewards")).get(name)) for name in names]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return None if not values or len(known) < len(values) else min(known) >= 1.0


Headline = tuple[str, str, float, float, int | None]
"""Key, name, first value, last value, and the prompts that were answered."""

Ends = tuple[float | None, float | None]

SAMPLED = ("reward", "true_reward")
OTHERS = ("zero_variance_share", "clipped_ratio", "completion_tokens", "entropy", "kl")
COLOURS = "abcd"


def headlines(run: RunFiles) -> list[Headline]:
    """Return the telling figures; none for a task that learns from labels."""
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
    """Return whether the loss says nothing, because the task learns from rewards."""
    return run.task is not None and run.task.learns_from_rewards


def learned_table(run: RunFiles) -> Table | None:
    """Return each figure at the beginning and at the end; None for a run that has no rewards."""
    values = run.history.values
    if "reward" not in values:
        return None

    def logged(*keys: str) -> list[tuple[str, str, Ends]]:
        found = [(key, values.get(key)) for key in keys]
        ends = [(key, (fmean(v[:FIRST]), fmean(v[-LAST:])) if v else (None, None)) for key, v in found]
        return [(find_name(key), key, pair) for key, pair in ends]

    steps = sampled_steps(run)
    figures = logged(*SAMPLED, *(name for name in values if name.startswith("reward/")))
    figures.append(("pass@1, sampled", "pass", (pass_share(run, steps[:FIRST]), pass_share(run, steps[-LAST:]))))
    figures += logged(*OTHERS)
    held_out = sorted(by_step(run.evals), key=lambda pair: pair[0])
    for key, name in (("reward", "reward of held-out prompts, greedy"), ("pass", "pass@1 of held-out prompts, greedy")):
        measured = [as_number(found.get(key)) for _, found in held_out if key in found]
        figures.append((name, key, (measured[0], measured[-1]) if measured else (None, None)))
    rows = [
        [name, format_figure(key, first), format_figure(key, last), change(key, first, after=last)]
        for name, key, (first, last) in figures
        if first is not None or last is not None
    ]
    caption = (
        f"Sampled: means of the first {FIRST} and the last {LAST} logged steps. Held-out: first and last measurement"
    )
    return Table(head=["Figure", "First", "Last", "Change"], rows=rows, kinds=" nnn", caption=caption)


def learned_text(table: Table) -> str:
    """Return the table for a terminal."""
    lines = [table.head, *table.rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(table.head))]
    cells = [[line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
             for line in lines]  # fmt: skip
    return "\n".join("  ".join(line).rstrip() for line in cells)


def reward_charts(run: RunFiles, resumed: Sequence[float]) -> list[Chart]:
    """Return the reward over the steps with that of held-out prompts; then each reward by its name."""
    history = run.history

    def sampled(key: str, name: str, *, colour: str) -> Curve:
        return Curve(key, name, history.curve(key), colour, trend=history.trend(key))

    def held_out(key: str) -> Curve:
        points = ((step, as_number(figures.get(key))) for step, figures in by_step(run.evals))
        known = sorted((step, value) for step, value in points if value is not None)
        return Curve(f"held_out_{key}", "held-out, greedy", known, "b", dots=True)

    named = [name for name in history.values if name.startswith("reward/")]
    by_name = [sampled(name, name.removeprefix("reward/"), colour=c) for name, c in zip(named, COLOURS, strict=False)]
    noisy = [sampled(key, find_name(key), colour=colour) for key, colour in (("reward", "a"), ("true_reward", "c"))]
    all_curves = [
        ("Reward", "reward", [*noisy, held_out("reward")]),
        ("Rewards by name", "value", by_name),
        ("Share that passes", "pass", [held_out("pass")]),
    ]
    return [
        Chart(title=title, unit=unit, curves=known, last_step=run.step, resumed=resumed, is_wide=unit == "reward")
        for title, unit, curves in all_curves
        if (known := [curve for curve in curves if curve.points])
    ]


MEMORY = ("allocated_bytes", "reserved_bytes", "peak_bytes", "peak_rss_bytes")
SEEN = ("label_tokens", "tokens_seen", "label_tokens_seen")
TIMES = ("tokens_per_s", "padded_tokens_per_s", "samples_per_s", "step_s", "communication_max_s")
MAIN = ("loss", "learning_rate", "grad_norm", *TIMES, *SEEN, *MEMORY)
"""Figures with a chart of their own, or with none on purpose."""


def find_task_report(run: RunFiles) -> ModuleType | None:
    """Return the task's part of the report, imported only now; None for a task without one."""
    return run.task.part("report") if run.task else None


class Memory(NamedTuple):
    """What the plan allows a process, with its margin, and the most that the main process held, in bytes."""

    what: str
    planned: float
    held: float


def compare_memory(run: RunFiles) -> Memory | None:
    """Return planned and held memory in the same terms: torch's allocator on a GPU, the whole process on a CPU."""
    planned, parts = as_number(run.plan.get("peak_bytes")), mapping(run.plan.get("components"))
    on_gpu, on_cpu = run.history.largest("peak_bytes"), run.history.largest("peak_rss_bytes")
    runtime = as_number(parts.get("runtime")) or 0.0
    held = as_bytes(on_gpu or on_cpu)
    planned = as_bytes(planned - runtime if planned is not None and on_gpu else planned)
    if not planned or not held:
        return None
    return Memory("torch's allocator" if on_gpu else "the process", planned, held)


def resumed_steps(run: RunFiles) -> list[float]:
    """Return the steps after which the run was resumed."""
    steps = [step for a in run.attempts[1:] if (step := as_number(a.get("from_step"))) is not None and step >= 0]
    return [step for step in steps if step <= run.step][:50]


def build_charts(run: RunFiles) -> list[Chart]:
    """Return loss, learning rate, gradient norm, speed and memory over the steps, then whatever else was logged."""
    history, resumed, part = run.history, resumed_steps(run), find_task_report(run)

    def noisy(key: str, name: str, *, colour: str = "a") -> Curve:
        return Curve(key, name, history.curve(key), colour, trend=history.trend(key))

    def plain(key: str, name: str, *, colour: str = "b") -> Curve:
        return Curve(key, name, history.curve(key), colour)

    # These say nothing of a single process.
    silent = ("exposed_communication_share", "communication_max_s") if run.plan.get("world_size", 1) == 1 else ()
    # `reward_charts` draws these, and one for each reward.
    elsewhere = ("reward", "true_reward", "held_out_reward", "held_out_pass")
    others = [
        name
        for name in history.values
        if not (name in (*MAIN, *silent, *elsewhere) or name.startswith("reward/") or (part and part.has_chart(name)))
    ][:8]
    held_out = Curve("held_out_loss", "held-out", _find_held_out_points(run), "b", dots=True)
    is_padded = history.values.get("padded_tokens_per_s") != history.values.get("tokens_per_s")
    padded = [plain("padded_tokens_per_s", "padding included")] if is_padded else []
    waiting = [] if silent else [plain("communication_max_s", "between processes")]
    memory = [plain(key, find_name(key), colour=colour) for key, colour in zip(MEMORY, "cdab", strict=True)]
    steps = [step for curve in memory for step, _ in curve.points]
    if steps and (plan := compare_memory(run)):
        level = [(step, plan.planned) for step in sorted({min(steps), max(steps)})]
        memory.append(Curve("planned_bytes", "planned at most", level, "d", dashed=True))
    loss = ("Loss", "loss", [noisy("loss", "training"), held_out])
    update = ("Loss of the update, near 0 by construction", "update_loss", [noisy("loss", "training")])
    from_rewards = learns_from_rewards(run)
    all_curves: list[tuple[str, str, list[Curve]]] = [
        *([] if from_rewards else [loss]),
        ("Learning rate", "learning_rate", [plain("learning_rate", "rate", colour="c")]),
        ("Gradient norm", "grad_norm", [noisy("grad_norm", "norm", colour="d")]),
        ("Speed", "tokens", [noisy("tokens_per_s", "all processes"), *padded]),
        ("Time of a step", "step_s", [noisy("step_s", "in all"), *waiting]),
        ("Memory of the main process", "_bytes", memory),
        *((capitalized(find_name(key)), key, [noisy(key, find_name(key), colour="c")]) for key in others),
        *([update] if from_rewards else []),
    ]
    return [
        Chart(
            title=title, unit=unit, curves=[curve for curve in curves if curve.points], last_step=run.step,
            resumed=resumed, is_wide=unit == "loss", may_be_log=unit in ("loss", "grad_norm"),
        )
        for title, unit, curves in all_curves
        if any(value for curve in curves for _, value in curve.points)
    ]  # fmt: skip


def _find_held_out_points(run: RunFiles) -> list[Point]:
    """Held-out losses over the steps, that of the untrained model at step 0 included."""
    points = dict(run.held_out)
    if "perplexity" in run.evals:
        return sorted(points.items())  # before and after a sliding window has measured, other than while training
    before, after = (as_number(run.evals.get(side, {}).get("loss")) for side in ("before", "after"))
    if before is not None:
        points.setdefault(0.0, before)
    # With the best weights kept, the result is not that of the last step.
    keeps_best = run.value("train.best_metric") or run.value("train.early_stopping")
    if after is not None and run.state == "done" and not keeps_best:
        points.setdefault(float(run.step), after)
    return sorted(points.items())


ANSWERS_OF_A_REWARD = 3
"""Different completions of each prompt that are shown."""


class Tries(NamedTuple):
    """Groups of completions, and how many steps have kept theirs."""

    shown: list[Answer]
    n_steps: int


def pick_tries(run: RunFiles) -> Tries | None:
    """Return completions of a few steps; None for a run that has kept none, or whose are episodes.

    They are those of the two prompts of each step whose advantages differ most.
    """
    steps = sampled_steps(run)
    if not steps or (run.task and run.task.turns == 2):
        return None

    def advantage_range(pair: tuple[str, list[Line]]) -> float:
        known = [value for line in pair[1] if math.isfinite(value := _read_advantage(line))]
        return max(known, default=0.0) - min(known, default=0.0)

    content, shown = content_names(run), []
    for step in sorted({steps[at * (len(steps) - 1) // 2] for at in range(3)}):
        groups: dict[str, list[Line]] = {}
        for line in read_samples(run, step):
            groups.setdefault(cut(line.get("prompt_id"), 40), []).append(line)
        widest = sorted(groups.items(), key=advantage_range, reverse=True)[:2]
        shown += [_show_group(name, group, step=step, content=content) for name, group in widest]
    return Tries(shown, len(steps)) if shown else None


def _read_advantage(line: Line) -> float:
    return as_number(line.get("advantage")) or 0.0


def _show_group(name: str, group: list[Line], *, step: int, content: list[str]) -> Answer:
    """A prompt with the best, the middle and the worst of its completions; equal ones once."""
    different = {str(line.get("completion")): line for line in group}
    ranked = sorted(different.values(), key=_read_advantage, reverse=True)
    texts: list[tuple[str, bool | None, str]] = [("Prompt", None, cut(group[0].get("prompt") or "", MOST_CHARACTERS))]
    for place in sorted({at * (len(ranked) - 1) // (ANSWERS_OF_A_REWARD - 1) for at in range(ANSWERS_OF_A_REWARD)}):
        line = ranked[place]
        rewards = list(mapping(line.get("rewards")).items())[:8]
        parts = [", ".join(f"{cut(reward, 40)} {_figure(value)}" for reward, value in rewards)]
        verdict = mapping(line.get("verdict"))
        ending = [str(verdict["status"])] if isinstance(verdict.get("status"), str) else []
        if verdict.get("total") is not None:
            ending.append(f"{_figure(verdict.get('passed'))} of {_figure(verdict.get('total'))} tests")
        parts += [", ".join(ending)] if ending else []
        why = cut(f"{'; '.join(parts)}. Advantage {_figure(line.get('advantage'))}", 300)
        texts.append((why, passes(line, content), cut(line.get("completion"), MOST_CHARACTERS)))
    title = f"Step {step:,}, prompt {name}: {len(group):,} completions, {len(different):,} different"
    return Answer(title, texts)


def _figure(value: Any) -> str:
    number = as_number(value)
    return "unknown" if number is None else rounded(number)

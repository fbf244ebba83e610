"""What a run learned from rewards: figures at the beginning and at the end, curves, and completions to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from sftplay.config.data import RewardConfig
from sftplay.report.chart import ChartPlan, logged, measured
from sftplay.report.figures import as_number, capitalized, compare, find_name, format_figure
from sftplay.report.history import mean
from sftplay.report.page import MOST_CHARACTERS, Answer, Block, Table, cut
from sftplay.report.run_files import RunFiles, mapping, mappings
from sftplay.reward.table import has_full_value

FIRST, LAST = 3, 10
"""Steps at the beginning and at the end that are compared: single steps are noisy."""

MOST_LINES = 4_096
"""Completions of a step that are looked at."""

COMPLETIONS_OF_A_PROMPT = 3
"""Different completions of each prompt that are shown."""

Line = dict[str, Any]


def reward_ends(run: RunFiles) -> dict[str, tuple[float | None, float | None]]:
    """Return the sampled rewards' means over the first and over the last logged steps."""
    values = run.history.values
    keys = ("reward", "true_reward", *(name for name in values if name.startswith("reward/")))
    known = {key: values[key] for key in keys if key in values}
    return {key: (_mean_known(course[:FIRST]), _mean_known(course[-LAST:])) for key, course in known.items()}


def learned_table(run: RunFiles) -> Table | None:
    """Return each figure at the beginning and at the end; None for a run that has no rewards."""
    values = run.history.values
    if "reward" not in values:
        return None
    steps, content = _sampled_steps(run), _content_names(run)
    others = ("zero_variance_share", "clipped_ratio", "completion_tokens", "entropy", "kl")
    figures: list[tuple[str, str, Sequence[float | None], Sequence[float | None]]] = [
        (find_name(key), key, [first], [last]) for key, (first, last) in reward_ends(run).items()
    ]
    passing = [
        [passes(line, content) for step in few for line in _read_samples(run, step)]
        for few in (steps[:FIRST], steps[-LAST:])
    ]
    figures.append(("pass@1, sampled", "pass", passing[0], passing[1]))
    figures += [(find_name(key), key, values[key][:FIRST], values[key][-LAST:]) for key in others if key in values]
    for key, name in (("reward", "reward of held-out prompts, greedy"), ("pass", "pass@1 of held-out prompts, greedy")):
        points = [value for _, value in run.curve(key)]
        figures.append((name, key, points[:1], points[-1:]))
    rows = []
    for name, key, *sides in figures:
        first, last = map(_mean_known, sides)
        if first is not None or last is not None:
            rows.append([name, *compare(key, first, after=last)])
    caption = f"Sampled: means of the first {FIRST} and the last {LAST} logged steps. Held-out: first and last"
    return Table(head=["Figure", "First", "Last", "Change"], rows=rows, kinds=" nnv", caption=f"{caption} measurement")


def _mean_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the finite values; None where there is none."""
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return mean(known) if known else None


MOST_ROWS = 12
"""Numbers of turns that have a row of their own."""


def list_turns(run: RunFiles) -> list[Block]:
    """Return the tables of completions of several turns; none for a run whose completions have one turn."""
    values = run.history.values
    if "turns" not in values:
        return []
    rows = []
    names = ("turns", "tool_calls", "tool_failures", "environment_tokens")
    for key in (*names, *(name for name in values if name.startswith("ended/"))):
        course = values.get(key, ())
        first, last = _mean_known(course[:FIRST]), _mean_known(course[-LAST:])
        if first or last:
            rows.append([capitalized(find_name(key)), *compare(key, first, after=last)])
    caption = f"Means over completions, of the first {FIRST} and the last {LAST} logged steps"
    blocks: list[Block] = [
        ("table", Table(head=["A completion", "First", "Last", "Change"], rows=rows, kinds=" nnv", caption=caption))
    ]
    return [*blocks, *_list_by_turns(run)]


def _list_by_turns(run: RunFiles) -> list[Block]:
    """Return the table of the last steps' samples by their number of turns; none where no samples are kept."""
    content, groups = _content_names(run), dict[int, list[Line]]()
    for step in _sampled_steps(run)[-LAST:]:
        for line in _read_samples(run, step):
            count = sum(turn.get("role") == "assistant" for turn in mappings(line.get("turns")))
            groups.setdefault(count, []).append(line)
    total, rows = sum(map(len, groups.values())), []
    for count, lines in sorted(groups.items())[:MOST_ROWS]:
        called = [sum(turn.get("role") == "tool" for turn in mappings(line.get("turns"))) for line in lines]
        right, advantages = [passes(line, content) for line in lines], map(_read_advantage, lines)
        means = map(_mean_known, (called, right, advantages))
        shown = [format_figure(key, value) for key, value in zip(("calls", "pass", "advantage"), means, strict=True)]
        rows.append([f"{count:,}", format_figure("turns_share", len(lines) / total), *shown])
    if not rows:
        return []
    head = ["Turns", "Completions", "Calls", "pass@1", "Advantage"]
    caption = f"Samples of the last {LAST} steps, by the model's turns in a completion"
    return [("table", Table(head=head, rows=rows, kinds="nnnnn", caption=caption))]


def plan(run: RunFiles) -> list[ChartPlan]:
    """Return charts of the reward with that of held-out prompts, of each reward by its name, and of what passes."""
    by_name = [
        logged(run, key, name=key.removeprefix("reward/")) for key in run.history.values if key.startswith("reward/")
    ]
    held_out = [measured(run, key, name="held-out, greedy") for key in ("reward", "pass")]
    return [
        ("Reward", "reward", [logged(run, "reward"), logged(run, "true_reward"), held_out[0]]),
        ("Rewards by name", "value", by_name[:4]),
        ("Share that passes", "pass", held_out[1:]),
    ]


def _sampled_steps(run: RunFiles) -> list[int]:
    """The steps whose completions are kept, in order."""
    try:
        names = [path.stem.removeprefix("step-") for path in (run.folder.path / "samples").glob("step-*.jsonl")]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)


def _read_samples(run: RunFiles, step: int) -> list[Line]:
    return list(run.rows(f"samples/step-{step}.jsonl", MOST_LINES))


def _content_names(run: RunFiles) -> list[str]:
    """The names of the rewards that only a right answer gets in full."""
    names = []
    for entry in mappings(run.value("rewards")):
        with suppress(ValidationError):  # a config that was spoilt by hand
            reward = RewardConfig.model_validate(entry)
            names += [reward.name] if has_full_value(reward) else []
    return names


def passes(line: Line, names: Sequence[str]) -> bool | None:
    """Return whether each of these rewards gave 1; None where one gave no value, or there is none."""
    values = [as_number(mapping(line.get("rewards")).get(name)) for name in names]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return None if not values or len(known) < len(values) else min(known) >= 1.0


def try_blocks(run: RunFiles) -> list[Block]:
    """Return completions of a few steps; none for a run that has kept none, or whose are episodes.

    They are those of the two prompts of each step whose advantages differ most.
    """
    steps = _sampled_steps(run)
    if not steps or (run.task and run.task.turns == 2):
        return []

    def advantage_range(pair: tuple[str, list[Line]]) -> float:
        known = [value for line in pair[1] if math.isfinite(value := _read_advantage(line))]
        return max(known, default=0.0) - min(known, default=0.0)

    content, shown = _content_names(run), []
    for step in sorted({steps[at * (len(steps) - 1) // 2] for at in range(3)}):
        groups: dict[str, list[Line]] = {}
        for line in _read_samples(run, step):
            groups.setdefault(cut(line.get("prompt_id"), 40), []).append(line)
        for name, group in sorted(groups.items(), key=advantage_range, reverse=True)[:2]:
            shown.append(_show_group(f"Step {step:,}, prompt {name}", group, content=content))
    text = (
        f"Of the completions of {len(steps):,} steps: the prompts whose rewards differ most, with"
        " the best, the middle and the worst one. All are in samples/."
    )
    return [("note", text), ("answers", shown)] if shown else []


def _read_advantage(line: Line) -> float:
    return as_number(line.get("advantage")) or 0.0


def _read_completion(line: Line) -> str:
    """Return a completion as text, with who said what where it has several turns."""
    turns = mappings(line.get("turns"))
    if len(turns) < 2:
        return str(line.get("completion"))
    return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in turns)


def _show_group(title: str, group: list[Line], *, content: list[str]) -> Answer:
    """A prompt with the best, the middle and the worst of its completions; equal ones once."""
    different = {_read_completion(line): line for line in group}
    ranked = sorted(different.values(), key=_read_advantage, reverse=True)
    texts: list[tuple[str, bool | None, str]] = [("Prompt", None, cut(group[0].get("prompt") or "", MOST_CHARACTERS))]
    last = COMPLETIONS_OF_A_PROMPT - 1
    for place in sorted({at * (len(ranked) - 1) // last for at in range(last + 1)}):
        line = ranked[place]
        verdict = mapping(line.get("verdict"))
        rewards = [
            f"{cut(name, 40)} {format_figure('reward', v)}"
            for name, v in list(mapping(line.get("rewards")).items())[:8]
        ]
        ending = [str(verdict["status"])] if isinstance(verdict.get("status"), str) else []
        if verdict.get("total") is not None:
            passed, total = (format_figure("n", verdict.get(key)) for key in ("passed", "total"))
            ending.append(f"{passed} of {total} tests")
        why = "; ".join(", ".join(part) for part in (rewards, ending) if part)
        why = cut(f"{why}. Advantage {format_figure('advantage', line.get('advantage'))}", 300)
        texts.append((why, passes(line, content), cut(_read_completion(line), MOST_CHARACTERS)))
    return f"{title}: {len(group):,} completions, {len(different):,} different", texts

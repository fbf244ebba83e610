"""The rewards of a finished or running run once more: of the completions that it has kept, by the same rewards.

What a model learned from can so be checked by another process, at another time, with another executor. It changes
nothing in the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from sftplay.atomic import read_lines
from sftplay.config.data import ENVIRONMENT
from sftplay.data.load_prompts import Questions
from sftplay.errors import DataError
from sftplay.reward.reward_set import RewardSet, aligned
from sftplay.reward.table import ENVIRONMENT_REWARD


@dataclass
class Recomputed:
    """One reward then and now."""

    name: str
    n: int = 0
    differ: int = 0
    largest_difference: float = 0.0
    first: str = ""
    """The first completion that got something else: file and line, then and now."""

    def add(self, place: str, then: float | None, *, now: float | None) -> None:
        """Count a completion that got `then` and gets `now`."""
        self.n += 1
        if then is None or now is None:
            differs, distance = then is not now, 0.0
        else:
            differs, distance = not isclose(then, now, rel_tol=1e-6, abs_tol=1e-6), abs(then - now)
        self.differ += differs
        self.largest_difference = max(self.largest_difference, distance)
        if differs and not self.first:
            self.first = f"{place} got {then}, now {now}"


def kept_steps(folder: Path) -> list[Path]:
    """Return the files of samples/ below a run's folder, in the order of their steps."""
    files = [path for path in (folder / "samples").glob("step-*.jsonl") if path.stem[5:].isdecimal()]
    return sorted(files, key=lambda path: int(path.stem[5:]))


def recompute(
    files: Sequence[Path], questions: Questions, *, columns: Sequence[str], reward_set: RewardSet
) -> list[Recomputed]:
    """Return each reward of the run, then and now, over the completions in `files`. Raise DataError where a file cannot
    be read, or a prompt of it is no longer in the data.
    """
    in_turns = [name for name, worker in reward_set.workers.items() if worker.use == ENVIRONMENT]
    numbers = {row: number for number, row in enumerate(questions.rows["row"])}
    found = {name: Recomputed(name) for name in reward_set.names}
    for file in files:
        lines, broken = read_lines(file)
        if broken:
            raise DataError("cannot be read", where=f"{file}:{broken[0]}", fix="remove the line, or restore the file")
        asked = []
        for line in lines:
            row = line.get("prompt_id")
            if not isinstance(row, int) or row not in numbers:
                fix = "give the run's own data back: data_report.json names the files"
                raise DataError(f"the prompt {row} is not in the data", where=str(file), fix=fix)
            asked.append(questions[numbers[row]].columns)
        completions = [str(line.get("completion", "")) for line in lines]
        given = aligned(asked, columns)
        if in_turns:  # what an environment gave is not computed again: it would take the model's turns
            first = [mapping.get(in_turns[0]) for mapping in (line.get("rewards") or {} for line in lines)]
            given |= {ENVIRONMENT_REWARD: first}
        given |= {"turns": [line["turns"] for line in lines]} if all("turns" in line for line in lines) else {}
        # Before there were tokens in these files, rewards for length counted words.
        counts = [line.get("tokens") for line in lines]
        ids = [range(int(count)) for count in counts if count is not None]
        scored = reward_set.score(completions, given, completion_ids=ids if len(ids) == len(lines) else None)
        for name, scores in scored.by_name.items():
            for n, (line, now) in enumerate(zip(lines, scores.values, strict=True), start=1):
                rewards = line.get("rewards")
                value = rewards.get(name) if isinstance(rewards, dict) else None
                then = float(value) if isinstance(value, int | float) else None
                now = None if line.get("failure") else now  # of its environment: nothing is known of the completion
                found[name].add(f"{file}:{n}", then, now=now)
    return list(found.values())

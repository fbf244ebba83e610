"""Score completions by the rewards of the config, and write samples and metrics of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

import torch

from sftplay import log
from sftplay.atomic import whole_file
from sftplay.config.schema.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.code_answer import How
from sftplay.reward.code_rewards import NO_CODE
from sftplay.reward.reward_set import MissingRewardMonitor, RewardSet, Scored, aligned, combined
from sftplay.sandbox.verdicts.job import Status


def samples_path(folder: Path, step: int) -> Path:
    """Where the completions of a step are kept, below a run's folder."""
    return folder / "samples" / f"step-{step}.jsonl"


def write_samples(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Keep completions with what they were paid; on the main rank."""
    if log.is_main() and lines:
        path.parent.mkdir(exist_ok=True)
        with whole_file(path, survives_power_cut=False) as scratch:
            scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def cut_samples(folder: Path, *, after_step: int) -> None:
    """Remove what an earlier attempt wrote after the checkpoint that the run continues from."""
    if log.is_main():
        for path in (folder / "samples").glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > after_step:
                path.unlink()


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A rank's completions, as they are sent to the other ranks."""

    rows: list[int]
    completions: list[str]
    scored: Scored
    prompts: list[str] = field(default_factory=list)
    """What was asked, in words."""

    control: list[float] | None = None
    """What they are paid in place of the rewards, where the run is a control."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The completions of all ranks, in rank order, with what each reward says of them."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    rows: list[int]
    completions: list[str]
    scored: Scored
    prompts: list[str] = field(default_factory=list)
    control: list[float] | None = None

    @property
    def learned(self) -> tuple[str, ...]:
        """The rewards that are learned from; one of weight 0 is only measured."""
        return tuple(name for name, weight in zip(self.names, self.weights, strict=True) if weight)

    @cached_property
    def true(self) -> list[float | None]:
        """The weighted sum of the rewards; None where none knows a value."""
        return combined(self.scored, self.weights)

    @property
    def paid(self) -> list[float | None]:
        """What the model learns from."""
        return self.true if self.control is None else list(self.control)

    def values(self) -> list[list[float]]:
        """A line for each completion with a value for each reward that is learned from; NaN where it abstains.

        Where the sum is not known, all of them are NaN. TRL then leaves the completion out of means and deviations,
        and its advantage is 0.
        """
        if self.control is not None:
            return [[value] for value in self.control]
        columns = [self.scored.by_name[name].values for name in self.learned]
        lines = zip(self.true, zip(*columns, strict=True), strict=True)
        return [[math.nan if None in (total, value) else value for value in line] for total, line in lines]

    def figures(self, num_generations: int) -> dict[str, float | None]:
        """The figures of this drawing for a line of metrics."""
        paid = self.paid
        groups = [paid[at : at + num_generations] for at in range(0, len(paid), num_generations)]
        known = [[value for value in group if value is not None] for group in groups]
        everything = [value for group in known for value in group]
        compared = [group for group in known if len(group) > 1]
        unknown = sum(
            None in line for line in zip(*(each.values for each in self.scored.by_name.values()), strict=True)
        )
        figures = {
            "reward": fmean(everything) if everything else None,
            "reward_std": stdev(everything) if len(everything) > 1 else None,
            "zero_variance_share": fmean(max(group) == min(group) for group in compared) if compared else None,
            "abstained": unknown / len(self.rows),
        }
        for name, scores in self.scored.by_name.items():
            values = [value for value in scores.values if value is not None]
            figures[f"reward/{name}"] = fmean(values) if values else None
        figures |= figures_of_programs(self.scored.verdicts)
        if self.control is not None:
            true = [value for value in self.true if value is not None]
            figures["true_reward"] = fmean(true) if true else None
        return figures

    def lines(self, advantages: Sequence[float]) -> list[dict[str, Any]]:
        """A line of samples/step-N.jsonl for each completion."""
        by_name: Mapping[str, list[float | None]] = {
            name: scores.values for name, scores in self.scored.by_name.items()
        }
        return [
            {
                "prompt_id": row,
                "prompt": self.prompts[n] if self.prompts else "",
                "completion": completion,
                "rewards": {name: values[n] for name, values in by_name.items()},
                **({} if self.control is None else {"control": self.control[n]}),
                "advantage": advantages[n],
                "verdict": self.scored.verdicts[n],
            }
            for n, (row, completion) in enumerate(zip(self.rows, self.completions, strict=True))
        ]


def figures_of_programs(verdicts: Sequence[Mapping[str, Any] | None]) -> dict[str, float | None]:
    """Shares of what became of programs (`sandbox/STATUS`), of how they were found (`found/HOW`), and of those that
    pass all hidden tests (`hidden_pass`); nothing where no programs are tried.

    Every status and way has its share, 0 too: a mean over drawings is right only where none is missing.
    """
    tried = [verdict for verdict in verdicts if verdict is not None]
    if not tried:
        return {}
    statuses, ways = Counter(each["status"] for each in tried), Counter(each.get("how") for each in tried)
    hidden = [each["hidden_pass"] for each in tried if each.get("hidden_pass") is not None]
    return {
        **{f"sandbox/{status}": statuses[status] / len(tried) for status in (*get_args(Status), NO_CODE)},
        **{f"found/{how}": ways[how] / len(tried) for how in get_args(How)},
        "hidden_pass": fmean(hidden) if hidden else None,
    }


def together(ranks: Sequence[Drawn], *, names: tuple[str, ...], weights: tuple[float, ...]) -> Judged:
    """The completions of all ranks as one batch."""
    return Judged(
        names=names,
        weights=weights,
        rows=[row for rank in ranks for row in rank.rows],
        completions=[text for rank in ranks for text in rank.completions],
        scored=Scored.of_all([rank.scored for rank in ranks]),
        prompts=[text for rank in ranks for text in rank.prompts],
        control=None if ranks[0].control is None else [value for rank in ranks for value in rank.control or ()],
    )


CONTROL = "control"
"""Name of the reward that a control pays."""


class Judge:
    """The rewards of a run on one rank; a context manager, which ends their processes."""

    def __init__(self, cfg: RunConfig, columns: Sequence[str]) -> None:
        """`columns` are those that any row has."""
        self.rewards, self.columns = RewardSet(cfg), tuple(columns)
        self._control = cfg.grpo.placebo_reward
        self._abstentions = MissingRewardMonitor()

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    @property
    def learned(self) -> dict[str, float]:
        """Name -> weight of the rewards that the model learns from."""
        if self._control is not None:
            return {CONTROL: 1.0}
        pairs = zip(self.rewards.names, self.rewards.weights, strict=True)
        return {name: weight for name, weight in pairs if weight}

    def judge(self, inputs: Sequence[Mapping[str, Any]], completions: Sequence[str], *, heartbeat: Heartbeat) -> Judged:
        """The completions of all ranks with their rewards; `inputs` are the rows of this rank's.

        Raises:
            RunError: on every rank, where a reward abstains too often.
        """
        with heartbeat.within("reward"):
            # Nothing is copied: rewards live in processes of their own, and programs get texts.
            scored = self.rewards.score(completions, aligned([row["columns"] for row in inputs], self.columns))
            own = Drawn(
                rows=[row["row"] for row in inputs],
                completions=list(completions),
                scored=scored,
                prompts=[row["words"] for row in inputs],
                control=self._paid(len(completions)),
            )
            ranks = gather_objects(own, heartbeat)
        judged = together(ranks, names=self.rewards.names, weights=self.rewards.weights)
        self._abstentions.add(judged.scored)
        return judged

    def _paid(self, n: int) -> list[float] | None:
        """What a control pays; random numbers come from torch, whose state a checkpoint keeps."""
        if self._control is None:
            return None
        return [1.0] * n if self._control == "constant" else torch.rand(n).tolist()

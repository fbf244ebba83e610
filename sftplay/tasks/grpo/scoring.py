"""Score completions by the rewards of the config, and write samples and metrics of them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, get_args

import torch

from sftplay import log
from sftplay.atomic import whole_file
from sftplay.config.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.code_answer import How
from sftplay.reward.code_rewards import NO_CODE
from sftplay.reward.reward_set import BatchRewards, MissingRewardMonitor, RewardSet, aligned, combined
from sftplay.sandbox.boxes.job import Status


def write_samples(folder: Path, lines: Sequence[Mapping[str, Any]], *, step: int) -> None:
    """Write a step's completions with their rewards to samples/ of the run folder; on the main rank."""
    if log.is_main() and lines:
        path = folder / "samples" / f"step-{step}.jsonl"
        path.parent.mkdir(exist_ok=True)
        with whole_file(path, survives_power_cut=False) as scratch:
            scratch.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")


def cut_samples(folder: Path, *, after_step: int) -> None:
    """Remove the samples that an earlier attempt wrote after the checkpoint from which the run continues."""
    if log.is_main():
        for path in (folder / "samples").glob("step-*.jsonl"):
            number = path.stem.removeprefix("step-")
            if number.isdecimal() and int(number) > after_step:
                path.unlink()


@dataclass(frozen=True, kw_only=True)
class ScoredBatch:
    """Completions with their rewards: those of one rank, or those of all ranks in rank order."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    rows: list[int]  # the row number of each completion's prompt in the data
    completions: list[str]
    rewards: BatchRewards
    prompts: list[str] = field(default_factory=list)  # the question of each completion as text
    control: list[float] | None = None
    """The rewards that the model learns from instead of the config's, in a control run."""

    @classmethod
    def concatenate(cls, parts: Sequence[ScoredBatch]) -> ScoredBatch:
        """Concatenate the batches of all ranks, in rank order."""
        return replace(
            parts[0],
            rows=[row for part in parts for row in part.rows],
            completions=[text for part in parts for text in part.completions],
            rewards=BatchRewards.concatenate([part.rewards for part in parts]),
            prompts=[text for part in parts for text in part.prompts],
            control=None if parts[0].control is None else [value for part in parts for value in part.control or ()],
        )

    @cached_property
    def true_rewards(self) -> list[float | None]:
        """The weighted sum of the rewards of each completion; None where it is unknown."""
        return combined(self.rewards, self.weights)

    @property
    def training_rewards(self) -> list[float | None]:
        """The reward of each completion that the model learns from; None where it is unknown."""
        return self.true_rewards if self.control is None else list(self.control)

    def make_reward_matrix(self) -> list[list[float]]:
        """Return the rewards that the model learns from, float [completions, rewards]; NaN where a reward abstains.

        A reward of weight 0 is only measured and has no column. Where the sum is unknown, the whole line is NaN. TRL
        then leaves the completion out of means and deviations, and its advantage is 0.
        """
        if self.control is not None:
            return [[value] for value in self.control]
        names = [name for name, weight in zip(self.names, self.weights, strict=True) if weight]
        columns = [self.rewards.by_name[name].values for name in names]
        lines = zip(self.true_rewards, zip(*columns, strict=True), strict=True)
        return [[math.nan if None in (total, value) else value for value in line] for total, line in lines]

    def compute_figures(self, num_generations: int) -> dict[str, float | None]:
        """Compute the figures of this batch for a line of metrics."""
        rewards = self.training_rewards
        groups = [rewards[at : at + num_generations] for at in range(0, len(rewards), num_generations)]
        known_by_group = [[value for value in group if value is not None] for group in groups]
        known = [value for group in known_by_group for value in group]
        compared = [max(group) == min(group) for group in known_by_group if len(group) > 1]
        columns = {name: column.values for name, column in self.rewards.by_name.items()}
        unknown = sum(None in line for line in zip(*columns.values(), strict=True))
        figures = {
            "reward": _find_mean(rewards),
            "reward_std": stdev(known) if len(known) > 1 else None,
            "zero_variance_share": _find_mean(compared),
            "abstained": unknown / len(self.rows),
            **{f"reward/{name}": _find_mean(values) for name, values in columns.items()},
            **compute_program_figures(self.rewards.verdicts),
        }
        return figures if self.control is None else {**figures, "true_reward": _find_mean(self.true_rewards)}

    def make_sample_lines(self, advantages: Sequence[float]) -> list[dict[str, Any]]:
        """Return the line of samples/step-N.jsonl for each completion."""
        columns = {name: column.values for name, column in self.rewards.by_name.items()}
        return [
            {
                "prompt_id": row,
                "prompt": self.prompts[n] if self.prompts else "",
                "completion": completion,
                "rewards": {name: values[n] for name, values in columns.items()},
                **({} if self.control is None else {"control": self.control[n]}),
                "advantage": advantages[n],
                "verdict": self.rewards.verdicts[n],
            }
            for n, (row, completion) in enumerate(zip(self.rows, self.completions, strict=True))
        ]


def compute_program_figures(verdicts: Sequence[Mapping[str, Any] | None]) -> dict[str, float | None]:
    """Compute the shares of programs by status (`sandbox/STATUS`), by the way they were found in the completion
    (`found/HOW`), and the share that passes all hidden tests (`hidden_pass`); empty where no program was run.

    Every status and every way has a share, also 0: a mean over rollout batches is right only where none is missing.
    """
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return {}
    statuses = Counter(verdict["status"] for verdict in known)
    ways = Counter(verdict.get("how") for verdict in known)
    return {
        **{f"sandbox/{status}": statuses[status] / len(known) for status in (*get_args(Status), NO_CODE)},
        **{f"found/{how}": ways[how] / len(known) for how in get_args(How)},
        "hidden_pass": _find_mean([verdict.get("hidden_pass") for verdict in known]),
    }


def _find_mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


CONTROL = "control"  # name of the reward of a control run


class RewardScorer:
    """Scores completions with the rewards of a run on one rank; a context manager that ends the reward processes."""

    def __init__(self, cfg: RunConfig, columns: Sequence[str]) -> None:
        """`columns` are the columns that any row has."""
        self.rewards, self.columns = RewardSet(cfg), tuple(columns)
        self._control = cfg.grpo.placebo_reward
        self._missing_rewards = MissingRewardMonitor()

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    @property
    def training_weights(self) -> dict[str, float]:
        """Name -> weight of the rewards that the model learns from."""
        if self._control is not None:
            return {CONTROL: 1.0}
        pairs = zip(self.rewards.names, self.rewards.weights, strict=True)
        return {name: weight for name, weight in pairs if weight}

    def score(
        self, inputs: Sequence[Mapping[str, Any]], completions: Sequence[str], *, heartbeat: Heartbeat
    ) -> ScoredBatch:
        """Score this rank's completions of the rows `inputs`; return the completions of all ranks with their rewards.
        Raise RunError on every rank where a reward abstains too often.
        """
        with heartbeat.within("reward"):
            # Nothing is copied: rewards live in processes of their own, and programs get texts.
            rewards = self.rewards.score(completions, aligned([row["columns"] for row in inputs], self.columns))
            control = None
            if self._control is not None:  # random numbers come from torch, whose state a checkpoint keeps
                n = len(completions)
                control = [1.0] * n if self._control == "constant" else torch.rand(n).tolist()
            local = ScoredBatch(
                names=self.rewards.names,
                weights=self.rewards.weights,
                rows=[row["row"] for row in inputs],
                completions=list(completions),
                rewards=rewards,
                prompts=[row["question"] for row in inputs],
                control=control,
            )
            batch = ScoredBatch.concatenate(gather_objects(local, heartbeat))
        self._missing_rewards.add(batch.rewards)
        return batch

"""Asks the rewards of a run about completions, the same way on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sftplay.config.schema.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.reward.reward_set import MissingRewardMonitor, RewardSet, aligned
from sftplay.tasks.grpo.judged import Drawn, Judged, together

CONTROL = "control"
"""Name of the reward that a control pays."""


class Judge:
    """The rewards of a run on one rank; a context manager, which ends their processes."""

    def __init__(self, cfg: RunConfig, columns: Sequence[str]) -> None:
        """`columns` are those that any row has."""
        self.rewards, self.columns = RewardSet(cfg), tuple(columns)
        self._control = cfg.grpo.control
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

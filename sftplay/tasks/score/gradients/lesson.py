"""What a batch of episodes teaches: the worth of each among those of all ranks, then gradients of a rank's share."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from sftplay import log
from sftplay.config.schema.score import ScoreConfig
from sftplay.heartbeat import Heartbeat
from sftplay.monitor.metrics import gather_objects
from sftplay.tasks.score.episodes.cast import Cast
from sftplay.tasks.score.episodes.judge import Verdict
from sftplay.tasks.score.episodes.play import Episode, Fresh
from sftplay.tasks.score.gradients.critic_step import CriticStep
from sftplay.tasks.score.gradients.update import Batch, Update
from sftplay.tasks.score.learning.credit import Credit, Outcome, credit_of
from sftplay.tasks.score.learning.schedule import kl_coefficients, stage_of


class Played(NamedTuple):
    """A rank's episodes of a step, and the verdicts on those of all ranks."""

    episodes: Sequence[Episode]
    verdicts: Sequence[Verdict]
    fresh: Sequence[Fresh]
    """Another answer to each of an episode's prompts; empty where there is no critic."""

    @property
    def own(self) -> slice:
        """This rank's verdicts among all."""
        n = len(self.episodes)
        return slice(log.rank() * n, (log.rank() + 1) * n)


class Lesson:
    """One batch of episodes, from their credit to the gradients."""

    def __init__(
        self, played: Played, *, cast: Cast, score: ScoreConfig, batch: Batch, heartbeat: Heartbeat, step: int
    ) -> None:
        self.played, self.cast, self.score, self.heartbeat = played, cast, score, heartbeat
        self.stage = stage_of(step, score)
        self.guide_learns = guide_learns(cast, score, step=step)
        self.update = Update(cast, score, batch=batch)
        self.critic_step = None
        if cast.critic is not None:
            self.critic_step = CriticStep(cast.critic, cast.slow_critic, batch=batch)

    def credit(self) -> Credit:
        """Advantages of the episodes of all ranks, from values of before anything is learned."""
        episodes, fresh, verdicts = self.played.episodes, self.played.fresh, self.played.verdicts
        value = critic = None
        if self.cast.has_value:
            value = self._of_all_ranks(
                self.update.values([episode.hint for episode in episodes if episode.hint is not None])
            )
        if self.critic_step is not None:
            critic = self._of_all_ranks(self.critic_step.opinions(episodes, fresh))

        def column(name: str) -> Tensor:
            return torch.tensor([float(getattr(verdict, name)) for verdict in verdicts])

        outcome = Outcome(
            first=column("first"),
            second=column("second"),
            is_known=column("is_known"),
            form_first=column("form_first"),
            form_second=column("form_second"),
            leak=column("leaks"),
            value=value,
            critic=critic,
        )
        return credit_of(outcome, self.score, stage=self.stage)

    def learn(self, credit: Credit) -> None:
        """Gradients of all parts, from this rank's share."""
        (episodes, verdicts, fresh), own, score = self.played, self.played.own, self.score
        turns = [[episode.first for episode in episodes], [episode.second for episode in episodes]]
        hints = [episode.hint for episode in episodes if episode.hint is not None]
        counts = [sum(len(action.ids) for action in actions) for actions in (*turns, hints)]
        totals = [sum(each) / log.world_size() for each in zip(*gather_objects(counts, self.heartbeat), strict=True)]
        if self.critic_step is not None:
            known = torch.tensor([float(verdict.is_known) for verdict in verdicts[own]])
            first, second = (each[own] for each in credit.paid)
            self.critic_step.learn(episodes, fresh, returns=(first, second), weight=known, discount=score.turn_discount)
        outcome = torch.tensor([verdict.second for verdict in verdicts[own]])
        if self.guide_learns:
            self.update.guide(hints, advantage=credit.guide[own], outcome=outcome, n_tokens=totals[2])
        elif self.cast.has_value and score.value_coef:
            self.update.value_alone(hints, outcome=outcome)
        beta = kl_coefficients(self.stage, score)
        advantage = None if credit.first is None else credit.first[own]
        self.update.solver(turns[0], turn=1, advantage=advantage, beta=beta.first, n_tokens=totals[0])
        self.update.solver(turns[1], turn=2, advantage=credit.second[own], beta=beta.second, n_tokens=totals[1])

    def figures(self) -> dict[str, float]:
        """KL terms, entropies and the critic's losses, over all ranks."""
        mine = {**self.update.sums, **(self.critic_step.sums if self.critic_step is not None else {})}
        sums = gather_objects(mine, self.heartbeat)
        return {name: fmean(each[name] for each in sums) for name in sums[0] if name != "loss"}

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """[..., episodes of a rank] -> [..., episodes of all]."""
        return torch.cat([torch.tensor(each) for each in gather_objects(mine.tolist(), self.heartbeat)], -1)


def guide_learns(cast: Cast, score: ScoreConfig, *, step: int) -> bool:
    """Whether the guide trains in the step with this number."""
    return "guide" in cast.parts and step > score.guidance_warmup

"""What a drawing of episodes teaches: the worth of each among those of all ranks, then gradients of a rank's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from sftplay import log
from sftplay.config.schema.score import ScoreConfig
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.episodes.cast import Cast
from sftplay.tasks.score.episodes.drawing import Action
from sftplay.tasks.score.episodes.judge import Verdict
from sftplay.tasks.score.episodes.play import Episode, Fresh
from sftplay.tasks.score.gradients.critic_step import CriticStep
from sftplay.tasks.score.gradients.update import Batch, Update
from sftplay.tasks.score.learning.credit import Advantages, Outcome, credit_of
from sftplay.tasks.score.learning.schedule import kl_coefficients, stage_of


class Played(NamedTuple):
    """A rank's episodes of a drawing, and the verdicts on those of all ranks."""

    episodes: Sequence[Episode]
    verdicts: Sequence[Verdict]
    fresh: Sequence[Fresh]
    """Another answer to each of an episode's prompts; empty where there is no critic."""

    @property
    def own(self) -> slice:
        """This rank's verdicts among all."""
        n = len(self.episodes)
        return slice(log.rank() * n, (log.rank() + 1) * n)


class PolicyUpdate:
    """What an optimizer step learns from the episodes of a drawing, from their credit to the gradients."""

    def __init__(
        self,
        played: Played,
        *,
        part: Sequence[int],
        cast: Cast,
        score: ScoreConfig,
        batch: Batch,
        heartbeat: Heartbeat,
        step: int,
    ) -> None:
        """`part` are the numbers of the episodes, among this rank's, that the step learns from."""
        self.played, self.cast, self.score, self.heartbeat = played, cast, score, heartbeat
        self.part = list(part)
        self._of_step: dict[str, float] = {}
        """Action tokens that the loss of a role is divided by, over those of the step."""

        self.stage = stage_of(step, score)
        self.guide_learns = guide_learns(cast, score, step=step)
        self.update = Update(cast, score, batch=batch)
        self.critic_step = None
        if cast.critic is not None:
            self.critic_step = CriticStep(cast.critic, cast.slow_critic, batch=batch)

    def credit(self) -> Advantages:
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
            return torch.tensor([float(getattr(verdict, name) or 0.0) for verdict in verdicts])

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

    def learn(self, credit: Advantages) -> None:
        """Gradients of all parts, from this rank's share."""
        own, score = self.played.own, self.score
        episodes = [self.played.episodes[n] for n in self.part]
        verdicts = [self.played.verdicts[own][n] for n in self.part]
        roles = actions_of(episodes)
        n_tokens = self._count_tokens(roles)
        if self.critic_step is not None:
            known = torch.tensor([float(verdict.is_known) for verdict in verdicts])
            fresh = [self.played.fresh[n] for n in self.part]
            first, second = (each[own][self.part] for each in credit.paid)
            self.critic_step.learn(episodes, fresh, returns=(first, second), weight=known, discount=score.turn_discount)
        targets = [float(verdict.second or 0.0) if verdict.is_known else nan for verdict in verdicts]
        outcome, hints = torch.tensor(targets), roles["guide"]
        if self.guide_learns:
            advantage = credit.guide[own][self.part]
            self.update.guide(hints, advantage=advantage, outcome=outcome, n_tokens=n_tokens["guide"])
        elif self.cast.has_value:
            self.update.value_alone(hints, outcome=outcome)
        betas = kl_coefficients(self.stage, score)
        for turn, gain, beta in ((1, credit.first, betas.first), (2, credit.second, betas.second)):
            self.update.solver(
                roles[f"t{turn}"], turn=turn, advantage=None if gain is None else gain[own][self.part], beta=beta,
                n_tokens=n_tokens[f"t{turn}"],
            )  # fmt: skip

    def _count_tokens(self, roles: Mapping[str, Sequence[Action]]) -> dict[str, float]:
        """Action tokens of each role that losses are divided by: those of a step in the mean of the drawing, over the
        ranks. So the gradients of all steps of a pass add up to that of the whole drawing."""
        all_roles = actions_of(self.played.episodes)
        counts = {name: (_n_tokens(roles[name]), _n_tokens(all_roles[name])) for name in roles}
        ranks, world, parts = gather_objects(counts, self.heartbeat), log.world_size(), self.score.steps_per_generation
        found = {}
        for name in roles:
            step, whole = (sum(each[name][n] for each in ranks) / world for n in (0, 1))
            found[name] = whole / parts
            self._of_step[name] = found[name] / step if step else 1.0
        return found

    def figures(self) -> dict[str, float]:
        """KL terms, entropies, ratios and the critic's losses, over all ranks; means over the tokens of the step."""
        mine = {**self.update.sums, **(self.critic_step.sums if self.critic_step is not None else {})}
        sums = gather_objects(mine, self.heartbeat)
        return {
            name: fmean(each[name] for each in sums) * self._of_step.get(name.rpartition("_")[2], 1.0)
            for name in sums[0]
            if name != "loss"
        }

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """[..., episodes of a rank] -> [..., episodes of all]."""
        return torch.cat([torch.tensor(each) for each in gather_objects(mine.tolist(), self.heartbeat)], -1)


def actions_of(episodes: Sequence[Episode]) -> dict[str, list[Action]]:
    """Who has done what: the actions of both turns, and the hints."""
    return {
        "t1": [episode.first for episode in episodes],
        "t2": [episode.second for episode in episodes],
        "guide": [episode.hint for episode in episodes if episode.hint is not None],
    }


def _n_tokens(actions: Sequence[Action]) -> int:
    return sum(len(action.ids) for action in actions)


def guide_learns(cast: Cast, score: ScoreConfig, *, step: int) -> bool:
    """Whether the guide trains in the step with this number."""
    return "guide" in cast.parts and step > score.guidance_warmup

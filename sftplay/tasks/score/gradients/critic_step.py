"""The critic's part of a step: its opinion of the episodes before anything is learned, and then its gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sftplay.tasks.score.episodes.drawing import Action
from sftplay.tasks.score.episodes.play import Episode, Fresh
from sftplay.tasks.score.gradients.update import Batch
from sftplay.tasks.score.learning.critic import Critic, Visits, critic_loss, opinion
from sftplay.tasks.score.learning.encoder import Tokens


class CriticStep:
    """Shows a rank's episodes to the critic, in micro-batches."""

    def __init__(self, critic: Critic, slow: Critic, *, batch: Batch) -> None:
        self.critic, self.slow, self.batch = critic, slow, batch
        self.sums: dict[str, float] = defaultdict(float)
        """The four losses of this rank's share."""

    def opinions(self, episodes: Sequence[Episode], fresh: Sequence[Fresh]) -> Tensor:
        """min Q and min V of turn 1, then of turn 2: fp32 [4, episodes], on the CPU."""
        found = []
        for _, turns in self._parts(episodes, fresh):
            found.append(torch.stack([each for turn in turns for each in opinion(self.critic, turn)]).float().cpu())
        return torch.cat(found, 1)

    def learn(
        self,
        episodes: Sequence[Episode],
        fresh: Sequence[Fresh],
        *,
        returns: tuple[Tensor, Tensor],
        weight: Tensor,
        discount: float,
    ) -> None:
        """The gradient of the four losses; `returns` of both turns and `weight` are [episodes]."""
        device = next(self.critic.parameters()).device
        for part, turns in self._parts(episodes, fresh):
            first, second, known = (each[part].to(device) for each in (*returns, weight))
            losses = critic_loss(
                self.critic, self.slow, turns=turns, returns=(first, second), weight=known, discount=discount,
                n_episodes=self.batch.n_episodes,
            )  # fmt: skip
            for name, loss in losses.items():
                self.sums[f"critic_{name}"] += float(loss.detach())
            self.batch.backward(torch.stack(list(losses.values())).sum())

    def _parts(
        self, episodes: Sequence[Episode], fresh: Sequence[Fresh]
    ) -> Iterator[tuple[slice, tuple[Visits, Visits]]]:
        for at in range(0, len(episodes), self.batch.micro_batch):
            part = slice(at, at + self.batch.micro_batch)
            mine, others = episodes[part], fresh[part]
            first = self._visits([each.first for each in mine], [again for again, _ in others])
            second = self._visits([each.second for each in mine], [again for _, again in others])
            yield part, (first, second)

    def _visits(self, given: Sequence[Action], again: Sequence[Action]) -> Visits:
        rows = ([each.prompt for each in given], [each.ids for each in given], [each.ids for each in again])
        return Visits(*(Tokens.of(each) for each in rows))

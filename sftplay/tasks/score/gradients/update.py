"""The gradients of one step: the guide's loss, then the solver's, in micro-batches whose sum is the whole batch.

All advantages and values were computed before. Solver and guide train different weights, so the gradients of both are
taken before the one optimizer step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from sftplay.config.schema.score import ScoreConfig
from sftplay.tasks.score.episodes.cast import Cast, Role
from sftplay.tasks.score.episodes.drawing import Action
from sftplay.tasks.score.gradients.scoring import ActionBatch, OutputHead, TokenScores, forward, score_actions
from sftplay.tasks.score.learning.encoder import Tokens
from sftplay.tasks.score.learning.losses import clipped_loss, masked_mean, policy_loss
from sftplay.tasks.score.learning.value import straight_through, value_loss
from sftplay.tasks.score.shards.models import within


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a rank's share of an optimizer step's episodes is cut, and how large the whole is per rank."""

    micro_batch: int
    n_episodes: float
    """Episodes of the whole step, over the ranks: gradients are averaged over them."""

    pad: int
    backward: Callable[[Tensor], None]
    context: Callable[[], Any]
    """The precision of the forward passes."""

    is_fresh: bool = True
    """Whether nothing has been learned since the draw: every ratio is 1 then."""


class Update:
    """Takes the gradients of solver and guide, and adds up what they are made of."""

    def __init__(self, cast: Cast, score: ScoreConfig, *, batch: Batch) -> None:
        self.cast, self.score, self.batch = cast, score, batch
        self.sums: dict[str, float] = defaultdict(float)
        """Loss, KL terms, entropies and ratios of this rank's share."""

    def solver(
        self, actions: Sequence[Action], *, turn: int, advantage: Tensor | None, beta: float, n_tokens: float
    ) -> None:
        """One turn of the solver: its policy gradient, where it is paid, and its KL."""
        name = f"t{turn}"
        for part, tensors in self._parts(actions, "solver"):
            with self.batch.context():
                scores = self._scores("solver", tensors)
                kl = masked_mean(scores.kl, tensors.mask, n_tokens=n_tokens)
                loss = beta * kl
                if advantage is not None:
                    loss = loss + self._policy(scores, tensors, name=name, advantage=advantage[part], n_tokens=n_tokens)
            self._add(name, loss, kl=kl, scores=scores, tensors=tensors, n_tokens=n_tokens)
            if loss.requires_grad:
                self._backward("solver", loss)

    def guide(self, actions: Sequence[Action], *, advantage: Tensor, outcome: Tensor, n_tokens: float) -> None:
        """The guide: policy gradient, KL, and the loss of V, whose gradient goes as far as `value_flow` says."""
        score = self.score
        for part, tensors in self._parts(actions, "guide"):
            with self.batch.context():
                scores = self._scores("guide", tensors)
                kl = masked_mean(scores.kl, tensors.mask, n_tokens=n_tokens)
                loss = self._policy(scores, tensors, name="guide", advantage=advantage[part], n_tokens=n_tokens)
                loss = loss + score.beta_guide * kl
                seen = self._tokens(actions[part]) if score.value == "separate" else scores.last_hidden
                loss = loss + self._value(seen, tensors, outcome=outcome[part])
            self._add("guide", loss, kl=kl, scores=scores, tensors=tensors, n_tokens=n_tokens)
            self._backward("guide", loss)

    def value_alone(self, actions: Sequence[Action], *, outcome: Tensor) -> None:
        """V alone, while the guide does not learn."""
        for part, seen in self._seen(actions):
            loss = value_loss(
                self.cast.value_head, seen, target=outcome[part], flow="stop", value_coef=1.0, n_episodes=1
            )
            assert loss is not None
            self.batch.backward(loss / self.batch.n_episodes)

    @torch.no_grad()
    def values(self, actions: Sequence[Action]) -> Tensor:
        """V of each episode, [episodes], at the end of its hint."""
        return torch.cat([self.cast.value_head(seen).float().cpu() for _, seen in self._seen(actions)])

    def _seen(self, actions: Sequence[Action]) -> Iterator[tuple[slice, Tensor | Tokens]]:
        """What V looks at, without a gradient."""
        for part, tensors in self._parts(actions, "guide"):
            if self.score.value == "separate":
                yield part, self._tokens(actions[part])
                continue
            with torch.no_grad(), self.batch.context(), self.cast.speaking("guide") as model:
                hidden = within(model, partial(forward, model, tensors))
            yield part, _last(hidden, tensors)

    def _tokens(self, actions: Sequence[Action]) -> Tokens:
        return Tokens.of([[*action.prompt, *action.ids] for action in actions])

    def _parts(self, actions: Sequence[Action], role: Role) -> Iterator[tuple[slice, ActionBatch]]:
        for at in range(0, len(actions), self.batch.micro_batch):
            part = slice(at, at + self.batch.micro_batch)
            yield part, ActionBatch.of(actions[part], pad=self.batch.pad, device=self.cast.devices[role])

    def _backward(self, role: Role, loss: Tensor) -> None:
        # Layers that are computed anew must find the adapter with which they were computed.
        with self.cast.speaking(role):
            self.batch.backward(loss)

    def _scores(self, role: Role, tensors: ActionBatch) -> TokenScores:
        return score_actions(self.cast, tensors, role=role, temperature=self.score.temperature, kl=self.score.kl)

    def _policy(
        self, scores: TokenScores, tensors: ActionBatch, *, name: str, advantage: Tensor, n_tokens: float
    ) -> Tensor:
        """By ratios where a drawing feeds several optimizer steps."""
        score, log_probs, mask = self.score, scores.log_probs, tensors.mask
        given: dict[str, Any] = {
            "advantage": advantage.to(log_probs.device),
            "longest": score.max_hint_tokens if name == "guide" else score.max_new_tokens,
            "n_episodes": self.batch.n_episodes,
        }
        if score.steps_of_drawing == 1:
            return policy_loss(log_probs, mask, **given)
        # The same weights say a little else in another batch, and with dropout: that is no step away from the draw.
        sampled = log_probs.detach() if self.batch.is_fresh else tensors.drawn
        clipped = clipped_loss(log_probs, mask, sampled=sampled, epsilon=score.epsilon, **given)
        for key, values in (("ratio", clipped.ratio), ("clip_share", clipped.is_cut)):
            self.sums[f"{key}_{name}"] += float((values * mask).sum()) / n_tokens
        return clipped.loss

    def _value(self, seen: Tensor | Tokens, tensors: ActionBatch, *, outcome: Tensor) -> Tensor | float:
        if not self.cast.has_value:
            return 0.0
        score, value = self.score, self.cast.value_head
        loss = value_loss(value, seen, target=outcome, flow=score.value_flow, value_coef=score.value_coef, n_episodes=1)
        total = 0.0 if loss is None else loss.to(tensors.ids.device) / self.batch.n_episodes
        if score.value_flow == "straight_through" and score.value_coef:
            climbed = self._climb(tensors).sum().to(tensors.ids.device)
            total = total - score.value_coef * climbed / self.batch.n_episodes
        return total

    def _climb(self, tensors: ActionBatch) -> Tensor:
        """V of a frozen copy of guide and head, whose hint tokens are straight-through samples of the guide."""
        with self.cast.speaking("guide") as model:
            log_probs = OutputHead.of(model).log_probs(forward(model, tensors)[:, :-1], self.score.temperature)
            table = model.get_input_embeddings().weight
            hint = straight_through(log_probs, tensors.tokens, embedding=table).to(table.dtype)
            prompt = model.get_input_embeddings()(tensors.ids[:, : -tensors.tokens.shape[1]]).detach()
            frozen = {name: weight.detach() for name, weight in model.named_parameters()}
            out = functional_call(
                model, frozen, kwargs={
                    "inputs_embeds": torch.cat([prompt, hint], 1), "attention_mask": tensors.attention,
                    "position_ids": tensors.positions, "output_hidden_states": True, "use_cache": False,
                },
            )  # fmt: skip
            last = _last(out.hidden_states[-1][:, -tensors.tokens.shape[1] - 1 :], tensors)
            head = {name: weight.detach() for name, weight in self.cast.value_head.named_parameters()}
            value: Tensor = functional_call(self.cast.value_head, head, (last,))
        return value

    def _add(
        self, name: str, loss: Tensor, *, kl: Tensor, scores: TokenScores, tensors: ActionBatch, n_tokens: float
    ) -> None:
        self.sums["loss"] += float(loss.detach())
        self.sums[f"kl_{name}"] += float(kl.detach())
        self.sums[f"entropy_{name}"] += float(masked_mean(scores.entropy, tensors.mask, n_tokens=n_tokens))


def _last(hidden: Tensor, tensors: ActionBatch) -> Tensor:
    """The state at the last token of each action: [actions, 1 + longest, width] -> [actions, width]."""
    found: Tensor = hidden[torch.arange(len(hidden), device=hidden.device), tensors.last]
    return found

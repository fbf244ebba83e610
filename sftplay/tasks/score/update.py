"""Learn from a rollout batch: the policies' loss over minibatches, then the value model's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from sftplay import log
from sftplay.config.schema.score import ScoreConfig
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.advantages import Advantages, Outcome, credit_of
from sftplay.tasks.score.episode_rewards import Verdict
from sftplay.tasks.score.losses import clipped_loss, kl_coefficients, masked_mean, policy_loss, stage_of
from sftplay.tasks.score.role_models import Cast, Role
from sftplay.tasks.score.sample_episodes import Action, Episode, Fresh
from sftplay.tasks.score.scoring import ActionBatch, OutputHead, TokenScores, forward, score_actions
from sftplay.tasks.score.shards import within
from sftplay.tasks.score.value_model import Critic, Tokens, Visits, critic_loss, opinion, straight_through, value_loss


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

"""Update solver, guide, value model and critic from a minibatch of episodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from sftplay import log
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.episode_rewards import EpisodeResult
from sftplay.tasks.score.losses import (
    ActionBatch,
    Advantages,
    EpisodeRewards,
    OutputHead,
    TokenScores,
    choose_kl_coefficients,
    clipped_loss,
    compute_advantages,
    find_stage,
    forward,
    masked_mean,
    policy_loss,
    score_actions,
    select_last,
)
from sftplay.tasks.score.role_models import (
    Critic,
    CriticInputs,
    PaddedTokens,
    Role,
    RoleModels,
    ValueFlow,
    critic_loss,
    estimate_values,
    run_with_weights,
    straight_through,
    value_loss,
)
from sftplay.tasks.score.sample_episodes import Action, Episode, ResampledAnswers
from sftplay.tasks.score.section import ScoreConfig


@dataclass(frozen=True, kw_only=True)
class MinibatchSetup:
    """How a rank cuts its minibatch into micro-batches, and what its losses are divided by.

    `n_episodes` are those of the optimizer step divided by the ranks, because gradients are averaged over ranks.
    `context` returns the context of a forward pass, which sets its precision. `is_on_policy`: the weights are those
    that sampled the episodes, so every ratio is 1.
    """

    micro_batch: int
    n_episodes: float
    pad: int
    backward: Callable[[Tensor], None]
    context: Callable[[], Any]
    is_on_policy: bool = True

    def parts(self, n: int) -> list[slice]:
        """Cut `n` episodes into micro-batches."""
        return [slice(at, at + self.micro_batch) for at in range(0, n, self.micro_batch)]


Turn = Literal["t1", "t2", "guide"]
"""First answers, second answers and hints."""

ROLES: dict[Turn, Role] = {"t1": "solver", "t2": "solver", "guide": "guide"}


def _join_tokens(actions: Sequence[Action]) -> PaddedTokens:
    return PaddedTokens.from_rows([[*action.prompt, *action.ids] for action in actions])


class PolicyGradients:
    """Computes the gradients of solver, guide and value model, and adds up their figures."""

    def __init__(self, role_models: RoleModels, score: ScoreConfig, *, batch: MinibatchSetup) -> None:
        self.role_models, self.score, self.batch = role_models, score, batch
        self.sums: dict[str, float] = defaultdict(float)
        """Loss, KL terms, entropies and ratios of this rank's episodes."""

    def learn(
        self,
        actions: Sequence[Action],
        turn: Turn,
        *,
        advantage: Tensor | None,
        beta: float,
        n_tokens: float,
        value_target: Tensor | None = None,
    ) -> None:
        """Compute the gradient of one turn: KL, and the policy gradient where there is an advantage.

        For hints also that of the loss of V, as `value_flow` lets it flow, where there is a V and `value_target`.
        """
        score, role = self.score, ROLES[turn]
        for part, tensors in self._micro_batches(actions, role):
            with self.batch.context():
                scores = score_actions(self.role_models, tensors, role=role, temperature=score.temperature, kl=score.kl)
                kl = masked_mean(scores.kl, tensors.mask, n_tokens=n_tokens)
                loss = beta * kl
                if advantage is not None:
                    loss = loss + self._policy_loss(
                        scores, tensors, turn=turn, advantage=advantage[part], n_tokens=n_tokens
                    )
                if value_target is not None and self.role_models.has_value:
                    seen = _join_tokens(actions[part]) if score.value == "separate" else scores.last_hidden
                    loss = loss + self._value_loss(seen, tensors, target=value_target[part], flow=score.value_flow)
            self.sums["loss"] += float(loss.detach())
            self.sums[f"kl_{turn}"] += float(kl.detach())
            self.sums[f"entropy_{turn}"] += float(masked_mean(scores.entropy, tensors.mask, n_tokens=n_tokens))
            if loss.requires_grad:
                # Recomputed layers need the adapter of the forward pass.
                with self.role_models.use_role(role):
                    self.batch.backward(loss)

    def learn_value(self, actions: Sequence[Action], *, value_target: Tensor) -> None:
        """Compute the gradient of V alone, while the guide does not learn."""
        value = self.role_models.value_head
        for part, seen in self._value_inputs(actions):
            loss = value_loss(value, seen, target=value_target[part], flow="stop", value_coef=1.0, n_episodes=1)
            assert loss is not None
            self.batch.backward(loss / self.batch.n_episodes)

    @torch.no_grad()
    def predict_values(self, actions: Sequence[Action]) -> Tensor:
        """Predict V of the episodes at the end of their hints, [episodes]."""
        value = self.role_models.value_head
        return torch.cat([value(seen).float().cpu() for _, seen in self._value_inputs(actions)])

    def _value_inputs(self, actions: Sequence[Action]) -> Iterator[tuple[slice, Tensor | PaddedTokens]]:
        """Yield the inputs of V by micro-batch, without gradients."""
        for part, tensors in self._micro_batches(actions, "guide"):
            if self.score.value == "separate":
                yield part, _join_tokens(actions[part])
                continue
            with torch.no_grad(), self.batch.context(), self.role_models.use_role("guide") as model:
                hidden = run_with_weights(model, partial(forward, model, tensors))
            yield part, select_last(hidden, tensors)

    def _micro_batches(self, actions: Sequence[Action], role: Role) -> Iterator[tuple[slice, ActionBatch]]:
        device = self.role_models.devices[role]
        for part in self.batch.parts(len(actions)):
            yield part, ActionBatch.from_actions(actions[part], pad=self.batch.pad, device=device)

    def _policy_loss(
        self, scores: TokenScores, tensors: ActionBatch, *, turn: Turn, advantage: Tensor, n_tokens: float
    ) -> Tensor:
        """Return the policy loss, by clipped ratios where a rollout batch feeds several optimizer steps."""
        score, log_probs, mask = self.score, scores.log_probs, tensors.mask
        arguments: dict[str, Any] = {
            "advantage": advantage.to(log_probs.device),
            "longest": score.max_hint_tokens if turn == "guide" else score.max_new_tokens,
            "n_episodes": self.batch.n_episodes,
        }
        if score.steps_per_rollout == 1:
            return policy_loss(log_probs, mask, **arguments)
        # Another batch and dropout change log-probabilities of unchanged weights; that is no off-policy ratio.
        sampled = log_probs.detach() if self.batch.is_on_policy else tensors.sampled_log_probs
        loss, ratio, is_clipped = clipped_loss(log_probs, mask, sampled=sampled, epsilon=score.epsilon, **arguments)
        for key, values in (("ratio", ratio), ("clip_share", is_clipped)):
            self.sums[f"{key}_{turn}"] += float((values * mask).sum()) / n_tokens
        return loss

    def _value_loss(
        self, seen: Tensor | PaddedTokens, tensors: ActionBatch, *, target: Tensor, flow: ValueFlow
    ) -> Tensor | float:
        score, value, device = self.score, self.role_models.value_head, tensors.ids.device
        loss = value_loss(value, seen, target=target, flow=flow, value_coef=score.value_coef, n_episodes=1)
        total = 0.0 if loss is None else loss.to(device) / self.batch.n_episodes
        if flow == "straight_through" and score.value_coef:
            value_of_hints = self._straight_through_value(tensors).sum().to(device)
            total = total - score.value_coef * value_of_hints / self.batch.n_episodes
        return total

    def _straight_through_value(self, tensors: ActionBatch) -> Tensor:
        """Return V of a frozen copy of guide and head; the hint tokens are straight-through samples of the guide."""
        with self.role_models.use_role("guide") as model:
            log_probs = OutputHead.from_model(model).log_probs(forward(model, tensors)[:, :-1], self.score.temperature)
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
            last = select_last(out.hidden_states[-1][:, -tensors.tokens.shape[1] - 1 :], tensors)
            head = {name: weight.detach() for name, weight in self.role_models.value_head.named_parameters()}
            value: Tensor = functional_call(self.role_models.value_head, head, (last,))
        return value


class CriticGradients:
    """Computes the estimates and gradients of the critic on a rank's episodes, in micro-batches."""

    def __init__(self, critic: Critic, target_critic: Critic, *, batch: MinibatchSetup) -> None:
        self.critic, self.target_critic, self.batch = critic, target_critic, batch
        self.sums: dict[str, float] = defaultdict(float)
        """The four losses of this rank's episodes."""

    def estimate_values(self, episodes: Sequence[Episode], resampled: Sequence[ResampledAnswers]) -> Tensor:
        """Estimate min Q and min V of turn 1, then of turn 2: fp32 [4, episodes], on the CPU."""
        found = [
            torch.stack([values for turn in turns for values in estimate_values(self.critic, turn)]).float().cpu()
            for _, turns in self._micro_batches(episodes, resampled)
        ]
        return torch.cat(found, 1)

    def learn(
        self,
        episodes: Sequence[Episode],
        resampled: Sequence[ResampledAnswers],
        *,
        returns: tuple[Tensor, Tensor],
        weight: Tensor,
        discount: float,
    ) -> None:
        """Compute the gradient of the four losses; `returns` of both turns and `weight` are [episodes]."""
        device = next(self.critic.parameters()).device
        for part, turns in self._micro_batches(episodes, resampled):
            first, second, known = (values[part].to(device) for values in (*returns, weight))
            losses = critic_loss(
                self.critic, self.target_critic, turns=turns, returns=(first, second), weight=known, discount=discount,
                n_episodes=self.batch.n_episodes,
            )  # fmt: skip
            for name, loss in losses.items():
                self.sums[f"critic_{name}"] += float(loss.detach())
            self.batch.backward(torch.stack(list(losses.values())).sum())

    def _micro_batches(
        self, episodes: Sequence[Episode], resampled: Sequence[ResampledAnswers]
    ) -> Iterator[tuple[slice, tuple[CriticInputs, CriticInputs]]]:
        for part in self.batch.parts(len(episodes)):
            answers = zip(*((episode.first, episode.second) for episode in episodes[part]), strict=True)
            first, second = (
                CriticInputs(
                    state=PaddedTokens.from_rows([answer.prompt for answer in turn]),
                    answer=PaddedTokens.from_rows([answer.ids for answer in turn]),
                    resampled_answer=PaddedTokens.from_rows([answer.ids for answer in turn_again]),
                )
                for turn, turn_again in zip(answers, zip(*resampled[part], strict=True), strict=True)
            )
            yield part, (first, second)


class ScoredEpisodes(NamedTuple):
    """A rank's episodes of a rollout batch, and the results of all ranks' episodes.

    `resampled` has a second answer to both solver prompts of each episode; it is empty without a critic.
    """

    episodes: Sequence[Episode]
    results: Sequence[EpisodeResult]
    resampled: Sequence[ResampledAnswers]

    @property
    def rank_slice(self) -> slice:
        """The place of this rank's episodes among those of all ranks."""
        n = len(self.episodes)
        return slice(log.rank() * n, (log.rank() + 1) * n)


class PolicyUpdate:
    """The update of one optimizer step from a rollout batch: advantages, then gradients."""

    def __init__(
        self,
        scored: ScoredEpisodes,
        *,
        part: Sequence[int],
        role_models: RoleModels,
        score: ScoreConfig,
        batch: MinibatchSetup,
        heartbeat: Heartbeat,
        step: int,
    ) -> None:
        """`part` are the indices, among this rank's episodes, of those that the step learns from."""
        self.scored, self.role_models, self.score, self.heartbeat = scored, role_models, score, heartbeat
        self.part = list(part)
        self._token_weights: dict[str, float] = {}
        """Action tokens that a role's loss is divided by, as a share of the step's."""

        self.stage = find_stage(step, score)
        self.guide_learns = is_guide_training(role_models, score, step=step)
        self.gradients = PolicyGradients(role_models, score, batch=batch)
        self.critic_gradients = None
        if role_models.critic is not None:
            self.critic_gradients = CriticGradients(role_models.critic, role_models.target_critic, batch=batch)

    def compute_advantages(self) -> Advantages:
        """Compute the advantages of all ranks' episodes, with values from before the first update."""
        episodes, results, resampled = self.scored
        value = critic = None
        if self.role_models.has_value:
            hints = [episode.hint for episode in episodes if episode.hint is not None]
            value = self._gather(self.gradients.predict_values(hints))
        if self.critic_gradients is not None:
            critic = self._gather(self.critic_gradients.estimate_values(episodes, resampled))
        columns = {
            field: torch.tensor([float(getattr(result, field) or 0.0) for result in results])
            for field in ("first", "second", "is_known", "form_first", "form_second", "leak")
        }
        return compute_advantages(EpisodeRewards(**columns, value=value, critic=critic), self.score, stage=self.stage)

    def learn(self, advantages: Advantages) -> None:
        """Compute the gradients of all parts, from this rank's episodes."""
        rank_slice, score = self.scored.rank_slice, self.score
        episodes = [self.scored.episodes[n] for n in self.part]
        results = [self.scored.results[rank_slice][n] for n in self.part]
        roles = group_actions(episodes)
        n_tokens = self._count_tokens(roles)
        if self.critic_gradients is not None:
            known = torch.tensor([float(result.is_known) for result in results])
            resampled = [self.scored.resampled[n] for n in self.part]
            first, second = (turn[rank_slice][self.part] for turn in advantages.returns)
            self.critic_gradients.learn(
                episodes, resampled, returns=(first, second), weight=known, discount=score.turn_discount
            )
        targets = torch.tensor([float(result.second or 0.0) if result.is_known else nan for result in results])
        if not self.guide_learns and self.role_models.has_value:
            self.gradients.learn_value(roles["guide"], value_target=targets)
        betas = choose_kl_coefficients(self.stage, score)
        gains: dict[Turn, Tensor | None] = {"guide": advantages.guide} if self.guide_learns else {}
        gains |= {"t1": advantages.first, "t2": advantages.second}
        for turn, gain in gains.items():
            advantage = None if gain is None else gain[rank_slice][self.part]
            self.gradients.learn(
                roles[turn], turn, advantage=advantage, beta=betas[turn], n_tokens=n_tokens[turn],
                value_target=targets if turn == "guide" else None,
            )  # fmt: skip

    def _count_tokens(self, roles: Mapping[Turn, Sequence[Action]]) -> dict[Turn, float]:
        """Count the action tokens that the losses of each role are divided by.

        It is the mean of a step over the rollout batch, divided by the ranks. So the gradients of a pass add up to
        the gradient of the whole rollout batch.
        """
        groups = (roles, group_actions(self.scored.episodes))
        counts = {turn: [sum(len(action.ids) for action in group[turn]) for group in groups] for turn in roles}
        ranks, world, found = gather_objects(counts, self.heartbeat), log.world_size(), dict[Turn, float]()
        for turn in roles:
            step, whole = (sum(counted[turn][n] for counted in ranks) / world for n in (0, 1))
            found[turn] = whole / self.score.steps_per_generation
            self._token_weights[turn] = found[turn] / step if step else 1.0
        return found

    def figures(self) -> dict[str, float]:
        """Gather KL terms, entropies, ratios and critic losses of all ranks, as means over the tokens of the step."""
        local = {**self.gradients.sums, **(self.critic_gradients.sums if self.critic_gradients is not None else {})}
        sums = gather_objects(local, self.heartbeat)
        return {
            name: fmean(rank[name] for rank in sums) * self._token_weights.get(name.rpartition("_")[2], 1.0)
            for name in sums[0]
            if name != "loss"
        }

    def _gather(self, local: Tensor) -> Tensor:
        """Gather [..., episodes of a rank] to [..., episodes of all ranks]."""
        ranks = gather_objects(local.tolist(), self.heartbeat)
        return torch.cat([torch.tensor(values) for values in ranks], -1)


def group_actions(episodes: Sequence[Episode]) -> dict[Turn, list[Action]]:
    """Group the actions by turn: first answers, second answers and hints."""
    return {
        "t1": [episode.first for episode in episodes],
        "t2": [episode.second for episode in episodes],
        "guide": [episode.hint for episode in episodes if episode.hint is not None],
    }


def is_guide_training(role_models: RoleModels, score: ScoreConfig, *, step: int) -> bool:
    """Whether the guide trains in this optimizer step."""
    return "guide" in role_models.trainable and step > score.guidance_warmup

"""Update solver, guide, value model and critic from a minibatch of episodes."""

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
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.tasks.score.advantages import Advantages, EpisodeRewards, compute_advantages
from sftplay.tasks.score.episode_rewards import EpisodeResult
from sftplay.tasks.score.losses import choose_kl_coefficients, clipped_loss, find_stage, masked_mean, policy_loss
from sftplay.tasks.score.role_models import Role, RoleModels
from sftplay.tasks.score.sample_episodes import Action, Episode, ResampledAnswers
from sftplay.tasks.score.scoring import ActionBatch, OutputHead, TokenScores, forward, score_actions
from sftplay.tasks.score.section import ScoreConfig
from sftplay.tasks.score.shards import run_with_weights
from sftplay.tasks.score.value_model import (
    Critic,
    CriticInputs,
    PaddedTokens,
    critic_loss,
    estimate_values,
    straight_through,
    value_loss,
)


@dataclass(frozen=True, kw_only=True)
class MinibatchSetup:
    """How a rank cuts its minibatch into micro-batches, and what its losses are divided by."""

    micro_batch: int
    n_episodes: float
    """Episodes of the optimizer step divided by the ranks, because gradients are averaged over ranks."""

    pad: int
    backward: Callable[[Tensor], None]
    context: Callable[[], Any]
    """Returns the context of a forward pass, which sets its precision."""

    is_on_policy: bool = True
    """Whether the weights are those that sampled the episodes: every ratio is 1 then."""


class PolicyGradients:
    """Computes the gradients of solver, guide and value model, and adds up their figures."""

    def __init__(self, role_models: RoleModels, score: ScoreConfig, *, batch: MinibatchSetup) -> None:
        self.role_models, self.score, self.batch = role_models, score, batch
        self.sums: dict[str, float] = defaultdict(float)
        """Loss, KL terms, entropies and ratios of this rank's episodes."""

    def learn_solver(
        self, actions: Sequence[Action], *, turn: int, advantage: Tensor | None, beta: float, n_tokens: float
    ) -> None:
        """Compute the gradient of one turn of the solver: KL, and the policy gradient where there is an advantage."""
        name = f"t{turn}"
        for part, tensors in self._micro_batches(actions, "solver"):
            with self.batch.context():
                scores = self._scores("solver", tensors)
                kl = masked_mean(scores.kl, tensors.mask, n_tokens=n_tokens)
                loss = beta * kl
                if advantage is not None:
                    loss = loss + self._policy_loss(
                        scores, tensors, name=name, advantage=advantage[part], n_tokens=n_tokens
                    )
            self._add_figures(name, loss, kl=kl, scores=scores, tensors=tensors, n_tokens=n_tokens)
            if loss.requires_grad:
                self._backward("solver", loss)

    def learn_guide(
        self, actions: Sequence[Action], *, advantage: Tensor, value_target: Tensor, n_tokens: float
    ) -> None:
        """Compute the gradient of the guide: policy gradient, KL, and the loss of V as `value_flow` lets it flow."""
        score = self.score
        for part, tensors in self._micro_batches(actions, "guide"):
            with self.batch.context():
                scores = self._scores("guide", tensors)
                kl = masked_mean(scores.kl, tensors.mask, n_tokens=n_tokens)
                loss = self._policy_loss(scores, tensors, name="guide", advantage=advantage[part], n_tokens=n_tokens)
                loss = loss + score.beta_guide * kl
                is_separate = score.value == "separate"
                inputs = _join_tokens(actions[part]) if is_separate else scores.last_hidden
                loss = loss + self._value_loss(inputs, tensors, value_target=value_target[part])
            self._add_figures("guide", loss, kl=kl, scores=scores, tensors=tensors, n_tokens=n_tokens)
            self._backward("guide", loss)

    def learn_value(self, actions: Sequence[Action], *, value_target: Tensor) -> None:
        """Compute the gradient of V alone, while the guide does not learn."""
        for part, inputs in self._value_inputs(actions):
            loss = value_loss(
                self.role_models.value_head,
                inputs,
                target=value_target[part],
                flow="stop",
                value_coef=1.0,
                n_episodes=1,
            )
            assert loss is not None
            self.batch.backward(loss / self.batch.n_episodes)

    @torch.no_grad()
    def predict_values(self, actions: Sequence[Action]) -> Tensor:
        """Predict V of the episodes at the end of their hints, [episodes]."""
        return torch.cat(
            [self.role_models.value_head(inputs).float().cpu() for _, inputs in self._value_inputs(actions)]
        )

    def _value_inputs(self, actions: Sequence[Action]) -> Iterator[tuple[slice, Tensor | PaddedTokens]]:
        """Yield the inputs of V by micro-batch, without gradients."""
        for part, tensors in self._micro_batches(actions, "guide"):
            if self.score.value == "separate":
                yield part, _join_tokens(actions[part])
                continue
            with torch.no_grad(), self.batch.context(), self.role_models.use_role("guide") as model:
                hidden = run_with_weights(model, partial(forward, model, tensors))
            yield part, _select_last(hidden, tensors)

    def _micro_batches(self, actions: Sequence[Action], role: Role) -> Iterator[tuple[slice, ActionBatch]]:
        for at in range(0, len(actions), self.batch.micro_batch):
            part = slice(at, at + self.batch.micro_batch)
            yield (
                part,
                ActionBatch.from_actions(actions[part], pad=self.batch.pad, device=self.role_models.devices[role]),
            )

    def _backward(self, role: Role, loss: Tensor) -> None:
        # Recomputed layers need the adapter of the forward pass.
        with self.role_models.use_role(role):
            self.batch.backward(loss)

    def _scores(self, role: Role, tensors: ActionBatch) -> TokenScores:
        return score_actions(self.role_models, tensors, role=role, temperature=self.score.temperature, kl=self.score.kl)

    def _policy_loss(
        self, scores: TokenScores, tensors: ActionBatch, *, name: str, advantage: Tensor, n_tokens: float
    ) -> Tensor:
        """Return the policy loss, by clipped ratios where a rollout batch feeds several optimizer steps."""
        score, log_probs, mask = self.score, scores.log_probs, tensors.mask
        arguments: dict[str, Any] = {
            "advantage": advantage.to(log_probs.device),
            "longest": score.max_hint_tokens if name == "guide" else score.max_new_tokens,
            "n_episodes": self.batch.n_episodes,
        }
        if score.steps_of_drawing == 1:
            return policy_loss(log_probs, mask, **arguments)
        # Another batch and dropout change log-probabilities of unchanged weights; that is no off-policy ratio.
        sampled = log_probs.detach() if self.batch.is_on_policy else tensors.sampled_log_probs
        clipped = clipped_loss(log_probs, mask, sampled=sampled, epsilon=score.epsilon, **arguments)
        for key, values in (("ratio", clipped.ratio), ("clip_share", clipped.is_clipped)):
            self.sums[f"{key}_{name}"] += float((values * mask).sum()) / n_tokens
        return clipped.loss

    def _value_loss(
        self, inputs: Tensor | PaddedTokens, tensors: ActionBatch, *, value_target: Tensor
    ) -> Tensor | float:
        if not self.role_models.has_value:
            return 0.0
        score, value = self.score, self.role_models.value_head
        loss = value_loss(
            value, inputs, target=value_target, flow=score.value_flow, value_coef=score.value_coef, n_episodes=1
        )
        total = 0.0 if loss is None else loss.to(tensors.ids.device) / self.batch.n_episodes
        if score.value_flow == "straight_through" and score.value_coef:
            value_of_hints = self._straight_through_value(tensors).sum().to(tensors.ids.device)
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
            last = _select_last(out.hidden_states[-1][:, -tensors.tokens.shape[1] - 1 :], tensors)
            head = {name: weight.detach() for name, weight in self.role_models.value_head.named_parameters()}
            value: Tensor = functional_call(self.role_models.value_head, head, (last,))
        return value

    def _add_figures(
        self, name: str, loss: Tensor, *, kl: Tensor, scores: TokenScores, tensors: ActionBatch, n_tokens: float
    ) -> None:
        self.sums["loss"] += float(loss.detach())
        self.sums[f"kl_{name}"] += float(kl.detach())
        self.sums[f"entropy_{name}"] += float(masked_mean(scores.entropy, tensors.mask, n_tokens=n_tokens))


def _join_tokens(actions: Sequence[Action]) -> PaddedTokens:
    return PaddedTokens.from_rows([[*action.prompt, *action.ids] for action in actions])


def _select_last(hidden: Tensor, tensors: ActionBatch) -> Tensor:
    """Select the state at the last token of each action: [actions, 1 + longest, width] -> [actions, width]."""
    found: Tensor = hidden[torch.arange(len(hidden), device=hidden.device), tensors.last_positions]
    return found


class CriticGradients:
    """Computes the estimates and gradients of the critic on a rank's episodes, in micro-batches."""

    def __init__(self, critic: Critic, target_critic: Critic, *, batch: MinibatchSetup) -> None:
        self.critic, self.target_critic, self.batch = critic, target_critic, batch
        self.sums: dict[str, float] = defaultdict(float)
        """The four losses of this rank's episodes."""

    def estimate_values(self, episodes: Sequence[Episode], resampled: Sequence[ResampledAnswers]) -> Tensor:
        """Estimate min Q and min V of turn 1, then of turn 2: fp32 [4, episodes], on the CPU."""
        found = []
        for _, turns in self._micro_batches(episodes, resampled):
            found.append(
                torch.stack([values for turn in turns for values in estimate_values(self.critic, turn)]).float().cpu()
            )
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
        for at in range(0, len(episodes), self.batch.micro_batch):
            part = slice(at, at + self.batch.micro_batch)
            batch, pairs = episodes[part], resampled[part]
            first = _create_critic_inputs([episode.first for episode in batch], [answer for answer, _ in pairs])
            second = _create_critic_inputs([episode.second for episode in batch], [answer for _, answer in pairs])
            yield part, (first, second)


def _create_critic_inputs(answers: Sequence[Action], resampled: Sequence[Action]) -> CriticInputs:
    return CriticInputs(
        state=PaddedTokens.from_rows([answer.prompt for answer in answers]),
        answer=PaddedTokens.from_rows([answer.ids for answer in answers]),
        resampled_answer=PaddedTokens.from_rows([answer.ids for answer in resampled]),
    )


class ScoredEpisodes(NamedTuple):
    """A rank's episodes of a rollout batch, and the results of all ranks' episodes."""

    episodes: Sequence[Episode]
    results: Sequence[EpisodeResult]
    resampled: Sequence[ResampledAnswers]
    """A second answer to both solver prompts of each episode; empty without a critic."""

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
        episodes, resampled, results = self.scored.episodes, self.scored.resampled, self.scored.results
        value = critic = None
        if self.role_models.has_value:
            value = self._gather(
                self.gradients.predict_values([episode.hint for episode in episodes if episode.hint is not None])
            )
        if self.critic_gradients is not None:
            critic = self._gather(self.critic_gradients.estimate_values(episodes, resampled))

        def column(name: str) -> Tensor:
            return torch.tensor([float(getattr(result, name) or 0.0) for result in results])

        rewards = EpisodeRewards(
            first=column("first"),
            second=column("second"),
            is_known=column("is_known"),
            form_first=column("form_first"),
            form_second=column("form_second"),
            leak=column("leaks"),
            value=value,
            critic=critic,
        )
        return compute_advantages(rewards, self.score, stage=self.stage)

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
        targets = [float(result.second or 0.0) if result.is_known else nan for result in results]
        value_target, hints = torch.tensor(targets), roles["guide"]
        if self.guide_learns:
            advantage = advantages.guide[rank_slice][self.part]
            self.gradients.learn_guide(
                hints, advantage=advantage, value_target=value_target, n_tokens=n_tokens["guide"]
            )
        elif self.role_models.has_value:
            self.gradients.learn_value(hints, value_target=value_target)
        betas = choose_kl_coefficients(self.stage, score)
        for turn, gain, beta in ((1, advantages.first, betas.first), (2, advantages.second, betas.second)):
            self.gradients.learn_solver(
                roles[f"t{turn}"], turn=turn, beta=beta, n_tokens=n_tokens[f"t{turn}"],
                advantage=None if gain is None else gain[rank_slice][self.part],
            )  # fmt: skip

    def _count_tokens(self, roles: Mapping[str, Sequence[Action]]) -> dict[str, float]:
        """Count the action tokens that the losses of each role are divided by.

        It is the mean of a step over the rollout batch, divided by the ranks. So the gradients of a pass add up to
        the gradient of the whole rollout batch.
        """
        all_roles = group_actions(self.scored.episodes)
        counts = {name: (_count_action_tokens(roles[name]), _count_action_tokens(all_roles[name])) for name in roles}
        ranks, world, parts = gather_objects(counts, self.heartbeat), log.world_size(), self.score.steps_per_generation
        found = {}
        for name in roles:
            step, whole = (sum(counted[name][n] for counted in ranks) / world for n in (0, 1))
            found[name] = whole / parts
            self._token_weights[name] = found[name] / step if step else 1.0
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


def group_actions(episodes: Sequence[Episode]) -> dict[str, list[Action]]:
    """Group the actions by turn and role: first answers, second answers and hints."""
    return {
        "t1": [episode.first for episode in episodes],
        "t2": [episode.second for episode in episodes],
        "guide": [episode.hint for episode in episodes if episode.hint is not None],
    }


def _count_action_tokens(actions: Sequence[Action]) -> int:
    return sum(len(action.ids) for action in actions)


def is_guide_training(role_models: RoleModels, score: ScoreConfig, *, step: int) -> bool:
    """Whether the guide trains in this optimizer step."""
    return "guide" in role_models.trainable and step > score.guidance_warmup

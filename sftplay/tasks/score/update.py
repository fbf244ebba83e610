"""Update solver, guide, value model and critic: advantages of episodes, losses, and gradients of a minibatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError
from sftplay.generate.generate import left_padded
from sftplay.heartbeat import Heartbeat
from sftplay.model.out_of_memory import gather_objects
from sftplay.plan.activations import CHUNK_SCORES
from sftplay.tasks.score.evaluation import EpisodeResult
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
from sftplay.tasks.score.sample_episodes import Action, Episode, ResampledAnswers, right_padded
from sftplay.tasks.score.section import ScoreConfig
from sftplay.train.loss_heads import PROOF_TOLERANCE, compute_scores, proof_rows
from sftplay.train.shared_prompt import unwrap

Stage = Literal[1, 2]


def compute_turn_returns(
    r1: Tensor, r2: Tensor, *, stage: Stage, alpha: float, turn_discount: float = 0.0
) -> tuple[Tensor | None, Tensor]:
    """Compute the returns of both turns from their verified rewards (Kumar et al. 2024, arXiv 2409.12917, section 5).

    In stage 1 turn 1 has no return, because it has no policy gradient. In stage 2 the second turn gets a bonus of alpha
    for each change of the reward: with alpha 10, the pairs (0, 0), (0, 1), (1, 0) and (1, 1) return 0, 11, -10 and 1.
    The bonus belongs to turn 2 alone. A `turn_discount` above 0 gives turn 1 a share of it, and so punishes turn 1 for
    being right.
    """
    if stage == 1:
        return None, r2
    second = r2 + alpha * (r2 - r1)
    return r1 + turn_discount * second if turn_discount else r1, second


def compute_guide_reward(r1: Tensor, r2: Tensor, *, kind: str, leak: Tensor, leak_penalty: float) -> Tensor:
    """Compute a hint's reward: the second answer's reward (outcome), its progress, or -1 and 1 (signed).

    `leak` is 1 where the hint states the right answer; a leak costs `leak_penalty`.
    """
    reward = {"outcome": r2, "progress": r2 - r1, "signed": 2 * r2 - 1}[kind]
    return reward - leak_penalty * leak if leak_penalty else reward


def compute_guide_return(reward: Tensor, value: Tensor | None, *, value_coef: float) -> Tensor:
    """Compute the hint's return R_g = r_g + c * V, V detached. With c = 0 it is the reward, bit for bit."""
    if value is None or value_coef == 0:
        return reward
    return reward + value_coef * value.detach()


def compute_shaped_baseline(value: Tensor, r1: Tensor, *, stage: Stage, alpha: float) -> Tensor:
    """Compute the expected return of turn 2 where V expects r2. Turn 1 is over then, so r1 is known."""
    return value if stage == 1 else (1 + alpha) * value - alpha * r1


def compute_explained_variance(value: Tensor, target: Tensor) -> float:
    """Compute 1 - Var(target - value) / Var(target); 0 where the target does not vary, or is empty."""
    variance = torch.var(target.double(), correction=0) if len(target) else 0.0
    if variance == 0:
        return 0.0
    return float(1 - torch.var((target - value).double(), correction=0) / variance)


def compute_batch_baseline(returns: Tensor, known: Tensor | None = None) -> Tensor:
    """Compute the mean of all known returns, as [episodes]; nan where none is known.

    `known` is 1 where a return is known, [episodes]; None means all are.
    """
    return (returns if known is None else returns[known > 0]).mean().expand_as(returns)


def compute_rloo_baseline(returns: Tensor, *, group: int, known: Tensor | None = None) -> Tensor:
    """Compute the mean known return of the problem's other episodes (RLOO): [episodes]; nan where there is none.

    The `group` episodes of a problem are adjacent. `known` is as for `compute_batch_baseline`.

    >>> compute_rloo_baseline(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), group=3)
    tensor([0.0000, 0.5000, 0.5000, 1.0000, 0.5000, 0.5000])
    """
    counts = torch.ones_like(returns) if known is None else known
    groups, counted = returns.where(counts > 0, 0.0).view(-1, group), counts.view(-1, group)
    others = counted.sum(1, keepdim=True) - counted
    return ((groups.sum(1, keepdim=True) - groups) / others).reshape(-1)


def subtract_baseline(returns: Tensor, baseline: Tensor, *, scales: bool, known: Tensor | None = None) -> Tensor:
    """Subtract the baseline from the returns; `scales` divides by the sample standard deviation of the differences.

    An episode without a known return (`known` as for `compute_batch_baseline`), or without a baseline, does not count
    in the deviation, and its advantage is 0.
    """
    difference = returns - baseline.detach()
    compared = ~difference.isnan() if known is None else ~difference.isnan() & (known > 0)
    if scales and compared.sum() > 1:
        # Equal returns give advantages of 0, not of nan.
        difference = difference / (torch.std(difference[compared]) + 1e-4)
    return difference.where(compared, 0.0)


MIN_EXPLAINED_VARIANCE = 0.1
"""Share of the variance of a return that V or Q must explain before it is a baseline; below it they are noise."""


class EpisodeRewards(NamedTuple):
    """Rewards and estimates of a batch of episodes: tensors [episodes], fp32, on the CPU.

    `is_known` is 0 where a reward abstained: the episode's numbers mean nothing, and no other episode is compared with
    it. `critic` is Q and V of turn 1, then of turn 2: [4, episodes].
    """

    first: Tensor
    second: Tensor
    is_known: Tensor
    form_first: Tensor
    form_second: Tensor
    leak: Tensor
    value: Tensor | None
    critic: Tensor | None = None


class Advantages(NamedTuple):
    """The advantages of both turns and of the hint, with figures about them.

    From the `returns` of both turns the critic learns. Turn 1 has one in stage 1 too, without a policy gradient.
    """

    first: Tensor | None
    second: Tensor
    guide: Tensor
    figures: dict[str, float | None]
    returns: tuple[Tensor, Tensor]


def compute_advantages(rewards: EpisodeRewards, score: ScoreConfig, *, stage: Stage) -> Advantages:
    """Compute advantages over the episodes of all ranks; the episodes of a problem are adjacent."""
    r1, r2, value, known = rewards.first, rewards.second, rewards.value, rewards.is_known > 0
    first, second = compute_turn_returns(r1, r2, stage=stage, alpha=score.alpha, turn_discount=score.turn_discount)
    undiscounted = r1  # without the share of `turn_discount`: the critic bootstraps turn 2 by itself
    if score.format_reward:
        first = None if first is None else first + score.format_reward * rewards.form_first
        undiscounted = r1 + score.format_reward * rewards.form_first
        second = second + score.format_reward * rewards.form_second
    reward = compute_guide_reward(r1, r2, kind=score.guide_reward, leak=rewards.leak, leak_penalty=score.leak_penalty)
    hint = compute_guide_return(reward, value, value_coef=score.value_coef)

    def subtract(returns: Tensor, baseline: Tensor) -> Tensor:
        return subtract_baseline(returns, baseline, scales=score.scale == "batch", known=rewards.is_known)

    def subtract_mean(returns: Tensor) -> Tensor:
        if score.advantage == "batch":
            return subtract(returns, compute_batch_baseline(returns, rewards.is_known))
        group = score.episodes_per_problem
        return subtract(returns, compute_rloo_baseline(returns, group=group, known=rewards.is_known))

    def explains(estimate: Tensor, target: Tensor) -> bool:
        return compute_explained_variance(estimate[known], target[known]) > MIN_EXPLAINED_VARIANCE

    gains: dict[str, Tensor | None] = {}
    figures: dict[str, float | None] = {"value_is_baseline": 0.0}
    returns = {"t1": first, "t2": second, "guide": hint}
    for name, turn_return in returns.items():
        gains[name] = None if turn_return is None else subtract_mean(turn_return)
    if value is not None and (score.advantage == "value" or (score.advantage == "auto" and explains(value, r2))):
        baseline = compute_shaped_baseline(value, r1, stage=stage, alpha=score.alpha)
        gains["t2"], figures["value_is_baseline"] = subtract(second, baseline), 1.0
    if rewards.critic is not None:
        for name, (q_value, v_value) in zip(("t1", "t2"), rewards.critic.unflatten(0, (2, 2)), strict=True):
            turn_return = returns[name]
            is_baseline = turn_return is not None and explains(q_value, turn_return)
            gains[name] = subtract(q_value, v_value) if is_baseline else gains[name]
            figures[f"critic_is_baseline_{name}"] = float(is_baseline)
    for name, turn_return in returns.items():
        paid, gain = (torch.zeros(0) if values is None else values[known] for values in (turn_return, gains[name]))
        figures[f"return_{name}"] = float(paid.mean()) if len(paid) else None
        for key, values in (("return", paid), ("advantage", gain)):
            figures[f"{key}_{name}_std"] = float(torch.std(values)) if len(values) > 1 else None
    if value is not None and known.any():
        figures["value_mean"] = float(value[known].mean())
        figures["value_loss"] = float((value[known] - r2[known]).square().mean())
        figures["explained_variance"] = compute_explained_variance(value[known], r2[known])
    return Advantages(gains["t1"], gains["t2"], gains["guide"], figures, (undiscounted, second))


def sum_log_probs(log_probs: Tensor, mask: Tensor, *, longest: int) -> Tensor:
    """Sum over the action's tokens, divided by the constant `longest`: the action's length would reward long ones."""
    return (log_probs * mask).sum(1) / longest


def policy_loss(log_probs: Tensor, mask: Tensor, *, advantage: Tensor, longest: int, n_episodes: float) -> Tensor:
    """Return -sum(A * lp) / n_episodes: these episodes' share of the mean over `n_episodes` (REINFORCE)."""
    return -(advantage.detach() * sum_log_probs(log_probs, mask, longest=longest)).sum() / n_episodes


def clipped_loss(
    log_probs: Tensor,
    mask: Tensor,
    *,
    sampled: Tensor,
    advantage: Tensor,
    epsilon: float,
    longest: int,
    n_episodes: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's clipped loss: `policy_loss` with min(rho A, clip(rho, 1 - epsilon, 1 + epsilon) A) for A log p.

    `sampled` are the log-probabilities at sampling time, and rho is exp(log p - sampled) (Schulman et al. 2017, arXiv
    1707.06347, equation 7). Where rho is 1, the gradient is that of `policy_loss`. Return also the ratios rho and, as
    0 or 1, whether a ratio was clipped, so that the token has no gradient: both [episodes, tokens].
    """
    gain, ratio = advantage.detach()[:, None], (log_probs - sampled.detach()).exp()
    bounded = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = -sum_log_probs(torch.minimum(ratio * gain, bounded * gain), mask, longest=longest).sum() / n_episodes
    is_clipped = ((ratio > 1 + epsilon) & (gain > 0)) | ((ratio < 1 - epsilon) & (gain < 0))
    return loss, ratio.detach(), is_clipped.to(mask.dtype)


def full_kl(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Compute KL(policy || reference) at each position, over the vocabulary: [..., vocabulary] -> [...]."""
    return (log_probs.exp() * (log_probs - reference)).sum(-1)


def k3_kl(log_probs: Tensor, reference: Tensor, *, sampled: Tensor) -> Tensor:
    """Estimate KL by the sampled tokens alone: ratio * (exp(d) - d - 1), d = reference - policy.

    `sampled` are the log-probabilities at sampling time. The ratio policy / sampled is 1 at first; with it the
    gradient of the estimate is unbiased (Schulman, "Approximating KL divergence"; DeepSeek-V3.2, section 3.1).
    """
    difference = reference - log_probs
    return (log_probs - sampled.detach()).exp() * (difference.exp() - difference - 1)


def masked_mean(values: Tensor, mask: Tensor, *, n_tokens: float) -> Tensor:
    """Return these tokens' share of the mean over a batch of `n_tokens` action tokens."""
    return (values * mask).sum() / max(n_tokens, 1)


def entropy(log_probs: Tensor) -> Tensor:
    """Compute the entropy at each position, in nats: [..., vocabulary] -> [...]."""
    return -(log_probs.exp() * log_probs).sum(-1)


def gather_log_probs(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Select the log-probabilities of the tokens: [..., vocabulary], int64 [...] -> [...]."""
    return torch.gather(log_probs, -1, tokens.unsqueeze(-1)).squeeze(-1)


def choose_kl_coefficients(stage: Stage, score: ScoreConfig) -> dict[str, float]:
    """Choose the weights of the KL terms. In stage 1, beta2 pins turn 1 to the reference."""
    return {"t1": score.beta2 if stage == 1 else score.beta1, "t2": score.beta1, "guide": score.beta_guide}


def find_learning_rates(cfg: RunConfig, *, peak: float) -> dict[str, float]:
    """Return the peak learning rate of each part; `peak` is that of `train.learning_rate`."""
    score = cfg.score
    solver = score.solver_learning_rate or peak
    return {
        "solver": solver,
        "guide": score.guide_learning_rate or {"full": 0.1, "lora": 0.2, "qlora": 0.2}[cfg.tuning.mode] * solver,
        "value": score.value_learning_rate,
        "critic": score.critic.learning_rate,
    }


class ActionBatch(NamedTuple):
    """Actions after their prompts, which are padded on the left: `ids`, int64 [actions, prompt + action], and alike.

    `tokens`, int64 [actions, longest], are the actions, padded on the right; `mask`, fp32, is 1 on them, and
    `sampled_log_probs`, fp32, are theirs at sampling time.
    """

    ids: Tensor
    attention: Tensor
    positions: Tensor
    tokens: Tensor
    mask: Tensor
    sampled_log_probs: Tensor

    @classmethod
    def from_actions(cls, actions: Sequence[Action], *, pad: int, device: Any) -> ActionBatch:
        prompts, prompt_mask = left_padded([action.prompt for action in actions], pad)
        tokens, mask = right_padded([action.ids for action in actions], pad, dtype=torch.int64)
        sampled_log_probs, _ = right_padded([action.log_probs for action in actions], 0.0, dtype=torch.float32)
        attention = torch.cat([prompt_mask, mask.long()], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        parts = (torch.cat([prompts, tokens], 1), attention, positions, tokens, mask, sampled_log_probs)
        return cls(*(part.to(device) for part in parts))

    def to(self, device: Any) -> ActionBatch:
        """Move the batch to another device."""
        return ActionBatch(*(part.to(device) for part in self))


class OutputHead(NamedTuple):
    """The output head, which turns last hidden states into logits."""

    weight: Tensor
    bias: Tensor | None
    config: Any

    @classmethod
    def from_model(cls, model: Any) -> OutputHead:
        """Read the head of a causal model, with an adapter or without."""
        head = unwrap(model).get_output_embeddings()
        return cls(head.weight, getattr(head, "bias", None), model.config.get_text_config())

    def log_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """Compute the log-probabilities of the vocabulary: [..., width] -> fp32 [..., vocabulary]."""
        logits = compute_scores(hidden, weight=self.weight, bias=self.bias, config=self.config)
        return (logits / temperature).log_softmax(-1)


class TokenScores(NamedTuple):
    """Scores of the tokens of a batch of actions, fp32 [actions, longest], and the state at the last token of each."""

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor
    last_hidden: Tensor


def score_actions(
    role_models: RoleModels, batch: ActionBatch, *, role: Role, temperature: float, kl: Literal["full", "k3"]
) -> TokenScores:
    """Score the tokens under the model of `role`, with gradients, and compute their KL to the frozen reference.

    The dropout mode stays as it is. The backward pass must run inside `use_role(role)`.
    """
    with torch.no_grad(), role_models.reference(role) as frozen:
        frozen_hidden, frozen_head = run_with_weights(
            frozen, lambda: (forward(frozen, batch.to(frozen.device)), OutputHead.from_model(frozen))
        )

    def compare() -> list[Tensor]:
        hidden, head = forward(model, batch), OutputHead.from_model(model)

        def score_chunk(
            states: Tensor, frozen_states: Tensor, *, tokens: Tensor, sampled: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            with torch.no_grad():
                reference = frozen_head.log_probs(frozen_states, temperature).to(states.device)
            log_probs = head.log_probs(states, temperature)
            found = gather_log_probs(log_probs, tokens)
            if kl == "full":
                return found, entropy(log_probs.detach()), full_kl(log_probs, reference)
            estimate = k3_kl(found, gather_log_probs(reference, tokens), sampled=sampled)
            return found, entropy(log_probs.detach()), estimate

        width = max(1, CHUNK_SCORES // head.weight.shape[0])
        columns = [states[:, :-1].flatten(0, 1).split(width) for states in (hidden, frozen_hidden)]
        columns += [values.flatten().split(width) for values in (batch.tokens, batch.sampled_log_probs)]
        chunks = [
            checkpoint(
                score_chunk, *states, tokens=tokens, sampled=sampled, use_reentrant=False, preserve_rng_state=False
            )
            for *states, tokens, sampled in zip(*columns, strict=True)
        ]
        return [*(torch.cat(parts) for parts in zip(*chunks, strict=True)), select_last(hidden, batch)]

    with role_models.use_role(role) as model:
        flat = run_with_weights(model, compare)
    # FSDP hooks its backward on what is returned: a view of it would lose the hook (torch warns of it).
    log_probs, token_entropy, token_kl = (values.view_as(batch.mask) for values in flat[:3])
    return TokenScores(log_probs, token_entropy, token_kl, flat[3])


def select_last(hidden: Tensor, batch: ActionBatch) -> Tensor:
    """Select the state at the last token of each action: [actions, 1 + longest, width] -> [actions, width]."""
    return hidden[torch.arange(len(hidden), device=hidden.device), batch.mask.sum(1).long()]


def forward(model: Any, batch: ActionBatch) -> Tensor:
    """Return the last hidden states from the prompt's last token on, [actions, 1 + longest, width].

    A state predicts the token after it.
    """
    out = unwrap(model).base_model(
        input_ids=batch.ids, attention_mask=batch.attention, position_ids=batch.positions, use_cache=False
    )
    return out.last_hidden_state[:, -batch.tokens.shape[1] - 1 :]


@torch.no_grad()
def check_output_head(model: Any) -> None:
    """Raise ConfigError where, on a few tokens, the logits depend on more than last hidden states and output head."""
    causal = unwrap(model)
    ids = proof_rows(causal)[0] % causal.get_input_embeddings().weight.shape[0]
    was_training = model.training
    model.eval()
    expected = causal(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    hidden = causal.base_model(input_ids=ids, use_cache=False).last_hidden_state
    computed = OutputHead.from_model(model).log_probs(hidden, 1.0)
    model.train(was_training)
    means = [gather_log_probs(log_probs[:, :-1], ids[:, 1:]).mean() for log_probs in (computed, expected)]
    if isinstance(causal.get_output_embeddings(), BaseTunerLayer):
        why, where = "the adapter has a pair on the output head", "tuning.lora.target_modules"
        fix = "leave the head out of it"
    elif not torch.isclose(means[0], means[1], rtol=PROOF_TOLERANCE):
        why, where, fix = f"{type(causal).__name__} has a head of its own", "model.name", "choose another model"
    else:
        return
    what = f"{why}, and two-turn episodes are learned from the scores of the plain head"
    raise ConfigError(what, where=where, fix=fix)


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

        self.stage: Stage = 1 if step <= score.stage1_steps else 2  # steps count from 1
        self.guide_learns = "guide" in role_models.trainable and step > score.guidance_warmup
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

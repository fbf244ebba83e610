"""Score sampled actions with a model: log-probabilities, entropy and KL of their tokens, and the last state.

Logits are computed from the last hidden states a chunk of tokens at a time, and recomputed in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sftplay.errors import ConfigError
from sftplay.generate.generate import left_padded
from sftplay.plan.activations import CHUNK_SCORES
from sftplay.tasks.score.losses import entropy, full_kl, gather_log_probs, k3_kl
from sftplay.tasks.score.role_models import Role, RoleModels, run_with_weights
from sftplay.tasks.score.sample_episodes import Action, right_padded
from sftplay.train.loss_heads import PROOF_TOLERANCE, compute_scores, proof_rows


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
        """Pad the actions to tensors."""
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
        head = unwrap_adapter(model).get_output_embeddings()
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
    last: Tensor = hidden[torch.arange(len(hidden), device=hidden.device), batch.mask.sum(1).long()]
    return last


def forward(model: Any, batch: ActionBatch) -> Tensor:
    """Return the last hidden states from the prompt's last token on, [actions, 1 + longest, width].

    A state predicts the token after it.
    """
    out = unwrap_adapter(model).base_model(
        input_ids=batch.ids, attention_mask=batch.attention, position_ids=batch.positions, use_cache=False
    )
    hidden: Tensor = out.last_hidden_state[:, -batch.tokens.shape[1] - 1 :]
    return hidden


@torch.no_grad()
def check_output_head(model: Any) -> None:
    """Raise ConfigError where, on a few tokens, the logits depend on more than last hidden states and output head."""
    causal = unwrap_adapter(model)
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


def unwrap_adapter(model: Any) -> Any:
    """Return the causal model of transformers under an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model

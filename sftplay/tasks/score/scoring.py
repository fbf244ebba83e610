"""Runs a model over actions that were drawn: log-probabilities, entropy and KL of their tokens, and the last state.

Scores over the vocabulary are made of the last states a chunk of tokens at a time, and once more in the backward pass.
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
from sftplay.plan.memory.head import CHUNK_SCORES
from sftplay.tasks.score.losses import chosen, entropy, full_kl, k3_kl
from sftplay.tasks.score.role_models import Cast, Role
from sftplay.tasks.score.sample_episodes import Action, right_padded
from sftplay.tasks.score.shards import within
from sftplay.train.loss_heads import PROOF_TOLERANCE, proof_rows, scores_of

Kl = Literal["full", "k3"]


class ActionBatch(NamedTuple):
    """Actions behind their prompts, which end at the same place."""

    ids: Tensor
    attention: Tensor
    positions: Tensor
    """int64 [actions, prompt + action]."""

    tokens: Tensor
    """int64 [actions, longest]: the actions, padded on the right."""

    mask: Tensor
    """fp32: 1 on the actions' tokens."""

    drawn: Tensor
    """fp32: log-probabilities of the draw."""

    @classmethod
    def of(cls, actions: Sequence[Action], *, pad: int, device: Any) -> ActionBatch:
        """The actions as tensors."""
        prompts, prompt_mask = left_padded([action.prompt for action in actions], pad)
        tokens, mask = right_padded([action.ids for action in actions], pad, dtype=torch.int64)
        drawn, _ = right_padded([action.log_probs for action in actions], 0.0, dtype=torch.float32)
        attention = torch.cat([prompt_mask, mask.long()], 1)
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        parts = (torch.cat([prompts, tokens], 1), attention, positions, tokens, mask, drawn)
        return cls(*(part.to(device) for part in parts))

    def to(self, device: Any) -> ActionBatch:
        """The same on another device."""
        return ActionBatch(*(part.to(device) for part in self))

    @property
    def last(self) -> Tensor:
        """int64 [actions]: the place of each action's last token among the states that `forward` gives."""
        return self.mask.sum(1).long()


class TokenScores(NamedTuple):
    """What a model says of the tokens of a batch of actions, each fp32 [actions, longest]."""

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor
    last_hidden: Tensor
    """[actions, width]: the state at the last token of each action."""


class OutputHead(NamedTuple):
    """What turns last states into scores."""

    weight: Tensor
    bias: Tensor | None
    config: Any

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """That of a causal model, with an adapter or without."""
        head = plain(model).get_output_embeddings()
        return cls(head.weight, getattr(head, "bias", None), model.config.get_text_config())

    def log_probs(self, hidden: Tensor, temperature: float) -> Tensor:
        """Of every token of the vocabulary: [..., width] -> fp32 [..., vocabulary]."""
        scores = scores_of(hidden, weight=self.weight, bias=self.bias, config=self.config)
        return (scores / temperature).log_softmax(-1)


def score_actions(cast: Cast, batch: ActionBatch, *, role: Role, temperature: float, kl: Kl) -> TokenScores:
    """The tokens under the model of `role`, with gradients, and their KL to the frozen reference.

    A mode of dropout is not changed here. The backward pass must run while the role speaks.
    """
    with torch.no_grad(), cast.reference(role) as frozen:
        its = within(frozen, lambda: (forward(frozen, batch.to(frozen.device)), OutputHead.of(frozen)))
    with cast.speaking(role) as model:
        found = within(model, lambda: _compared(model, batch, reference=its, temperature=temperature, kl=kl))
    log_probs, spread, distance = (each.view_as(batch.mask) for each in found[:3])
    return TokenScores(log_probs, spread, distance, found[3])


def _compared(
    model: Any, batch: ActionBatch, *, reference: tuple[Tensor, OutputHead], temperature: float, kl: Kl
) -> tuple[Tensor, ...]:
    """What `TokenScores` has, of all tokens in a row, beside the last states of the reference and its head."""
    hidden, (frozen_hidden, its_head) = forward(model, batch), reference
    heads = OutputHead.of(model), its_head
    rows = torch.arange(len(hidden), device=hidden.device)
    width = max(1, CHUNK_SCORES // heads[0].weight.shape[0])
    columns = [each.flatten(0, 1).split(width) for each in (hidden[:, :-1], frozen_hidden[:, :-1])]
    columns += [each.flatten().split(width) for each in (batch.tokens, batch.drawn)]
    parts = [
        checkpoint(
            _token_scores, mine, frozen, tokens=tokens, drawn=drawn, heads=heads, temperature=temperature, kl=kl,
            use_reentrant=False, preserve_rng_state=False,
        )
        for mine, frozen, tokens, drawn in zip(*columns, strict=True)
    ]  # fmt: skip
    return (*(torch.cat(each) for each in zip(*parts, strict=True)), hidden[rows, batch.last])


def forward(model: Any, batch: ActionBatch) -> Tensor:
    """The last states from the prompt's last token on: [actions, 1 + longest, width]; each predicts the next token."""
    out = plain(model).base_model(
        input_ids=batch.ids, attention_mask=batch.attention, position_ids=batch.positions, use_cache=False
    )
    hidden: Tensor = out.last_hidden_state[:, -batch.tokens.shape[1] - 1 :]
    return hidden


@torch.no_grad()
def check_scores(model: Any) -> None:
    """Check on a few tokens that the model makes its scores of its last states and its head alone.

    Raises:
        ConfigError: it does not.
    """
    causal = plain(model)
    ids = proof_rows(causal)[0] % causal.get_input_embeddings().weight.shape[0]
    was_training = model.training
    model.eval()
    whole = causal(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    mine = OutputHead.of(model).log_probs(causal.base_model(input_ids=ids, use_cache=False).last_hidden_state, 1.0)
    model.train(was_training)
    means = [chosen(each[:, :-1], ids[:, 1:]).mean() for each in (mine, whole)]
    has_pair = isinstance(causal.get_output_embeddings(), BaseTunerLayer)
    if has_pair or not torch.isclose(means[0], means[1], rtol=PROOF_TOLERANCE):
        own = f"{type(causal).__name__} has a head of its own"
        why = "the adapter has a pair on the output head" if has_pair else own
        raise ConfigError(
            f"{why}, and two-turn episodes are learned from the scores of the plain head",
            where="tuning.lora.target_modules" if has_pair else "model.name",
            fix="leave the head out of it" if has_pair else "choose another model",
        )


def plain(model: Any) -> Any:
    """The causal model of transformers under an adapter, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _token_scores(
    hidden: Tensor,
    reference: Tensor,
    *,
    tokens: Tensor,
    drawn: Tensor,
    heads: tuple[OutputHead, OutputHead],
    temperature: float,
    kl: Kl,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, entropy and KL of each of these tokens, fp32 [tokens]."""
    with torch.no_grad():
        frozen = heads[1].log_probs(reference, temperature).to(hidden.device)
    log_probs = heads[0].log_probs(hidden, temperature)
    mine = chosen(log_probs, tokens)
    distance = full_kl(log_probs, frozen) if kl == "full" else k3_kl(mine, chosen(frozen, tokens), sampled=drawn)
    return mine, entropy(log_probs.detach()), distance

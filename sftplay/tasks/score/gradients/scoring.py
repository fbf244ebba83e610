"""Runs a model over actions that were drawn: log-probabilities, entropy and KL of their tokens, and the last state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sftplay.tasks.score.episodes.cast import Cast, Role
from sftplay.tasks.score.episodes.drawing import Action, left_padded, right_padded
from sftplay.tasks.score.learning.losses import chosen, entropy, full_kl, k3_kl

Kl = Literal["full", "k3"]

CHUNK_SCORES = 2**24
"""Scores that are turned into fp32 log-probabilities at a time: 64 MiB, and as much for the reference."""


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


class TokenScores(NamedTuple):
    """What a model says of the tokens of a batch of actions, each fp32 [actions, longest]."""

    log_probs: Tensor
    entropy: Tensor
    kl: Tensor
    last_hidden: Tensor
    """[actions, width]: the state at the last token of each action."""


def score_actions(cast: Cast, batch: ActionBatch, *, role: Role, temperature: float, kl: Kl) -> TokenScores:
    """The tokens under the model of `role`, with gradients, and their KL to the frozen reference.

    A mode of dropout is not changed here.
    """
    with torch.no_grad(), cast.reference() as model:
        reference = forward(model, batch)[0]
    with cast.speaking(role) as model:
        logits, hidden = forward(model, batch)
    rows = torch.arange(len(hidden), device=hidden.device)
    last = batch.attention.shape[1] - batch.mask.shape[1] + batch.mask.sum(1).long() - 1
    width = max(1, CHUNK_SCORES // (logits.shape[0] * logits.shape[-1]))
    places = range(0, logits.shape[1], width)
    parts = [
        checkpoint(
            _token_scores,
            logits[:, at : at + width], reference[:, at : at + width],
            tokens=batch.tokens[:, at : at + width], drawn=batch.drawn[:, at : at + width],
            temperature=temperature, kl=kl, use_reentrant=False, preserve_rng_state=False,
        )
        if len(places) > 1
        else _token_scores(
            logits, reference, tokens=batch.tokens, drawn=batch.drawn, temperature=temperature, kl=kl
        )
        for at in places
    ]  # fmt: skip
    log_probs, spread, distance = (torch.cat(each, 1) for each in zip(*parts, strict=True))
    return TokenScores(log_probs, spread, distance, hidden[rows, last])


def forward(model: Any, batch: ActionBatch) -> tuple[Tensor, Tensor]:
    """Logits that predict the action's tokens [actions, longest, vocabulary], and the last states of all tokens."""
    length = batch.tokens.shape[1]
    out = model(
        input_ids=batch.ids,
        attention_mask=batch.attention,
        position_ids=batch.positions,
        logits_to_keep=length + 1,
        output_hidden_states=True,
        use_cache=False,
    )
    return out.logits[:, :-1], out.hidden_states[-1]


def _token_scores(
    logits: Tensor, reference: Tensor, *, tokens: Tensor, drawn: Tensor, temperature: float, kl: Kl
) -> tuple[Tensor, Tensor, Tensor]:
    log_probs = (logits.float() / temperature).log_softmax(-1)
    frozen = (reference.float() / temperature).log_softmax(-1)
    mine = chosen(log_probs, tokens)
    distance = full_kl(log_probs, frozen) if kl == "full" else k3_kl(mine, chosen(frozen, tokens), sampled=drawn)
    return mine, entropy(log_probs.detach()), distance

"""Computes scores over the vocabulary only at positions that have a label.

In fine-tuning a third to a half of all positions are prompt or padding. The output head, often a small model's largest
matrix, is not multiplied with them. Loss and gradient are the same. A hook narrows the head's input; it is only used
after a proof on the model at hand. No model code changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ran_out_of_memory

PROOF_TOKENS = 8
PROOF_TOLERANCE = 1e-2
"""Relative. 16-bit heads round differently for other shapes; a wrong position differs by far more."""


class LabelHead:
    """Narrows the input of a causal model's output head while `narrow` is in force."""

    def __init__(self, model: Any) -> None:
        self._positions: Tensor | None = None
        self._handle = model.get_output_embeddings().register_forward_pre_hook(self._select)

    def narrow(self, labels: Tensor) -> Tensor:
        """From now on only the positions before a label reach the head; returns the labels in that order.

        `labels` int64 [rows, tokens] -> int64 [1, labelled], for the model's argument `shift_labels`.
        """
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
        positions = (shifted != IGNORE_INDEX).nonzero().squeeze(1)
        if len(positions) == 0:
            positions = positions.new_zeros(1)  # the head needs one position; this one's label is IGNORE_INDEX
        self._positions = positions
        return shifted[positions][None]

    def widen(self) -> None:
        """From now on all positions reach the head, as generation needs it."""
        self._positions = None

    def remove(self) -> None:
        """Take the hook off the model."""
        self._handle.remove()

    def _select(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None:
            return None
        hidden = inputs[0]  # [rows, tokens, width]
        return (hidden.reshape(1, -1, hidden.shape[-1])[:, self._positions], *inputs[1:])


def prove_label_head(model: Any) -> tuple[LabelHead | None, str]:
    """A label head for `model`; or None, and why: the model computes its scores in a way that the hook does not reach.

    The proof: the loss of a few tokens is the same with it and without it.

    Raises:
        RuntimeError: memory ran out in it, which says nothing about the model.
    """
    if model.get_output_embeddings() is None:
        return None, "the model has no output embeddings"
    head = LabelHead(model)
    was_training = model.training
    model.eval()
    try:
        why = "" if _agrees(model, head) else "the loss of a few tokens is another one with it"
    except (RuntimeError, TypeError, ValueError) as error:  # the model hands its scores on in another shape
        if ran_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
    finally:
        head.widen()
        model.train(was_training)
    if why:
        head.remove()
        return None, why
    return head, ""


def proof_rows(model: Any) -> tuple[Tensor, Tensor]:
    """Token ids and labels of two short rows, some of them without a label, where `model` is."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(2 * PROOF_TOKENS, device=device).reshape(2, PROOF_TOKENS)
    labels = ids.clone()
    labels[0, : PROOF_TOKENS // 2] = IGNORE_INDEX
    return ids, labels


@torch.no_grad()
def _agrees(model: Any, head: LabelHead) -> bool:
    ids, labels = proof_rows(model)
    wide = model(input_ids=ids, labels=labels, use_cache=False).loss
    narrow = model(input_ids=ids, labels=labels, shift_labels=head.narrow(labels), use_cache=False).loss
    return bool(torch.isclose(wide.float(), narrow.float(), rtol=PROOF_TOLERANCE))

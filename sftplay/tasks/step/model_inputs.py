"""What the model is given of a batch, and in which form its attention stays inside each row of data.

Rows of data that share a row of the batch are told apart by their positions, which begin at 0 in each. transformers
then masks them for sdpa and eager attention, where no attention mask is given (masking_utils). Flash attention reads
the positions only where the whole batch is one row (modeling_flash_attention_utils, `_is_packed_sequence`); of several
rows it would let each attend to all that stands before it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

Batch = dict[str, Tensor]

INPUTS = ("input_ids", "attention_mask", "position_ids", "labels")
"""Columns of a batch that the model is given; the others are the kit's."""


def model_inputs(batch: Batch) -> Batch:
    """The columns for the model. Positions take the place of the mask."""
    dropped = "attention_mask" if "position_ids" in batch else "position_ids"
    return {key: batch[key] for key in INPUTS if key in batch and key != dropped}


def on_device(batch: Batch, device: Any) -> Batch:
    """The batch where the model is. A GPU copies it from page-locked memory while it still computes."""
    if device.type != "cuda":
        return batch
    return {key: value.pin_memory().to(device, non_blocking=True) for key, value in batch.items()}


def has_flash_kernel(model: Any) -> bool:
    """Whether the attention of a causal model is computed by flash attention."""
    return "flash" in str(getattr(model.config.get_text_config(), "_attn_implementation", ""))


def in_one_row(inputs: Batch) -> Batch:
    """Packed rows one behind the other: int64 [1, rows * tokens].

    No row's first token has a label, so that the loss stays the same.
    """
    return {key: value.reshape(1, -1) for key, value in inputs.items()}

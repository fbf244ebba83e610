"""Computes the loss in chunks of label tokens, so that the scores of a whole micro-batch never exist at once.

The scores of a chunk are computed again in the backward pass. Only the loss comes out; entropy and accuracy are not
computed. TRL 1.14 had such a loss. That of TRL 1.16 scores tiles of 4,096 tokens by 32,768 words: on a CPU, all
positions, with and without a label, and several such tiles in fp32 at a time.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput
from trl.trainer.utils import maybe_gather_lm_head_ctx

from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError
from sftplay.plan.memory.head import gpu_chunk_tokens
from sftplay.tasks.step.label_head import PROOF_TOLERANCE, proof_rows

CHUNK_TOKENS = 256
"""Tokens whose scores exist at a time on a CPU. `plan.memory` counts with it."""

SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Names under which configs of transformers keep what scores are multiplied with (Cohere, Muse, Falcon-H1)."""


def put_chunked_head(model: Any, *, proves: bool) -> None:
    """From now on the causal `model`, given labels, computes its loss in chunks; without labels it is as before.

    With `proves` a few tokens show that the loss is the model's own. They cannot where weights are sharded.

    Raises:
        ConfigError: the loss of this model cannot be computed so.
    """
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise _refusal("the adapter has a pair on the output head, which a loss in chunks passes over")
    whole, config = model.forward, model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise _refusal("the model adds a loss of its router, which a loss in chunks leaves out")

    @functools.wraps(type(model).forward)  # generate() looks at its signature
    def forward(self: Any, *given: Any, labels: Any = None, num_items_in_batch: Any = None, **named: Any) -> Any:
        if labels is None:
            return whole(*given, **named)
        hidden = self.base_model(*given, **named).last_hidden_state
        # Looked up here, because FSDP replaces it.
        total = _summed_loss(hidden, labels, head=self.get_output_embeddings(), config=config)
        count = (labels[:, 1:] != IGNORE_INDEX).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=total / count)

    model.forward = MethodType(forward, model)
    if proves and not _agree(model, whole, model.forward):
        raise _refusal(f"{type(model).__name__} computes its loss from more than the scores of its output head")


@torch.no_grad()
def _agree(model: Any, *forwards: Any) -> bool:
    ids, labels = proof_rows(model)
    was_training = model.training
    model.eval()
    try:
        one, other = (forward(input_ids=ids, labels=labels, use_cache=False).loss.float() for forward in forwards)
    finally:
        model.train(was_training)
    return bool(torch.isclose(one, other, rtol=PROOF_TOLERANCE))


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="train.loss_head chunked", fix="write train.loss_head: standard")


def _summed_loss(hidden: Tensor, labels: Tensor, *, head: Any, config: Any) -> Tensor:
    """Sum of the label tokens' losses; `hidden` [rows, tokens, width], `labels` int64 [rows, tokens]."""
    # Of a head that has rows of new tokens, PEFT's wrapper gives the weight with these rows, and no bias.
    weight, bias = head.weight, getattr(head, "bias", None)
    if isinstance(weight, DTensor):  # gathered once, not in every chunk
        weight, bias = weight.full_tensor(), bias.full_tensor() if bias is not None else None
    targets = labels[:, 1:].reshape(-1)
    is_label = targets != IGNORE_INDEX
    # Labels first, in their order. The rest of the last chunk counts nothing.
    order = is_label.to(torch.int8).argsort(descending=True, stable=True)
    hidden, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1])[order], targets[order]
    # One chunk without any label still reaches every weight, which DDP and FSDP wait for.
    size = chunk_tokens(hidden.device, weight.shape[0])
    chunks = max(1, -(-int(is_label.sum()) // size))
    if hidden.device.type == "cuda":  # once, not in each chunk
        weight = weight.to(hidden.dtype)
    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, chunks * size, size):
        part = slice(start, start + size)
        given = {"weight": weight, "bias": bias, "config": config}
        total = total + checkpoint(_chunk_loss, hidden[part], targets[part], **given, use_reentrant=False)
    return total


def chunk_tokens(device: torch.device, vocab: int) -> int:
    """Tokens of a chunk on that device."""
    return gpu_chunk_tokens(vocab) if device.type == "cuda" else CHUNK_TOKENS


def _chunk_loss(hidden: Tensor, targets: Tensor, *, weight: Tensor, bias: Tensor | None, config: Any) -> Tensor:
    with maybe_gather_lm_head_ctx(weight, bias):
        scores = scores_of(hidden, weight=weight, bias=bias, config=config)
    return nn.functional.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def scores_of(hidden: Tensor, *, weight: Tensor, bias: Tensor | None, config: Any) -> Tensor:
    """What a causal model of this text config makes of its last states: fp32 [..., width] -> [..., vocabulary]."""
    scores = (hidden @ weight.to(hidden.dtype).t()).float()
    if bias is not None:
        scores = scores + bias.float()
    scale = next((getattr(config, name) for name in SCALES if getattr(config, name, None) is not None), 1.0)
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    if scale != divisor:
        scores = scores * (scale / divisor)
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    return scores

"""Proofs on the model at hand that no document of a block sees another, and that no token sees the padding behind it.

A few tokens are computed as two documents in one row. Then the gradient of what the model says of one of them, with
respect to the embeddings of the other, must be exactly 0. Where a layer carries anything over, such as the state of a
state-space layer or a convolution over tokens, it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sftplay.errors import ConfigError
from sftplay.train.eval_mode import eval_mode
from sftplay.train.loss_heads import PROOF_TOLERANCE
from sftplay.train.upstream import find_attention

PROOF_TOKENS = 8  # tokens of each of the two documents


def check_isolation(model: Any) -> None:
    """Refuse a causal `model` that lets a document of a block see another; what it says of itself plays no part.

    Raises:
        ConfigError: the model does.
    """
    ids = proof_ids(model)
    positions = torch.arange(PROOF_TOKENS, device=ids.device).repeat(2)[None]
    first, second = slice(0, PROOF_TOKENS), slice(PROOF_TOKENS, None)
    with watched_embeddings(model) as seen:
        scores = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
        (of_first,) = torch.autograd.grad(scores[:, first].square().sum(), seen, retain_graph=True)
        (of_second,) = torch.autograd.grad(scores[:, second].square().sum(), seen)
    if not (of_first[:, first].any() and of_second[:, second].any()):
        what = f"{type(model).__name__} does not say how its attention follows positions"
    elif of_first[:, second].any() or of_second[:, first].any():
        what = f"{type(model).__name__} lets each document of a block see the ones before it"
    else:
        return
    fix = "write cpt.cross_document: true, which lets documents see each other on purpose; or choose another model"
    raise ConfigError(what, where="cpt.cross_document false", fix=fix)


def can_compute(model: Any) -> bool:
    """Return whether this process can run `model` before the trainer has wrapped it.

    Not under ZeRO-3, which has shared the weights out already, nor where FSDP loads them on the main process alone, nor
    where flash attention waits for a GPU on which the model is put later.
    """
    device = model.get_input_embeddings().weight.device
    on_hold = any(weight.is_meta or hasattr(weight, "ds_id") for weight in model.parameters())
    return not on_hold and not ("flash" in find_attention(model) and device.type == "cpu")


def needs_no_mask(model: Any, device: torch.device, *, is_half: bool) -> bool:
    """Return whether rows that are padded on the right need no mask, and are faster without one.

    With a mask transformers repeats keys and values for all heads, and torch takes its memory-efficient kernel. Without
    one it takes flash attention, which exists for 16 bits from capability 8.0 on (torch, `sdp_utils.cpp`). In a plain
    causal decoder no token sees what stands behind it. What the mask is also needed for keeps it: a router's loss over
    all tokens, windows that slide, positions by the mask (ALiBi).
    """
    config = model.config.get_text_config()
    is_fast = device.type == "cuda" and is_half and torch.cuda.get_device_capability(device) >= (8, 0)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    slides = slides or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    reads_mask = getattr(config, "output_router_logits", False) or getattr(config, "alibi", False)
    reads_mask = reads_mask or config.model_type in ("bloom", "mpt")
    plain = find_attention(model) == "sdpa" and not slides and not reads_mask
    return bool(is_fast and plain and can_compute(model) and ignores_padding(model))


def ignores_padding(model: Any) -> bool:
    """Return whether a few tokens have the same scores without a mask, and no gradient from what follows them."""
    ids = proof_ids(model)
    mask = (torch.arange(2 * PROOF_TOKENS, device=ids.device) < PROOF_TOKENS).long()[None]
    with watched_embeddings(model) as seen:
        masked = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :PROOF_TOKENS].float()
        plain = model(input_ids=ids, use_cache=False).logits[:, :PROOF_TOKENS].float()
        (gradient,) = torch.autograd.grad(plain.square().sum(), seen[-1:])
    absolute = PROOF_TOLERANCE * float(masked.detach().abs().max())
    same = torch.allclose(masked, plain, rtol=PROOF_TOLERANCE, atol=absolute)
    return bool(same) and not gradient[:, PROOF_TOKENS:].any()


def proof_ids(model: Any) -> Tensor:
    """Return a row of ordinary token ids, int64 [1, 2 x PROOF_TOKENS], where `model` is."""
    return torch.arange(2 * PROOF_TOKENS, device=model.get_input_embeddings().weight.device)[None] + 2


@contextmanager
def watched_embeddings(model: Any) -> Iterator[list[Tensor]]:
    """Inside, `model` computes without dropout, and the embeddings of each forward pass are kept as leaves."""
    seen: list[Tensor] = []

    def keep(*hooked: Any) -> Tensor:
        seen.append(hooked[-1].detach().requires_grad_())
        return seen[-1]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        with eval_mode(model), torch.enable_grad():
            yield seen
    finally:
        handle.remove()

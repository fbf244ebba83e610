"""The head's loss without the logits of a whole micro-batch: only where there are labels, and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput
from trl.trainer.utils import maybe_gather_lm_head_ctx

from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError, ran_out_of_memory
from sftplay.train.eval_mode import eval_mode
from sftplay.train.upstream import attention_for_host

PROOF_TOKENS = 8
PROOF_TOLERANCE = 1e-2
"""Relative. 16-bit heads round differently for other shapes; a wrong position differs by far more."""


class LabelHead:
    """Narrows the input of a causal model's output head while `narrow` is in force."""

    def __init__(self, model: Any) -> None:
        self._positions: Tensor | None = None
        self.handle = model.get_output_embeddings().register_forward_pre_hook(self._select)

    def narrow(self, labels: Tensor) -> Tensor:
        """Let only the positions before a label reach the head from now on; return the labels in that order: int64
        [rows, tokens] -> int64 [1, labelled], for the model's argument `shift_labels`.
        """
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].reshape(-1)
        positions = (shifted != IGNORE_INDEX).nonzero().squeeze(1)
        if len(positions) == 0:
            positions = positions.new_zeros(1)  # the head needs one position; this one's label is IGNORE_INDEX
        self._positions = positions
        return shifted[positions][None]

    def widen(self) -> None:
        """Let all positions reach the head from now on, as generation needs it."""
        self._positions = None

    def _select(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._positions is None:
            return None
        hidden = inputs[0]  # [rows, tokens, width]
        return (hidden.reshape(1, -1, hidden.shape[-1])[:, self._positions], *inputs[1:])


def prove_label_head(model: Any) -> tuple[LabelHead | None, str]:
    """Return a label head for `model` with which the loss of a few tokens is the same; or None, and why there is none.

    Raise RuntimeError where memory ran out, which says nothing about the model; and ConfigError where the model's loss
    is not divided by `num_items_in_batch`: micro-batches would weigh the same, whatever their label tokens.
    """
    why = "" if model.get_output_embeddings() is not None else "the model has no output embeddings"
    head = None if why else LabelHead(model)
    try:
        with eval_mode(model), torch.no_grad(), attention_for_host(model):
            ids, labels = proof_rows(model)
            call = partial(model, input_ids=ids, labels=labels, use_cache=False)
            wide = call().loss.float()
            if _takes_own_mean(call, wide, labels):
                what = f"{type(model).__name__} takes a mean of its own over each micro-batch"
                raise ConfigError(what, where="train.loss_head standard", fix="write train.loss_head: chunked")
            narrow = call(shift_labels=head.narrow(labels)).loss.float() if head else wide
        if not torch.isclose(wide, narrow, rtol=PROOF_TOLERANCE):
            why = "the loss of a few tokens is another one with it"
    except (RuntimeError, TypeError, ValueError) as error:  # the model hands its scores on in another shape
        if ran_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
    if head:
        head.widen()
    if head and why:
        head.handle.remove()
    return (None, why) if why else (head, "")


def _takes_own_mean(call: Callable[..., Any], loss: Tensor, labels: Tensor) -> bool:
    """Return whether the loss stays the same when it is to be divided by twice as many items."""
    try:
        other = call(num_items_in_batch=2 * (labels[:, 1:] != IGNORE_INDEX).sum()).loss.float()
    except TypeError:  # the class takes no such number
        return True
    return bool(torch.isclose(loss, other, rtol=PROOF_TOLERANCE))


def proof_rows(model: Any) -> tuple[Tensor, Tensor]:
    """Return token ids and labels of two short rows, some of them without a label, where `model` is."""
    device = model.get_input_embeddings().weight.device
    ids = torch.arange(2 * PROOF_TOKENS, device=device).reshape(2, PROOF_TOKENS)
    labels = ids.clone()
    labels[0, : PROOF_TOKENS // 2] = IGNORE_INDEX
    return ids, labels


CHUNK_TOKENS = 256
"""Tokens with scores at one time on a CPU. `plan.forecast` counts with it."""

SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
"""Names under which configs of transformers keep what scores are multiplied with (Cohere, Muse, Falcon-H1)."""


def put_chunked_head(model: Any, *, proves: bool) -> None:
    """Let the causal `model`, given labels, compute its loss in chunks from now on; without labels it is as before.

    With `proves` a few tokens show that the loss is the model's own. Raise ConfigError where it cannot be computed so.
    """
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise _refusal("the adapter has a pair on the output head, which a loss in chunks passes over")
    whole, config = model.forward, model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise _refusal("the model adds a loss of its router, which a loss in chunks leaves out")

    @wraps(type(model).forward)  # generate() looks at its signature
    def forward(self: Any, *given: Any, labels: Any = None, num_items_in_batch: Any = None, **named: Any) -> Any:
        if labels is None:
            return whole(*given, **named)
        hidden = self.base_model(*given, **named).last_hidden_state
        # Looked up here, because FSDP replaces it.
        total = _summed_loss(hidden, labels, head=self.get_output_embeddings(), config=config)
        count = (labels[:, 1:] != IGNORE_INDEX).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=total / count)

    model.forward = MethodType(forward, model)
    if not proves:
        return
    ids, labels = proof_rows(model)
    with eval_mode(model), torch.no_grad():
        losses = [call(input_ids=ids, labels=labels, use_cache=False).loss.float() for call in (whole, model.forward)]
    if not torch.isclose(losses[0], losses[1], rtol=PROOF_TOLERANCE):
        raise _refusal(f"{type(model).__name__} computes its loss from more than the scores of its output head")


def _refusal(what: str) -> ConfigError:
    return ConfigError(what, where="train.loss_head chunked", fix="write train.loss_head: standard")


def _summed_loss(hidden: Tensor, labels: Tensor, *, head: Any, config: Any) -> Tensor:
    """Sum the label tokens' losses; `hidden` [rows, tokens, width], `labels` int64 [rows, tokens]."""
    # Of a head that has rows of new tokens, PEFT's wrapper gives the weight with these rows, and no bias.
    weight, bias = head.weight, getattr(head, "bias", None)
    if isinstance(weight, DTensor):  # gathered once, not in every chunk
        weight, bias = gather_sharded(weight), gather_sharded(bias) if bias is not None else None
    targets = labels[:, 1:].reshape(-1)
    is_label = targets != IGNORE_INDEX
    # Labels first, in their order. The rest of the last chunk counts nothing.
    order = is_label.to(torch.int8).argsort(descending=True, stable=True)
    hidden, targets = hidden[:, :-1].reshape(-1, hidden.shape[-1])[order], targets[order]
    # One chunk without any label still reaches every weight, which DDP and FSDP wait for.
    size = chunk_tokens(hidden.device, weight.shape[0])
    chunks = max(1, -(-int(is_label.sum()) // size))
    # Cast once, unless it trains: its gradient is the sum over chunks, in fp32.
    if hidden.device.type == "cuda" and not weight.requires_grad:
        weight = weight.to(hidden.dtype)

    def compute_chunk_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        with maybe_gather_lm_head_ctx(weight, bias):
            scores = compute_scores(hidden, weight=weight, bias=bias, config=config)
        return nn.functional.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum")

    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, chunks * size, size):
        part = slice(start, start + size)
        total = total + checkpoint(compute_chunk_loss, hidden[part], targets[part], use_reentrant=False)
    return total


def gather_sharded(part: DTensor) -> Tensor:
    """Return the whole weight. Its gradient is the mean over ranks, as FSDP's own: each rank has other rows."""
    mesh = part.device_mesh
    whole = part.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole


def chunk_tokens(device: torch.device, vocab: int) -> int:
    if device.type != "cuda":
        return CHUNK_TOKENS
    from sftplay.plan.memory_setup import gpu_chunk_tokens

    return gpu_chunk_tokens(vocab)


def compute_scores(hidden: Tensor, *, weight: Tensor, bias: Tensor | None, config: Any) -> Tensor:
    """Compute a causal model's scores from its last states: float [..., width] -> fp32 [..., vocabulary]."""
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

"""Log-probabilities of two completions of one prompt: the prompt computed once for both, or each in its own row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput
from trl.trainer.utils import maybe_gather_lm_head_ctx

from sftplay import log
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ran_out_of_memory
from sftplay.train.loss_heads import PROOF_TOLERANCE, chunk_tokens, compute_scores, gather_sharded
from sftplay.train.micro_batches import Batch, Collator, can_compute, watched_embeddings
from sftplay.train.shared_prompt import EXACT_TOLERANCE, attends_to_all, unwrap
from sftplay.train.upstream import find_attention

Sides = Literal["both", "first", "second"]

COLUMNS = ("prompt_tokens", "chosen_tokens", "row", "index", "desirable", "margin")


@dataclass(frozen=True)
class PairCollator:
    """Joins rows of a prompt and two completions into one window, padded on the right: `input_ids`, `attention_mask`,
    `labels` int64 [rows, tokens], and the other columns as [rows].
    """

    pad_token_id: int

    def __call__(self, rows: Sequence[dict[str, Any]]) -> Batch:
        columns = {key: torch.tensor([row[key] for row in rows]) for key in COLUMNS if key in rows[0]}
        return Collator(self.pad_token_id)(rows) | columns


class CompletionLogps(NamedTuple):
    """Sums of the log-probabilities of labels, [pairs, 2] in fp32 or better, and how many labels, int64 [pairs, 2].

    Both are 0 for a side that was not asked for.
    """

    sums: Tensor
    tokens: Tensor


class ScoredRows(NamedTuple):
    """Inputs of a forward pass, and for each token its label and the place in its row of the token before it."""

    inputs: Batch
    labels: Tensor
    before: Tensor


def completion_logps(model: Any, batch: Batch, *, shares: bool, sides: Sides = "both") -> CompletionLogps:
    """Compute the log-probabilities of a batch of `PairCollator`, with gradient where it is on.

    With `shares` the prompt of a pair is computed once, which `prove` allows; else each side is a row. `model` may be
    wrapped by DDP, FSDP or DeepSpeed. Only the states before labels reach the output head.
    """
    first_end = (batch["prompt_tokens"] + batch["chosen_tokens"])[:, None]
    is_label = batch["labels"] != IGNORE_INDEX
    is_first = torch.arange(is_label.shape[1], device=is_label.device) < first_end
    tokens = torch.stack([(is_label & is_first).sum(1), (is_label & ~is_first).sum(1)], dim=1)
    if shares and sides == "both":
        logps = label_logps(model, join_sides(batch, find_attention(unwrap(model))))
        return CompletionLogps(torch.stack([(logps * is_first).sum(1), (logps * ~is_first).sum(1)], dim=1), tokens)
    wanted = [True, False] if sides == "first" else [False, True] if sides == "second" else [True, True]
    found = iter(label_logps(model, split_sides(batch, wanted)).sum(1).chunk(sum(wanted)))
    columns = [next(found) if is_wanted else None for is_wanted in wanted]
    nothing = torch.zeros_like(next(column for column in columns if column is not None))
    sums = torch.stack([nothing if column is None else column for column in columns], dim=1)
    return CompletionLogps(sums, tokens * torch.tensor(wanted, device=tokens.device))


def join_sides(batch: Batch, attention: str) -> ScoredRows:
    """Return a row for each pair: both completions continue the prompt, and none sees the other."""
    ids, prompt, first = batch["input_ids"], batch["prompt_tokens"][:, None], batch["chosen_tokens"][:, None]
    lengths = batch["attention_mask"].sum(1)[:, None]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    is_second = places >= prompt + first
    positions = torch.where(is_second, places - first, places).masked_fill(places >= lengths, 0)
    before = torch.where(places == prompt + first, prompt, places) - 1
    # The prompt is part 0, then come the completions; padding is a part of its own that no other sees.
    part = (places >= prompt).long() + is_second + (places >= lengths)
    sees = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    sees = (sees & (places[:, None, :] <= places[:, :, None]))[:, None]
    # sdpa takes booleans; eager attention would add them as 1.
    mask = (
        sees
        if attention == "sdpa"
        else torch.zeros(sees.shape, device=ids.device).masked_fill(~sees, torch.finfo(torch.float32).min)
    )
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return ScoredRows(inputs, batch["labels"], before.clamp(min=0))


def split_sides(batch: Batch, wanted: Sequence[bool]) -> ScoredRows:
    """Return a padded row for each wanted side of each pair: all first ones, then all second ones."""
    prompt, first = batch["prompt_tokens"][:, None], batch["chosen_tokens"][:, None]
    total = batch["attention_mask"].sum(1)[:, None]
    sides = [(skipped, length) for skipped, length, is_wanted in zip(
        (torch.zeros_like(first), first), (prompt + first, total - first), wanted, strict=True
    ) if is_wanted]  # fmt: skip
    width = int(torch.cat([length for _, length in sides]).max())
    places = torch.arange(width, device=prompt.device).expand(len(prompt), width)
    ids, labels, masks = [], [], []
    for skipped, length in sides:
        source = torch.where(places < prompt, places, places + skipped).clamp(max=batch["labels"].shape[1] - 1)
        masks.append(places < length)
        ids.append(batch["input_ids"].gather(1, source).masked_fill(~masks[-1], 0))
        labels.append(batch["labels"].gather(1, source).masked_fill(~masks[-1], IGNORE_INDEX))
    inputs = {"input_ids": torch.cat(ids), "attention_mask": torch.cat(masks).long()}
    return ScoredRows(inputs, torch.cat(labels), (places - 1).clamp(min=0).repeat(len(sides), 1))


def label_logps(model: Any, rows: ScoredRows) -> Tensor:
    """Compute the log-probability of each label, [rows, tokens] in fp32 or better; 0 where there is no label."""
    labels, width = rows.labels, rows.labels.shape[1]
    places = (labels != IGNORE_INDEX).reshape(-1).nonzero().squeeze(1)
    starts = torch.arange(0, labels.numel(), width, device=labels.device)[:, None]
    # Without a label one state is scored, for nothing: DDP and FSDP wait for every weight.
    scored = places if len(places) else places.new_zeros(1)
    before, targets = (rows.before + starts).reshape(-1)[scored], labels.reshape(-1)[scored].clamp(min=0)
    found = _score(model, rows.inputs, before, targets)
    if not len(places):
        return found.new_zeros(labels.shape) + found.sum() * 0
    # Copied to places of their own: a sum by index has no fixed order on a GPU.
    return found.new_zeros(labels.numel()).index_copy(0, places, found).view_as(labels)


def _score(model: Any, inputs: Batch, before: Tensor, targets: Tensor) -> Tensor:
    """Compute the log-probabilities of `targets`, given the places (in all rows) of the tokens before them."""
    base = unwrap(model)
    if hasattr(base, CHUNKED):
        logps: Tensor = model(**inputs, use_cache=False, score_after=before, targets=targets).logits
        return logps[0]
    head = base.get_output_embeddings()

    def select(_head: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (given[0].reshape(1, -1, given[0].shape[-1])[:, before], *given[1:])

    handle = head.register_forward_pre_hook(select) if head is not None else None
    try:
        scores = model(**inputs, use_cache=False).logits
    finally:
        if handle is not None:
            handle.remove()
    if scores.shape[:2] != (1, len(before)):  # the model hands its states to the head in another shape
        scores = scores.reshape(1, -1, scores.shape[-1])[:, before]
    return TargetLogps.apply(scores[0], targets)


class TargetLogps(torch.autograd.Function):
    """Log-probabilities of one token a row from scores [rows, vocabulary], with one more such matrix for the gradient.

    torch's log_softmax and gather hold up to four.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> Tensor:
        def widen(part: Tensor) -> Tensor:
            return part if part.dtype == torch.float64 else part.float()

        parts = scores.split(max(1, 2**22 // scores.shape[1]))
        norms = torch.cat([widen(part).logsumexp(1) for part in parts])
        ctx.save_for_backward(scores, targets, norms)
        return widen(scores.gather(1, targets[:, None]).squeeze(1)) - norms

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor, None]:
        scores, targets, norms = ctx.saved_tensors
        gradient = (scores - norms[:, None]).exp_().mul_(-outer[0][:, None])
        gradient.scatter_add_(1, targets[:, None], outer[0][:, None])
        return gradient.to(scores.dtype), None


CHUNKED = "_scores_in_chunks"


def put_chunked_logps(model: Any) -> None:
    """Let `completion_logps` compute the scores of the causal `model` in chunks, and again in the backward pass.

    `loss_heads.put_chunked_head` refuses models for which this would be another head.
    """
    whole, config = model.forward, model.config.get_text_config()

    @wraps(type(model).forward)  # generate() looks at its signature
    def forward(self: Any, *given: Any, score_after: Any = None, targets: Any = None, **named: Any) -> Any:
        if score_after is None:
            return whole(*given, **named)
        hidden = self.base_model(*given, **named).last_hidden_state
        hidden = hidden.reshape(-1, hidden.shape[-1])[score_after]
        head = self.get_output_embeddings()  # looked up here, because FSDP replaces it
        weight, bias = head.weight, getattr(head, "bias", None)
        if isinstance(weight, DTensor):
            weight, bias = gather_sharded(weight), gather_sharded(bias) if bias is not None else None

        def score_chunk(states: Tensor, targets: Tensor) -> Any:
            with maybe_gather_lm_head_ctx(weight, bias):
                scores = compute_scores(states, weight=weight, bias=bias, config=config)
            return TargetLogps.apply(scores, targets)

        size = chunk_tokens(hidden.device, weight.shape[0])
        parts = zip(hidden.split(size), targets.split(size), strict=True)
        logps = [checkpoint(score_chunk, *part, use_reentrant=False) for part in parts]
        return CausalLMOutput(logits=torch.cat(logps)[None])

    model.forward = MethodType(forward, model)
    setattr(model, CHUNKED, True)


PROOF_PAIRS = ((5, 4, 6), (3, 6, 2))
"""Tokens of the prompt, of the chosen and of the rejected completion."""


def prove(model: Any) -> bool:
    """Return whether pairs of a few tokens have the same log-probabilities with a shared prompt as apart, and neither
    side has a gradient from the other.

    Where this process does not hold the weights, its config decides, which is said.
    """
    base = unwrap(model)
    if not attends_to_all(base):
        return False
    if not can_compute(base):
        log.say("note: that a shared prompt changes nothing is not proved here: this process does not hold the weights")
        return True
    return keeps_sides_apart(base, lambda batch, shares: completion_logps(base, batch, shares=shares).sums)


def keeps_sides_apart(base: Any, compute: Callable[[Batch, bool], Tensor], *, near_zero: float = 0.0) -> bool:
    """Return whether `compute(batch, shares)`, a number of each side, [pairs, 2], is the same with a shared prompt as
    apart, has a gradient from its prompt, and none from the other side.

    Numbers near 0 may differ by the share `near_zero` of the largest one, times the tolerance.
    """
    batch = proof_batch(base)
    places = torch.arange(batch["labels"].shape[1], device=batch["labels"].device)
    prompt, first = batch["prompt_tokens"][:, None], (batch["prompt_tokens"] + batch["chosen_tokens"])[:, None]
    is_prompt, is_second = places < prompt, places >= first
    try:
        with watched_embeddings(base) as seen:
            shared = compute(batch, True)
            gradients = [torch.autograd.grad(shared[:, side].sum(), seen[0], retain_graph=True)[0] for side in (0, 1)]
            with torch.no_grad():
                apart = compute(batch, False)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, RuntimeError) and ran_out_of_memory(error):
            raise
        return False
    crosses = gradients[0][is_second].any() or gradients[1][~is_prompt & ~is_second].any()
    reaches = gradients[0][is_prompt].any() and gradients[1][is_prompt].any()
    is_half = base.dtype.itemsize < 4 or torch.is_autocast_enabled(shared.device.type)
    tolerance = PROOF_TOLERANCE if is_half else EXACT_TOLERANCE
    near = tolerance * near_zero * float(apart.abs().max())
    return bool(reaches and not crosses and torch.allclose(shared, apart, rtol=tolerance, atol=max(near, 1e-8)))


def proof_batch(model: Any) -> Batch:
    """Return two ragged pairs of ordinary tokens where `model` is."""
    device, start, rows = model.get_input_embeddings().weight.device, 2, []
    for number, (prompt, first, second) in enumerate(PROOF_PAIRS):
        ids = list(range(start, start + prompt + first + second))
        start += len(ids)
        columns = {"prompt_tokens": prompt, "chosen_tokens": first, "row": number, "index": number}
        rows.append({"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:], **columns})
    return {key: value.to(device) for key, value in PairCollator(0)(rows).items()}

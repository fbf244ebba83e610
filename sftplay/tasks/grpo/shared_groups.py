"""Micro-batches of a rollout batch, by length; and log-probabilities with each prompt computed once for its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.records import IGNORE_INDEX
from sftplay.errors import ConfigError, ran_out_of_memory
from sftplay.tasks.grpo.plan import BLOCK_COST
from sftplay.train.micro_batches import can_compute, watched_embeddings
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.shared_prompt import (
    PromptLayout,
    attends_to_all,
    layout_inputs,
    teach_attention,
    unwrap,
)
from sftplay.train.upstream import find_attention, has_entropy_bonus

Batch = dict[str, Any]

Sharing = Literal["", "cheaper", "always"]
"""When completions are computed behind one prompt: never, where it costs less, or in every forward pass."""

PROMPT_KEYS = ("prompt_ids", "prompt_mask")
COMPLETION_KEYS = (
    "completion_ids", "completion_mask", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps",
    "importance_sampling_ratio", "tool_mask", "sampler_top_ids", "sampler_top_logps",
)  # fmt: skip
ROW_KEYS = ("advantages", "row")
WINDOW_KEYS = ("num_items_in_batch",)
"""The keys of a micro-batch of texts. A micro-batch with any other key (images) is left as it is."""


def loss_mask(batch: Batch) -> torch.Tensor:
    """Return which tokens of the completions count in the loss, [rows, tokens]: not those that an environment wrote."""
    mask: torch.Tensor = batch["completion_mask"]
    return mask if batch.get("tool_mask") is None else mask * batch["tool_mask"]


def depends_on_cut(trainer: Any) -> str:
    """Return why the loss of this GRPO trainer depends on which rows share a micro-batch; empty where it does not.

    The mean of equally large micro-batches is the mean over rows in loss types grpo, sapo, luspo and dr_grpo. dapo,
    cispo and vespo divide the sum over tokens by a number of the whole rollout batch. Ratios, clipping, the off-policy
    mask and KL are per token or per row. (trl 1.16, GRPOTrainer._compute_loss.)
    """
    if trainer.loss_type == "bnpo":
        return "loss_type bnpo divides by the tokens of the micro-batch"
    if trainer.top_entropy_quantile < 1.0:
        return "top_entropy_quantile compares the tokens of a micro-batch"
    if has_entropy_bonus(trainer):
        return "the entropy bonus is a mean over the tokens of the micro-batch"
    if trainer.aux_loss_enabled:
        return "the router's loss is one of the micro-batch"
    return ""


def order_by_length(batches: Sequence[Batch], *, accum: int, trims_prompts: bool, sharing: Sharing = "") -> list[Batch]:
    """Return the micro-batches of a rollout batch, reordered within each optimizer step (`accum` micro-batches).

    The longest come first, so that memory runs out in the first micro-batch or never. `trims_prompts`: whether the
    model's output is the same with less padding on the left; with learned position embeddings it is not.
    `sharing`: completions of a prompt stay together where that computes fewer tokens.
    """
    known = {*PROMPT_KEYS, *COMPLETION_KEYS, *ROW_KEYS, *WINDOW_KEYS}
    if len(batches) % accum or any(set(batch) - known for batch in batches):
        return list(batches)
    steps = [batches[first : first + accum] for first in range(0, len(batches), accum)]
    return [trim_padding(batch, trims_prompts=trims_prompts) for step in steps for batch in _order_step(step, sharing)]


def trim_padding(batch: Batch, *, trims_prompts: bool) -> Batch:
    """Remove the columns that are padding in every row: right of the completions, and left of the prompts."""
    full, width = batch["completion_mask"].size(1), max(1, int(batch["completion_mask"].sum(1).max()))
    found = {key: batch[key] for key in COMPLETION_KEYS if batch.get(key) is not None}
    # A ratio may be per row.
    trimmed = {**batch, **{key: value[:, :width] for key, value in found.items() if value.size(1) == full}}
    if trims_prompts:
        width = max(1, int(batch["prompt_mask"].sum(1).max()))
        trimmed |= {key: batch[key][:, -width:] for key in PROMPT_KEYS}
    return trimmed


def has_relative_positions(model: Any) -> bool:
    """Return whether positions are relative (rotary embeddings), so that padding on the left does not change a row."""
    return any("rotary" in type(module).__name__.lower() for module in model.modules())


def _order_step(batches: Sequence[Batch], sharing: Sharing) -> list[Batch]:
    """Return as many micro-batches with the same rows in the order with fewest tokens to compute: as now, by length,
    or by prompt."""
    whole = {
        key: value if key in WINDOW_KEYS or value is None else torch.cat([batch[key] for batch in batches])
        for key, value in batches[0].items()
    }
    rows = len(batches[0]["advantages"])
    prompts = whole["prompt_mask"].sum(1).tolist()
    completions = whole["completion_mask"].sum(1).tolist()
    numbers, groups = range(len(prompts)), list[str]()
    orders = [
        numbers,
        sorted(numbers, key=lambda n: (-completions[n], -prompts[n])),
        sorted(numbers, key=lambda n: -prompts[n] - completions[n]),
        sorted(numbers, key=lambda n: (-prompts[n], -completions[n])),
    ]
    if sharing:
        groups = [
            str(ids[len(ids) - length :]) for ids, length in zip(whole["prompt_ids"].tolist(), prompts, strict=True)
        ]
        sizes = Counter[str]()
        for n in numbers:
            sizes[groups[n]] += completions[n]
        orders.append(sorted(numbers, key=lambda n: (-sizes[groups[n]] - prompts[n], groups[n], -completions[n])))

    def count_tokens(order: Sequence[int]) -> float:
        return sum(count_part(order[at : at + rows]) for at in range(0, len(order), rows))

    def count_part(part: Sequence[int]) -> float:
        padded = len(part) * (max(prompts[n] for n in part) + max(completions[n] for n in part))
        if not sharing:
            return padded
        once = {groups[n]: prompts[n] for n in part}
        joined = BLOCK_COST * (sum(once.values()) + sum(completions[n] for n in part))
        return joined if sharing == "always" else min(padded, joined)

    best = min(orders, key=count_tokens)
    parts = torch.tensor(best, device=whole["advantages"].device).split(rows)
    return [
        {key: value if value is None or value.ndim == 0 else value[part] for key, value in whole.items()}
        for part in parts
    ]


Logps = tuple[Tensor, Tensor | None, Tensor | None]
"""As TRL returns them: log-probabilities and entropies, [rows, completion tokens], and the router's loss."""


class JoinedRows(NamedTuple):
    """A row of prompts and their completions, the label of each token, and the cell of each label in [rows, tokens]."""

    rows: int
    layout: PromptLayout
    ids: Tensor
    labels: Tensor
    cells: Tensor


def join_rows(input_ids: Tensor, attention_mask: Tensor, completion_tokens: int) -> JoinedRows:
    """Join rows of prompts, padded on the left, and completions, padded on the right. Equal prompts become one.

    A prompt's last token and all but the last one of a completion stand before the completion's labels.
    """
    width, device = input_ids.size(1) - completion_tokens, input_ids.device
    starts = (width - attention_mask[:, :width].sum(1)).tolist()
    lengths = attention_mask[:, width:].sum(1).tolist()
    groups = dict[tuple[int, ...], list[tuple[int, list[int]]]]()
    for number, (row, start, length) in enumerate(zip(input_ids.tolist(), starts, lengths, strict=True)):
        groups.setdefault(tuple(row[start:width]), []).append((number, row[width : width + length]))
    # A completion without tokens counts for nothing; without any, one stays, since DDP and FSDP wait for every weight.
    kept = {
        prompt: filled for prompt, rows in groups.items() if (filled := [row for row in rows if row[1]])
    } or {prompt: rows[:1] for prompt, rows in list(groups.items())[:1]}  # fmt: skip
    ids, labels, cells = list[int](), list[int](), list[int]()
    for prompt, rows in kept.items():
        ids += prompt[:-1]
        labels += [IGNORE_INDEX] * (len(prompt) - 1)
        for number, completion in rows:
            ids += [prompt[-1], *completion[:-1]]
            labels += completion or [IGNORE_INDEX]
            cells += range(number * completion_tokens, number * completion_tokens + len(completion))
    layout = PromptLayout(
        [len(prompt) - 1 for prompt in kept], [[max(1, len(found)) for _, found in rows] for rows in kept.values()],
        device,
    )  # fmt: skip
    return JoinedRows(
        len(input_ids), layout, *(torch.tensor(part, device=device, dtype=torch.long) for part in (ids, labels, cells))
    )


def score_groups(
    trainer: Any, model: Any, input_ids: Tensor, attention_mask: Tensor, completion_tokens: int,
    batch_size: int | None = None, compute_entropy: bool = False, compute_aux_loss: bool = False, **images: Any,
) -> Logps | None:  # fmt: skip
    """Compute what a GRPOTrainer's `_get_per_token_logps_and_entropies` does, by the head that TRL gave the model.

    None where `trainer.sharing` says that the rows are not to be joined, or that they cost more joined than padded, and
    for images and the loss of a router, which is a mean over tokens. `model` may be wrapped by DDP, FSDP or DeepSpeed.
    """
    if not trainer.sharing or compute_aux_loss or any(value is not None for value in images.values()):
        return None
    size, logps, entropies = batch_size or len(input_ids), list[Tensor](), list[Tensor]()
    parts = zip(input_ids.split(size), attention_mask.split(size), strict=True)
    joined = [join_rows(*part, completion_tokens) for part in parts]
    if trainer.sharing == "cheaper" and BLOCK_COST * sum(len(row.ids) for row in joined) > input_ids.numel():
        return None
    for row in joined:
        inputs, is_label = layout_inputs(row.layout, row.ids), row.labels != IGNORE_INDEX
        with trainer.accelerator.autocast():
            outputs = model(**inputs, shift_labels=row.labels[None], fused_lm_head=True)
        for found, kept in ((outputs.log_probs, logps), (outputs.entropy, entropies)):
            if found is not None:
                # Copied to places of their own: a sum by index has no fixed order on a GPU.
                scattered = found.new_zeros(row.rows * completion_tokens).index_copy(0, row.cells, found[0][is_label])
                kept.append(scattered.view(row.rows, completion_tokens))
    return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None


def decide_sharing(trainer: Any, cfg: RunConfig) -> Sharing:
    """Decide whether completions are computed next to each other, behind one prompt; say why not. Raise ConfigError
    where they shall, and the model gives them other probabilities then.
    """
    wanted, base = cfg.grpo.share_prompts, unwrap(trainer.model)
    if wanted is False:
        return ""
    what, is_known = "", can_compute(base) and not has_sharded_weights(trainer)
    if not (attends_to_all(base) and find_attention(base) == "sdpa" and has_relative_positions(base)):
        what = f"{base.config.model_type} with {find_attention(base)} attention cannot compute a prompt once"
    elif is_known:
        teach_attention()
        if not proves_equal(trainer, base):
            what = "with prompts computed once this model gives completions other probabilities"
    elif wanted is True:
        teach_attention()
        log.say("note: that a shared prompt changes nothing is not proved here: this process does not hold the weights")
    else:
        what = "that a shared prompt changes nothing cannot be proved where processes hold parts of the weights"
    if not what:
        return "always" if wanted is True else "cheaper"
    if wanted is True:
        fix = "write grpo.share_prompts: auto, which gives each completion a prompt of its own"
        raise ConfigError(what, where="grpo.share_prompts true", fix=fix)
    log.say(f"note: {what}: each completion has a prompt of its own")
    return ""


PROOF_ROWS = ((5, (4, 6, 1)), (3, (2, 5)))
"""Tokens of prompts, and of their completions."""


EXACT, ROUNDED = (1e-5, 1e-5, 1e-4), (0.05, 0.1, 0.5)
"""Relative differences of log-probabilities, entropies and gradients in the proof: in fp32, and where anything has 16
bits. 16 layers of 128 differ in bf16 by 0.014, 0.03 and 0.17 without any fault; there only the places that a completion
depends on are exact."""


def proves_equal(trainer: Any, base: Any) -> bool:
    """Return whether a few completions have the same log-probabilities and entropies, and their sum the same gradient
    of each token's embedding, with shared prompts as without; and whether each depends on its prompt and itself alone.
    """
    device, vocab = base.get_input_embeddings().weight.device, base.config.get_text_config().vocab_size
    width = max(length for _, lengths in PROOF_ROWS for length in lengths)
    longest, start, rows = max(length for length, _ in PROOF_ROWS), 2, list[list[int]]()
    for length, lengths in PROOF_ROWS:
        prompt = list(range(start, start := start + length))
        for count in lengths:
            padding = [-1] * (longest - length), [-1] * (width - count)
            rows.append([*padding[0], *prompt, *range(start, start := start + count), *padding[1]])
    marked = torch.tensor(rows, device=device)
    mask, ids = (marked >= 0).long(), marked.clamp(min=0) % vocab
    weights = torch.linspace(1, 2, len(rows) * width, device=device).view(-1, width)

    def compute(sharing: Sharing) -> list[Tensor]:
        trainer.sharing = sharing
        with watched_embeddings(base) as seen:
            logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, ids, mask, width, compute_entropy=True
            )
            weighed = (logps + entropies) * weights
            if sharing and not depend_on_own_prompts(weighed.sum(1), seen[0]):
                raise ValueError
            (gradient,) = torch.autograd.grad(weighed.sum(), seen[0])
        tokens = join_rows(ids, mask, width).ids if sharing else (ids * mask).flatten()
        total = gradient.new_zeros(start, gradient.shape[-1]).index_add(0, tokens % start, gradient.flatten(0, 1))
        total[0] = 0  # padding
        return [part.detach().float() for part in (logps, entropies, total)]

    try:
        pairs = list(zip(compute(""), compute("always"), strict=True))
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, RuntimeError) and ran_out_of_memory(error):
            raise
        return False
    is_half = base.dtype.itemsize < 4 or trainer.accelerator.mixed_precision != "no"
    return all(
        bool((one - other).norm() <= tolerance * one.norm()) and bool(one.any())
        for (one, other), tolerance in zip(pairs, ROUNDED if is_half else EXACT, strict=True)
    )


def depend_on_own_prompts(sums: Tensor, embeddings: Tensor) -> bool:
    """Return whether each completion of the proof depends on all of its prompt, and on nothing outside it and itself.

    `sums` has a number for each completion; `embeddings`, [1, tokens, hidden], are those of the row that holds all.
    """
    at, row = 0, 0
    for length, lengths in PROOF_ROWS:
        prompt = range(at, at := at + length - 1)  # its last token stands at the head of each completion
        for count in lengths:
            (gradient,) = torch.autograd.grad(sums[row], embeddings, retain_graph=True)
            touched = set(gradient[0].any(-1).nonzero().flatten().tolist())
            if touched != {*prompt, *range(at, at := at + count)}:
                return False
            row += 1
    return True

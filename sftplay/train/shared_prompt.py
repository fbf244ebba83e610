"""A prompt that is computed once for all its answers: where each stands in a row, and attention between them.

In the row there is no padding. Each prompt is followed by its answers; an answer begins with the last token of the
prompt, which predicts its first one, so that each label has a state of its own. Attention is computed in two blocks of
padded rows: prompts among themselves, and each answer over its prompt and itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor
from transformers import AttentionInterface

from sftplay.train.upstream import find_attention

MASKED_ATTENTION = ("sdpa", "eager")  # they take a mask for each pair of tokens (transformers 5.17, masking_utils.py)

EXACT_TOLERANCE = 1e-5  # relative, in fp32: random weights hardly care for a wrong position


def unwrap(model: Any) -> Any:
    """Return the causal model inside DDP, DeepSpeed or an adapter."""
    model = extract_model_from_parallel(model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def attends_to_all(base: Any) -> bool:
    """Return whether each token of a causal model attends to all before it, under a mask that can be given."""
    config = base.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return find_attention(base) in MASKED_ATTENTION and (layers == {"full_attention"} if layers else not slides)


@dataclass(frozen=True)
class PromptLayout:
    """Where prompts and answers stand in a row of tokens: each prompt, then its answers, without padding."""

    prompt_lengths: Sequence[int]
    answer_lengths: Sequence[Sequence[int]]
    """Those of the answers of each prompt; every prompt has one."""

    device: torch.device

    @cached_property
    def answer_counts(self) -> list[int]:
        return [len(lengths) for lengths in self.answer_lengths]

    @cached_property
    def prompt_width(self) -> int:
        return max(self.prompt_lengths)

    @cached_property
    def answer_width(self) -> int:
        return max(map(max, self.answer_lengths))

    @cached_property
    def prompt_cells(self) -> int:
        """Cells of the block of prompts, which come before those of answers."""
        return len(self.prompt_lengths) * self.prompt_width

    @cached_property
    def places(self) -> Tensor:
        """The cell of each token of the row, int64 [tokens]."""
        cells, answer = list[range](), self.prompt_cells
        for number, (prompt, answers) in enumerate(zip(self.prompt_lengths, self.answer_lengths, strict=True)):
            first = number * self.prompt_width
            cells.append(range(first, first + prompt))
            for length in answers:
                cells.append(range(answer, answer + length))
                answer += self.answer_width
        return torch.tensor([cell for part in cells for cell in part], device=self.device)

    @cached_property
    def cells(self) -> Tensor:
        """The token that is in each cell, int64 [cells]; the first one of the row in those of padding."""
        number = self.prompt_cells + sum(self.answer_counts) * self.answer_width
        tokens = torch.arange(len(self.places), device=self.device)
        return self.places.new_zeros(number).index_copy(0, self.places, tokens)

    @cached_property
    def positions(self) -> Tensor:
        """The position of each token, int64 [tokens]: answers continue their prompt."""
        parts = list[range]()
        for prompt, answers in zip(self.prompt_lengths, self.answer_lengths, strict=True):
            parts += [range(prompt), *(range(prompt, prompt + length) for length in answers)]
        return torch.tensor([position for part in parts for position in part], device=self.device)

    @cached_property
    def mask(self) -> Tensor:
        """Which keys the tokens of an answer see, bool [answers or 1, 1, answer width, prompt width + answer width]."""
        places = torch.arange(self.answer_width, device=self.device)
        causal = (places[None, :] <= places[:, None])[None, None]
        lengths = list(self.prompt_lengths)
        counts = self.answer_counts
        if min(lengths) == self.prompt_width:
            lengths, counts = lengths[:1], [1]
        lengths = [length for length, count in zip(lengths, counts, strict=True) for _ in range(count)]
        ends = torch.tensor(lengths, device=self.device)[:, None, None, None]
        prompt = torch.arange(self.prompt_width, device=self.device) < ends
        shape = (len(lengths), 1, self.answer_width, -1)
        return torch.cat([prompt.expand(shape), causal.expand(shape)], dim=3)


class _Pad(torch.autograd.Function):
    """The cells of padded blocks from the tokens of a row, [tokens, ...] -> [cells, ...]. Each token has one cell, so
    that its gradient is read, where `index_select` would add."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, layout: PromptLayout) -> Tensor:
        ctx.layout = layout
        return row.index_select(0, layout.cells)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor, None]:
        return outer[0].index_select(0, ctx.layout.places), None


class _Unpad(torch.autograd.Function):
    """The reverse: the tokens of a row from the cells of padded blocks."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, layout: PromptLayout) -> Tensor:
        ctx.layout, ctx.shape = layout, blocks.shape
        return blocks.index_select(0, layout.places)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor, None]:
        return outer[0].new_zeros(ctx.shape).index_copy_(0, ctx.layout.places, outer[0]), None


class _Repeat(torch.autograd.Function):
    """A copy of each prompt's block for each of its answers. Gradients are added in a fixed order."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        if len(set(counts)) == 1:
            return blocks[:, None].expand(-1, counts[0], *blocks.shape[1:]).reshape(-1, *blocks.shape[1:])
        return blocks.repeat_interleave(torch.tensor(counts, device=blocks.device), 0)

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor, None]:
        return torch.stack([part.sum(0) for part in outer[0].split(ctx.counts)]), None


def attend_in_blocks(
    attend: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, layout: PromptLayout, named: dict[str, Any]
) -> Tensor:
    """Compute the attention of a row of `layout` by `attend`, the attention of padded rows: [1, heads, tokens, width]
    -> [1, tokens, heads, width]."""
    counts, width = layout.answer_counts, layout.prompt_width
    blocks = [_Pad.apply(part[0].transpose(0, 1), layout) for part in (query, key, value)]
    heads = [block.split([layout.prompt_cells, len(block) - layout.prompt_cells]) for block in blocks]
    prompts = [part[0].view(len(counts), width, *part[0].shape[1:]) for part in heads]
    answers = [part[1].view(sum(counts), layout.answer_width, *part[1].shape[1:]) for part in heads]
    found = []
    if width:
        # Padding is right of the tokens, where causal attention does not look.
        found = [attend(module, *(part.transpose(1, 2) for part in prompts), None, **named)[0].flatten(0, 1)]
    joined = [
        torch.cat([_Repeat.apply(prompt, counts), answer], dim=1)
        for prompt, answer in zip(prompts[1:], answers[1:], strict=True)
    ]
    keys = (part.transpose(1, 2) for part in joined)
    found.append(attend(module, answers[0].transpose(1, 2), *keys, layout.mask, **named)[0].flatten(0, 1))
    return _Unpad.apply(torch.cat(found), layout)[None]


LAYOUT = "prompt_layout"
"""The argument of a model's forward pass that reaches its attention."""


def teach_attention() -> None:
    """Let sdpa attention take a `PromptLayout` from now on, in this process; without one it is as before."""
    attend = AttentionInterface()["sdpa"]
    if hasattr(attend, LAYOUT):
        return

    def attend_to_shared_prompts(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *given: Any, **named: Any
    ) -> Any:
        layout = named.pop(LAYOUT, None)
        if layout is None:
            return attend(module, query, key, value, attention_mask, *given, **named)
        return attend_in_blocks(attend, module, query, key, value, layout, named), None

    setattr(attend_to_shared_prompts, LAYOUT, True)
    AttentionInterface.register("sdpa", attend_to_shared_prompts)


def layout_inputs(layout: PromptLayout, ids: Tensor) -> dict[str, Any]:
    """Return the inputs of a forward pass of the row `ids`, int64 [tokens]."""
    # A mask of four dimensions is handed on as it is (transformers 5.23, masking_utils.py); attention builds its own.
    given = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    positions = layout.positions[None]
    return {"input_ids": ids[None], "attention_mask": given, "position_ids": positions, LAYOUT: layout}

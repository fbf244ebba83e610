"""Draws actions: token ids with the log-probabilities with which they were drawn.

Seed, number of the episode and position alone decide a token. It depends neither on the neighbours in a batch nor on
the number of processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from sftplay.deliver.infer.generate import Generator
from sftplay.deliver.infer.sampling import DrawByRow, Sampling


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a model generated after a prompt."""

    prompt: list[int]
    ids: list[int]
    """Its tokens, the end token among them."""

    log_probs: list[float]
    """Of each token, at the temperature of the draw; empty where the likeliest token was taken."""

    is_truncated: bool
    """True where the longest length came before an end token."""

    @property
    def said(self) -> list[int]:
        """The tokens without the end token."""
        return self.ids if self.is_truncated else self.ids[:-1]


@dataclass(frozen=True)
class RecordedSampling(Sampling):
    """Sampling that remembers the log-probability of each token that it draws."""

    log_probs: list[Tensor] = field(default_factory=list)
    """One tensor [rows] a position."""

    def processors(self, rows: Sequence[int]) -> LogitsProcessorList:
        if self.temperature == 0:
            return LogitsProcessorList()
        return LogitsProcessorList([_DrawAndRecord(self, DrawByRow(self.seed, rows))])


class _DrawAndRecord(LogitsProcessor):
    def __init__(self, sampling: RecordedSampling, draw: DrawByRow) -> None:
        self._sampling, self._draw = sampling, draw

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self._sampling.temperature
        drawn = self._draw(input_ids, scores)
        tokens = drawn.argmax(-1, keepdim=True)
        self._sampling.log_probs.append(scores.log_softmax(-1).gather(-1, tokens).squeeze(-1))
        return drawn


def draw_actions(generator: Generator, prompts: Sequence[list[int]], *, rows: Sequence[int]) -> list[Action]:
    """An action for each prompt, drawn as `generator.sampling` says; `rows` are the numbers of the episodes."""
    ids, mask = left_padded(prompts, generator.tokenizer.pad_token_id)
    out = generator.generate(ids, mask, rows=rows)[:, ids.shape[1] :].tolist()
    sampling = generator.sampling
    recorded = sampling.log_probs if isinstance(sampling, RecordedSampling) else []
    log_probs = torch.stack(recorded, 1).tolist() if recorded else [[] for _ in prompts]
    ends = set(generator.all_end_ids)
    actions = []
    for prompt, tokens, probabilities in zip(prompts, out, log_probs, strict=True):
        length = next((n for n, token in enumerate(tokens, 1) if token in ends), 0)
        kept = length or len(tokens)
        actions.append(
            Action(prompt=prompt, ids=tokens[:kept], log_probs=probabilities[:kept], is_truncated=not length)
        )
    return actions


def padded_tokens(actions: Sequence[Action], *, rows: int) -> int:
    """Tokens of the actions behind their prompts, with padding, where `rows` of them are learned from at a time."""
    parts = [actions[at : at + rows] for at in range(0, len(actions), rows)]
    return sum(len(part) * (max(len(a.prompt) for a in part) + max(len(a.ids) for a in part)) for part in parts)


def left_padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and attention mask, int64 [prompts, tokens], with the padding before the tokens."""
    width = max(len(prompt) for prompt in prompts)
    # Lists become a tensor at once: to fill one row by row takes longer than a small model does.
    ids = [[*[pad] * (width - len(prompt)), *prompt] for prompt in prompts]
    mask = [[*[0] * (width - len(prompt)), *[1] * len(prompt)] for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def right_padded(rows: Sequence[Sequence[float]], pad: float, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and mask (fp32), [rows, longest], with the padding behind the values."""
    width = max(len(row) for row in rows)
    values = [[*row, *[pad] * (width - len(row))] for row in rows]
    mask = [[*[1.0] * len(row), *[0.0] * (width - len(row))] for row in rows]
    return torch.tensor(values, dtype=dtype), torch.tensor(mask)

"""Draws actions: token ids with the log-probabilities with which they were drawn.

Seed, number of the episode and position alone decide a token. It depends neither on the neighbours in a batch nor on
the number of processes.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from sftplay.generate.generate import Generator, left_padded
from sftplay.generate.sampling import DrawByRow, Sampling, only


class Action(NamedTuple):
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
    """One tensor [rows, 1] a position."""

    def processors(self, rows: Sequence[int]) -> LogitsProcessorList:
        if self.temperature == 0:
            return LogitsProcessorList()
        return LogitsProcessorList([_DrawAndRecord(self, DrawByRow(self.seed, rows))])


class _DrawAndRecord(LogitsProcessor):
    def __init__(self, sampling: RecordedSampling, draw: DrawByRow) -> None:
        self._sampling, self._draw = sampling, draw

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self._sampling.temperature
        tokens = self._draw.tokens(scores)
        self._sampling.log_probs.append(scores.log_softmax(-1).gather(-1, tokens))
        return only(tokens, scores)


def draw_actions(generator: Generator, prompts: Sequence[list[int]], *, rows: Sequence[int]) -> list[Action]:
    """An action for each prompt, drawn as `generator.sampling` says; `rows` are the numbers of the episodes."""
    ids, mask = left_padded(prompts, generator.tokenizer.pad_token_id)
    out = generator.generate(ids, mask, rows=rows)[:, ids.shape[1] :].tolist()
    sampling = generator.sampling
    recorded = sampling.log_probs if isinstance(sampling, RecordedSampling) else []
    log_probs = torch.cat(recorded, 1).tolist() if recorded else [[] for _ in prompts]
    ends = set(generator.all_end_ids)
    actions = []
    for prompt, tokens, probabilities in zip(prompts, out, log_probs, strict=True):
        kept = up_to_end(tokens, ends)
        ids = tokens[:kept]
        actions.append(Action(prompt=prompt, ids=ids, log_probs=probabilities[:kept], is_truncated=ids[-1] not in ends))
    return actions


def up_to_end(tokens: Sequence[int], ends: Container[int]) -> int:
    """How many tokens there are up to the first end token, which is one of them; all where there is none."""
    for n, token in enumerate(tokens, 1):
        if token in ends:
            return n
    return len(tokens)


def padded_tokens(actions: Sequence[Action], *, rows: int) -> int:
    """Tokens of the actions behind their prompts, with padding, where `rows` of them are learned from at a time."""
    parts = [actions[at : at + rows] for at in range(0, len(actions), rows)]
    return sum(len(part) * (max(len(a.prompt) for a in part) + max(len(a.ids) for a in part)) for part in parts)


def right_padded(rows: Sequence[Sequence[float]], pad: float, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values and mask (fp32), [rows, longest], with the padding behind the values."""
    width = max(len(row) for row in rows)
    values = [[*row, *[pad] * (width - len(row))] for row in rows]
    mask = [[*[1.0] * len(row), *[0.0] * (width - len(row))] for row in rows]
    return torch.tensor(values, dtype=dtype), torch.tensor(mask)

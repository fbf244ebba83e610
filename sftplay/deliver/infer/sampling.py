"""How the next token is chosen: the likeliest one, or one drawn at random. Each row has its own random numbers.

transformers draws for a whole batch from one generator: there an answer depends on its neighbours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token each time. Only `top_p` cuts tokens off."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 42

    def processors(self, rows: Sequence[int]) -> LogitsProcessorList:
        """What transformers puts between scores and choice, for a batch of the rows with these numbers."""
        if self.temperature == 0:
            return LogitsProcessorList()
        steps: list[Any] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_p < 1:
            steps.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList([*steps, DrawByRow(self.seed, rows)])


GREEDY = Sampling()

AHEAD = 32
"""Random numbers of a row that are drawn at a time: a call for each token costs as much as a small model's layer."""


class DrawByRow(LogitsProcessor):
    """Leaves one token per row, drawn by the scores. Seed, row number and position alone decide which one.

    One random number a token is looked up in the summed probabilities (inverse transform sampling), so the greedy
    choice after it takes what was drawn. Numbers are drawn ahead, many of a row at once: they are the same.
    """

    def __init__(self, seed: int, rows: Sequence[int]) -> None:
        self._sources = [torch.Generator().manual_seed(seed_of(seed, row)) for row in rows]
        self._ahead: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores`, float [rows, vocabulary], with all but the drawn token at minus infinity."""
        sums = scores.double().softmax(-1).cumsum(-1)
        if not self._ahead:
            numbers = [torch.rand(AHEAD, generator=source, dtype=torch.float64) for source in self._sources]
            self._ahead = list(torch.stack(numbers, 1).flip(0))
        drawn = self._ahead.pop()
        # Each number is below the last sum, however that is rounded. The first sum above it is never a cut-off token's.
        places = drawn.to(sums.device)[:, None] * sums[:, -1:]
        tokens = torch.searchsorted(sums, places, right=True).clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)


def seed_of(seed: int, row: int) -> int:
    """A seed for one row, independent of the seeds of its neighbours and of neighbouring seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest()) >> 1

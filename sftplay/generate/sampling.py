"""Choose the next token: the likeliest one, or a random sample. Each row has its own random numbers.

transformers samples a whole batch with one generator, so there an answer depends on its neighbours.
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
        """Return the logits processors of transformers, for a batch of the rows with these numbers."""
        if self.temperature == 0:
            return LogitsProcessorList()
        steps: list[Any] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_p < 1:
            steps.append(TopPLogitsWarper(self.top_p))
        return LogitsProcessorList([*steps, SampleByRow(self.seed, rows)])


GREEDY = Sampling()

AHEAD = 32
"""Random numbers of a row in the first batch: a call for each token costs as much as a small model's layer."""


class SampleByRow(LogitsProcessor):
    """Leaves one token per row, sampled by the scores. Seed, row number and position alone decide which one.

    One random number a token is looked up in the summed probabilities (inverse transform sampling), so the greedy
    choice after it takes the sampled token. Numbers are generated ahead, many of a row at once: they are the same.
    """

    def __init__(self, seed: int, rows: Sequence[int]) -> None:
        self._seeds = [derive_seed(seed, row) for row in rows]
        self._n_generated = 0
        self._ahead: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores`, float [rows, vocabulary], with all but the sampled token at minus infinity."""
        return only(self.tokens(scores), scores)

    def tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the next token of each row, int64 [rows, 1]."""
        sums = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
        if not self._ahead:
            # Twice as many numbers as before. All rows share one source, which is seeded again for each of them. This
            # is faster than a source for each row, although the earlier numbers are generated once more.
            source, done = torch.Generator(), self._n_generated
            self._n_generated = 2 * done or AHEAD
            numbers = torch.empty(len(self._seeds), self._n_generated, dtype=torch.float64)
            for row, seed in zip(numbers.unbind(), self._seeds, strict=True):
                row.uniform_(generator=source.manual_seed(seed))
            self._ahead = list(numbers[:, done:, None].to(sums.device).unbind(1))[::-1]
        # Each number is below the last sum, however that is rounded. The first sum above it is never a cut-off token's.
        places = self._ahead.pop() * sums[:, -1:]
        return torch.searchsorted(sums, places, right=True).clamp(max=scores.shape[-1] - 1)


def only(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return scores like `scores` that allow only these tokens, int64 [rows, 1]."""
    return torch.full_like(scores, -torch.inf).scatter_(1, tokens, 0.0)


def derive_seed(seed: int, row: int) -> int:
    """Return a seed for one row, independent of the seeds of its neighbours and of neighbouring seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{row}".encode(), digest_size=8).digest()) >> 1

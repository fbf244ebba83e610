"""A small network that reads token ids: what critic and separate value see of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Tokens(NamedTuple):
    """Texts as int64 [episodes, tokens], padded on the right, and how long each is, int64 [episodes]."""

    ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: Any = "cpu") -> Tokens:
        """Rows of ids, none of them empty. What stands behind a row's end is never looked at."""
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for n, row in enumerate(rows):
            ids[n, : len(row)] = torch.tensor(row)
        return cls(ids.to(device), lengths.to(device))


class TextEncoder(nn.Module):
    """Token ids to one vector a text, by a small recurrent network of its own."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: Tokens) -> Tensor:
        """[episodes, width]: the state after the last token, where the network lies."""
        ids, lengths = (each.to(self.embedding.weight.device) for each in tokens)
        states, _ = self.recurrent(self.embedding(ids))
        last: Tensor = states[torch.arange(len(states), device=states.device), lengths - 1]
        return last

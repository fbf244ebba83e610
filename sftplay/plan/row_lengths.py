"""What is known of the lengths of a run's rows before it starts, and how many tokens a row is planned with."""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """Lengths of the rows to train on, in tokens, after the long ones are cut."""

    longest: int
    mean: float
    count: int


def planned_tokens(cfg: RunConfig, lengths: RowLengths | None) -> int:
    """Tokens of a row of a micro-batch at its fullest.

    A packed row, a micro-batch that is formed by tokens, and a block of documents is filled up to its limit whatever
    the rows are. `cfg.train.packing` is decided; where it is not, rows count as packed.
    """
    limit = cfg.row_tokens
    if lengths is None or cfg.learns_documents or cfg.train.packing is not False or cfg.train.batching == "tokens":
        return limit
    return min(limit, lengths.longest)

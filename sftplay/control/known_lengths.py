"""What is known of a run's rows before its worker prepares them."""

from __future__ import annotations

from sftplay.config.schema.run import RunConfig
from sftplay.data.prepare.known_lengths import read_lengths
from sftplay.plan.memory.row_lengths import RowLengths


def known_lengths(cfg: RunConfig) -> RowLengths | None:
    """Lengths of the rows of a resolved config, where they were prepared before; None where nothing is known.

    Nobody knows how long completions will be, so rows of task modes grpo and score count as full. Puzzles of task
    mode hrm all have the same length.
    """
    if cfg.task_mode in ("grpo", "score", "hrm"):
        return None
    found = read_lengths(cfg)
    return RowLengths(longest=int(found["longest"]), mean=found["mean"], count=int(found["count"])) if found else None

"""Lines of metrics without what may differ between two equal runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TIMED = {
    "tokens_per_s", "padded_tokens_per_s", "samples_per_s", "model_tflops_per_s", "mfu", "step_s", "step_split",
    "communication_max_s", "ranks", "peak_rss_bytes", "ranks_memory", "attempt", "exposed_communication_share",
}  # fmt: skip
"""Fields of a line of metrics that may differ between two equal runs."""


def untimed(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without these fields."""
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Those of the run in `folder`."""
    return untimed(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))

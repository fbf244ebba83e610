"""The completions that a run has kept in samples/: read with care, counted, and some of them chosen to be read.

A file may be missing, broken or huge: what cannot be read is left out, and of a large file only the beginning is looked
at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from sftplay.config.rewards import RewardConfig
from sftplay.report.history import as_number
from sftplay.report.run_files import RunFiles, mapping, mappings, read_objects
from sftplay.reward.table import judges_form

FIRST, LAST = 3, 10
"""Steps at the beginning and at the end that are compared: single steps are noisy."""

MOST_LINES = 4_096
"""Completions of a step that are looked at."""

Line = dict[str, Any]


def sampled_steps(run: RunFiles) -> list[int]:
    """Return the steps whose completions are kept, in order."""
    try:
        names = [path.stem.removeprefix("step-") for path in (run.folder.path / "samples").glob("step-*.jsonl")]
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 16)


def read_samples(run: RunFiles, step: int) -> list[Line]:
    """Return the completions of a step that can be read."""
    return list(read_objects(run.folder.path / "samples" / f"step-{step}.jsonl", most_lines=MOST_LINES))


def content_names(run: RunFiles) -> list[str]:
    """Return the names of the rewards that only a right answer gets in full."""
    names = []
    for entry in mappings(run.value("rewards")):
        with suppress(ValidationError):  # a config that was spoilt by hand
            reward = RewardConfig.model_validate(entry)
            names += [] if judges_form(reward) else [reward.name]
    return names


def pass_share(run: RunFiles, steps: Sequence[int]) -> float | None:
    """Return the share of these steps' completions to which every reward for content gives 1; None: not known."""
    names = content_names(run)
    verdicts = [passes(line, names) for step in steps for line in read_samples(run, step)]
    known = [verdict for verdict in verdicts if verdict is not None]
    return fmean(known) if known else None


def passes(line: Line, names: Sequence[str]) -> bool | None:
    """Return whether each of these rewards gave 1; None where one gave no value, or there is none."""
    values = [as_number(mapping(line.get("rewards")).get(name)) for name in names]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return None if not values or len(known) < len(values) else min(known) >= 1.0

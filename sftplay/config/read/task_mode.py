"""The accepted spelling of a task: `task_mode: dapt` (domain-adaptive pre-training) is `cpt`."""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.config.read.layers import Layer

TASK_SPELLINGS = {"dapt": "cpt"}
"""Accepted word -> the task that it stands for."""


def resolve_task_mode(layers: Sequence[Layer]) -> list[Layer]:
    """The layers with the accepted words replaced by the task's own name."""
    return [
        Layer({**layer.values, "task_mode": TASK_SPELLINGS[word]}, layer.places)
        if isinstance(word := layer.values.get("task_mode"), str) and word in TASK_SPELLINGS
        else layer
        for layer in layers
    ]

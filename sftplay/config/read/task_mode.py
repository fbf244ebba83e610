"""What a task's word alone decides: `dapt` (domain-adaptive pre-training) is `cpt`, and `hrm` names its own model."""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.config.read.layers import Layer, nested

TASK_SPELLINGS = {"dapt": "cpt"}
"""Accepted word -> the task that it stands for."""

NO_PRETRAINED = "builtin:hrm"
"""model.name in task mode hrm: the model is made of the section hrm, from nothing."""


def resolve_task_mode(layers: Sequence[Layer]) -> list[Layer]:
    """The layers with the accepted words replaced by the task's own name."""
    return [
        Layer({**layer.values, "task_mode": TASK_SPELLINGS[word]}, layer.places)
        if isinstance(word := layer.values.get("task_mode"), str) and word in TASK_SPELLINGS
        else layer
        for layer in layers
    ]


def with_own_model(layers: Sequence[Layer]) -> list[Layer]:
    """The layers, above one that says what task mode hrm has in place of a pretrained model."""
    words = [layer.values["task_mode"] for layer in layers if "task_mode" in layer.values]
    if words[-1:] != ["hrm"]:
        return list(layers)
    return [Layer(nested("model.name", NO_PRETRAINED) | nested("tuning.mode", "full")), *layers]

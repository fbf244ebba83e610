"""What an adapter makes of the experts of a mixture, before any weight is there."""

from __future__ import annotations

from sftplay.config.run import RunConfig
from sftplay.plan.shape import ModelShape
from sftplay.units import format_count

ADAPTED_MIXTURES = frozenset({"mixtral", "olmoe", "qwen3_moe", "glm4_moe"})
"""Families whose experts PEFT 0.21 adapts unasked (peft/utils/transformers_weight_conversion.py)."""


def adapted_experts(cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
    """Return a note on what an adapter makes of experts, which are no linear layers; none for a dense model."""
    lora = cfg.tuning.lora
    if shape is None or not shape.experts or cfg.tuning.mode == "full" or lora.target_modules != "auto":
        return ()
    if shape.family not in ADAPTED_MIXTURES:
        return ("the experts of this model train nothing: the adapter is on its other layers only",)
    # Gate and up together have twice the rank, since they were two layers once; and the router is one layer.
    of_expert = 2 * (shape.hidden + 2 * shape.mlp) + shape.mlp + shape.hidden
    weights = lora.r * shape.layers * (shape.experts * of_expert + shape.hidden + shape.experts)
    planned = "which the planned memory leaves out"
    return (f"PEFT adapts the experts and the router too: {format_count(weights)} weights train there, {planned}",)

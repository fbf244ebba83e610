"""What an adapter makes of the experts of a mixture, before any weight is there."""

from __future__ import annotations

from sftplay.config.run import RunConfig
from sftplay.plan.shape import ModelShape

ADAPTED_MIXTURES = frozenset({
    "afmoe", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe",
    "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "minimax",
    "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "solar_open",
})  # fmt: skip
EXPERT_NAMES = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Families whose experts PEFT 0.21 adapts, and the names of layers that it takes for theirs
(peft/utils/transformers_weight_conversion.py)."""


def describe_adapted(cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
    """Return a note on what an adapter makes of experts, which are no linear layers; none for a dense model."""
    if shape is None or not shape.experts or cfg.tuning.mode == "full":
        return ()
    names = cfg.tuning.lora.target_modules
    if names == "auto" or shape.family not in ADAPTED_MIXTURES or not EXPERT_NAMES & set(names):
        left = any(one.is_left_out for kind in shape.kinds for one in kind.linears) and names == "auto"
        more = ", nor does an MLP next to them, whose layers PEFT takes for theirs" if left else ""
        return (f"the experts of this model train nothing{more}: the adapter is on its other layers only",)
    return ("PEFT adapts the experts too, as target_modules names their layers; the planned memory leaves that out",)

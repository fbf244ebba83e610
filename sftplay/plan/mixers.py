"""What stands in the place of attention or of the MLP in a layer, a gated delta rule or experts: memory, and adapters.

Memory as transformers 5.23 writes both out where no kernel of another package is installed; the kit installs none."""

from __future__ import annotations

from sftplay.config.run import RunConfig
from sftplay.plan.memory_setup import MemorySetup
from sftplay.plan.shape import ModelShape

FP32 = 4
CHUNK = 64  # tokens that the delta rule computes at once (`torch_chunk_gated_delta_rule`)


def mixer_kept(shape: ModelShape, setup: MemorySetup, *, inner: int) -> float:
    """Count the bytes a token that a gated delta rule keeps between the projections into it and out of it."""
    rule = shape.mixer
    assert rule
    keys, values = rule.heads * rule.key_dim, rule.heads * rule.value_dim  # keys repeated to the heads of values
    scores = CHUNK * rule.heads
    state = rule.heads * rule.key_dim * rule.value_dim / CHUNK
    convolved = 2 * rule.key_heads * rule.key_dim + values
    # The convolution's input, and what its activation reads. Of the norm at the end: its input, the gate and what the
    # gate's activation wrote, all fp32, and the normed answers.
    kept: float = 2 * convolved * inner + 3 * FP32 * values + inner * values
    if setup.has_autocast:
        # fp32: queries and keys before and after their norm, keys times beta, and what the system's solution is; next
        # to them the rounded copies that the products keep.
        kept += FP32 * (6 * keys + 2 * values + 2 * scores + state)
        kept += setup.compute_bytes * (7 * keys + 2 * values + 3 * scores + 2 * state)
    else:
        kept += FP32 * (8 * keys + 3 * values + 5 * scores + state)
    return kept


def mixer_work(shape: ModelShape) -> float:
    """Count the bytes a token that the rule's backward adds to what it kept."""
    rule = shape.mixer
    assert rule
    keys, values = rule.heads * rule.key_dim, rule.heads * rule.value_dim
    return FP32 * (3 * keys + 2 * values + CHUNK * rule.heads)


def experts_kept(shape: ModelShape, setup: MemorySetup, *, inner: int) -> float:
    """Count the bytes a token that the experts of a layer keep, each token's rows sorted by expert."""
    routed = shape.routed
    assert routed
    # What comes from the first product, what the activation wrote, and each expert's answer; GPT-OSS clamps both halves
    # and writes its activation out.
    per_row = (6 if shape.family == "gpt_oss" else 3) * routed.width + shape.hidden
    if setup.trains_all:
        per_row += shape.hidden + routed.width
    shared = shape.hidden * inner if any(one.name == "shared_expert_gate" for one in shape.linears) else 0
    indexes = 3 * 8 * routed.chosen
    return inner * routed.chosen * per_row + shared + indexes + 3 * FP32 * shape.experts


def experts_work(shape: ModelShape, *, inner: int) -> float:
    """Count the bytes a token that the experts add where their answers are summed, or that is differentiated."""
    routed = shape.routed
    assert routed
    return inner * (4 if shape.family == "gpt_oss" else 2) * routed.chosen * shape.hidden


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

"""The three phases of a GRPO step: answers are written, scored without gradients, and learned from.

Only one phase runs at a time, so the peak is the largest of them. What an inference engine beside the trainer (vLLM)
takes is its own share of the card and not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass

from sftplay.plan.memory.execution import Execution
from sftplay.plan.memory.head import head_in_forward
from sftplay.plan.memory.layer import inner_bytes, layer_bytes
from sftplay.plan.memory.step import WORKSPACE_BYTES, Footprint, Size, estimate, standing_bytes
from sftplay.plan.shape.model_shape import ModelShape

LIVE_LAYERS = 2
"""Layers whose tensors exist at a time in a forward pass without gradients: one at work, and the one it reads."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """How many answers a device writes at a time, and how long they may be."""

    answers: int
    """Per device: micro-batch times generation steps; the answers to one prompt count one each."""

    prompt_tokens: int
    answer_tokens: int
    learned_at_a_time: int
    """Answers in a micro-batch of the update."""

    has_reference: bool = False
    """True where the loss compares with frozen weights (beta > 0) and no adapter can be switched off for them."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens


def cache_bytes(shape: ModelShape, execution: Execution, *, rollout: Rollout) -> int:
    """Keys and values of all layers for every answer at its longest; a sliding window keeps no more than itself."""
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * inner_bytes(shape, execution)
    return rollout.answers * rollout.tokens * per_token


def estimate_grpo(shape: ModelShape, execution: Execution, *, rollout: Rollout) -> Footprint:
    """Bytes of every phase of one GRPO step on one device that holds the whole model, in the steady state."""
    standing = standing_bytes(shape, execution)
    reference = standing.weights if rollout.has_reference and execution.trains_all else 0.0
    resident = {
        "weights": standing.weights,
        "adapters": standing.adapters,
        "optimizer": standing.optimizer,
        "reference": reference,
        "workspace": float(WORKSPACE_BYTES),
    }
    learned = Size(rows=rollout.learned_at_a_time, seq=rollout.tokens, accumulates=True)
    one = layer_bytes(shape, execution, tokens=learned.tokens, seq=learned.seq)
    scores = (
        rollout.answers * shape.vocab * (execution.logits_bytes + 4)
    )  # of the newest token, and in fp32 to draw from
    generate = {
        **resident,
        "key-value cache": float(cache_bytes(shape, execution, rollout=rollout)),
        "head": float(scores),
    }
    score = {
        **resident,
        "layer": LIVE_LAYERS * one.kept,
        "head": head_in_forward(shape, execution, tokens=learned.tokens, labelled=learned.rows * rollout.answer_tokens),
    }
    update = {
        name: {**parts, "reference": reference}
        for name, parts in estimate(shape, execution, size=learned).phases.items()
    }
    return Footprint({"generate": generate, "score": score, **update})

"""A language model's shape: the counts from which every byte of a plan follows. It reads no file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One projection inside a layer, as transformers names it."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    is_mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Everything a plan needs to know about a decoder; all counts are in parameters or positions, never bytes."""

    name: str
    family: str  # the text model's `model_type` in config.json
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # width between the up and the down projection
    vocab: int
    max_positions: int | None
    tied: bool  # True when the head shares the embedding's weight
    gated_mlp: bool
    # Of one layer; all layers are alike. What 4-bit quantises and `target_modules: auto` adapts.
    linears: tuple[Linear, ...]
    # Of one layer besides the weights of `linears`: norms, biases, and the experts of a mixture.
    layer_other_params: int
    other_params: int  # outside the layers: embeddings, learned positions, final norm, and the head when it is not tied
    norm: Literal["rms", "layer"]
    norms_per_layer: int  # norms over `hidden` in a layer; those over queries and keys are not counted
    qk_norm: bool
    activation: str
    parallel_block: bool  # True when attention and MLP are added to the same residual at once
    softcap_final: bool
    softcap_attn: bool
    sliding_window: int | None
    layer_pattern: int  # layers after which the kinds of attention repeat: 1 when all are alike
    experts: int  # experts of a mixture in a layer; 0 for a dense model
    vision_params: int  # what loading the multimodal class adds: the vision tower and its projector
    unmodelled: tuple[str, ...]  # what this model has that a plan does not account for, in words; empty for most

    @property
    def linear_params(self) -> int:
        """Weights of all layers' linears, without their biases."""
        return self.layers * sum(linear.inputs * linear.outputs for linear in self.linears)

    @property
    def total_params(self) -> int:
        """All parameters of the text model, a tied head counted once; equals what a safetensors index sums to."""
        return self.linear_params + self.layers * self.layer_other_params + self.other_params

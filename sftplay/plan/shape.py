"""A language model's shape: the counts from which every byte of a plan follows; a family's habits of naming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Linear:
    """One projection inside a layer, as transformers names it."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    is_mlp: bool = False
    is_left_out: bool = False  # True where `target_modules: auto` leaves it out (`model.adapter.names_of_experts`)


@dataclass(frozen=True, kw_only=True)
class DeltaRule:
    """Sizes of a gated delta rule (Qwen3-Next, Qwen3.5), which stands in the place of attention in a layer."""

    key_heads: int
    heads: int  # of values; keys are repeated to as many
    key_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The experts of a layer; each token takes some. They are parameters of their own, and no linears."""

    chosen: int  # experts of a token
    width: int  # between an expert's up and down projection
    params: int  # weights of all experts of the layer


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
    mixer: DeltaRule | None = None  # in the place of attention
    routed: Routed | None = None
    gated_attention: bool = False  # True when a sigmoid of as many numbers as there are queries scales their answers
    state_leaks: bool = False  # True when layers carry a state along the row, from one packed row into the next
    linears_outside: tuple[Linear, ...] = ()  # linears outside the layers other than the head; not in `other_params`
    adds_router_loss: bool = False  # True when config.json asks for it: only whole scores come with it
    head_outputs: int | None = None  # numbers that the head gives for a token; None: one for each word
    starts_at: int = 0  # of a kind: the place of its first layer
    # The kinds of layers, each with its count, where not all are alike. What is said of one layer is then that of the
    # most frequent kind.
    parts: tuple[ModelShape, ...] = ()

    @property
    def kinds(self) -> tuple[ModelShape, ...]:
        """The kinds of layers, each of so many `layers`; the shape itself where all are alike."""
        return self.parts or (self,)

    @property
    def head_params(self) -> int:
        """Weights of the head, which a tied one shares with the embedding."""
        return self.hidden * (self.head_outputs or self.vocab)

    def with_score_head(self) -> ModelShape:
        """Return the shape with a new head of one score in the place of its own."""
        old = 0 if self.tied else self.head_params
        return replace(self, tied=False, head_outputs=1, other_params=self.other_params - old + self.hidden)

    @property
    def linear_params(self) -> int:
        """Weights of all linears but the head, without their biases."""
        outside = sum(one.inputs * one.outputs for one in self.linears_outside)
        inside = sum(kind.layers * sum(one.inputs * one.outputs for one in kind.linears) for kind in self.kinds)
        return inside + outside

    @property
    def total_params(self) -> int:
        """All parameters of the text model, a tied head counted once; equals what a safetensors index sums to."""
        return self.linear_params + sum(k.layers * k.layer_other_params for k in self.kinds) + self.other_params

    @property
    def product_params(self) -> int:
        """Weights of the layers that a token is multiplied with: those of linears and of the experts it takes."""
        routed = sum(k.layers * k.routed.params * k.routed.chosen // k.experts for k in self.kinds if k.routed)
        return self.linear_params + routed


def shortest_repeat(kinds: Sequence[object]) -> int:
    """Return the length of the shortest stretch that repeats itself to the end."""
    return next(n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i - n] for i in range(n, len(kinds))))


Flag = bool | str  # true, False, or the config.json key that decides


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the config.json of a family leaves unsaid. The defaults describe a Llama."""

    keys: Mapping[str, str] = field(default_factory=dict)  # word of `KEYS` -> this family's spelling, where it differs
    # Key -> what transformers also reads and writes it as (`attribute_map` of its configuration class).
    also: Mapping[str, str] = field(default_factory=dict)
    # Values of keys that published files of the family leave out: its configuration class has them.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Four names, or two when queries, keys and values come from one projection.
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    # Three names, or two: then the first one is gate and up together if `gated`, else up alone.
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    gated: bool = True
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: bool = False
    tied: bool = False  # whether the head shares the embedding when config.json does not say
    norm: Literal["rms", "layer"] = "rms"
    norm_vectors: int = 1  # trained vectors of a norm: 0, 1 (weight) or 2 (and bias)
    norms: int = 2
    norms_when_parallel: int | None = None  # norms in a layer whose attention and MLP are parallel; None means `norms`
    embedding_norm: bool = False
    qk_norm: Flag = False
    qk_norm_of: Literal["head", "width"] = "head"  # A norm's length: one head shared by all, or all heads side by side
    qk_norm_vectors: int = 1
    parallel: Flag = False
    position_rows: int | None = None  # None without learned positions, else the rows beyond `max_positions`
    mlp_is_four_hidden: bool = False  # True when a missing width of the MLP means four times `hidden`
    mlp_divisor: int = 1  # what the config's width is divided by: a legacy Qwen writes gate and up together
    expert_biases: bool = False  # biases of experts and router, and a learned sink for each head: GPT-OSS
    pattern: int = 1  # layers after which kinds of attention repeat, when config.json does not say

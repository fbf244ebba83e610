"""Steps that are traced: models of thirteen families, the settings of a step, and the groups that tests compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, Literal

Precision = Literal["fp32", "bf16", "fp16"]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
GEMMA = LLAMA | {"hidden_activation": "gelu_pytorch_tanh", "head_dim": 64, "tie_word_embeddings": True}
NEOX = LLAMA | {"intermediate_size": 4096, "hidden_act": "gelu", "partial_rotary_factor": 0.25}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"model_type": "mistral", "intermediate_size": 3584},
    "qwen2": LLAMA | {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True},
    "qwen3": LLAMA | {"model_type": "qwen3", "head_dim": 128},
    "gemma2": GEMMA | {"model_type": "gemma2", "final_logit_softcapping": 30.0, "sliding_window": 4096},
    "gemma3": GEMMA | {"model_type": "gemma3_text", "sliding_window": 4096, "num_hidden_layers": 6},
    "phi3": LLAMA | {"model_type": "phi3", "num_key_value_heads": 16, "pad_token_id": 0},
    "phi": NEOX | {"model_type": "phi", "num_key_value_heads": 16, "hidden_act": "gelu_new"},
    "gpt_neox": NEOX | {"model_type": "gpt_neox", "num_key_value_heads": 16},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 4,
        "n_positions": 2048,
        "vocab_size": 50_257,
    },
    "olmo2": LLAMA | {"model_type": "olmo2", "pad_token_id": 0},
    "granite": LLAMA | {"model_type": "granite", "tie_word_embeddings": True},
    "smollm3": LLAMA | {"model_type": "smollm3", "pad_token_id": 0, "no_rope_layers": [1, 1, 1, 0]},
}

DELTA = {f"linear_num_{of}_heads": n for of, n in (("key", 8), ("value", 16))} | {
    f"linear_{of}_head_dim": 64 for of in ("key", "value")
}
ATTENDS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
EXPERTS = {"moe_intermediate_size": 512, "num_experts_per_tok": 4}
GEMMA4 = GEMMA | {"model_type": "gemma4_text", "num_hidden_layers": 6, "sliding_window": 4096, "global_head_dim": 128}
LAYERED: dict[str, tuple[dict[str, Any], tuple[Literal["full", "lora", "qlora"], ...]]] = {
    "ministral3": (LLAMA | {"model_type": "ministral3", "head_dim": 128}, ("lora",)),
    "qwen3_5": (LLAMA | ATTENDS | DELTA | {"model_type": "qwen3_5_text"}, ("full", "lora", "qlora")),
    "gemma4": (GEMMA4 | {"hidden_size_per_layer_input": 0}, ("full", "lora", "qlora")),
    "gemma4_ple": (GEMMA4 | {"hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 2048}, ("lora",)),
    "glm4_moe": (
        LLAMA | EXPERTS | {"model_type": "glm4_moe", "head_dim": 64, "n_routed_experts": 16},
        ("lora",),
    ),
    "gpt_oss": (
        LLAMA | {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 64,
                 "intermediate_size": 512, "sliding_window": 4096},
        ("lora",),
    ),
    "qwen3_5_moe": (
        LLAMA | ATTENDS | DELTA | EXPERTS | {"model_type": "qwen3_5_moe_text", "num_experts": 16,
                                            "shared_expert_intermediate_size": 512},
        ("lora",),
    ),
}  # fmt: skip
"""Families whose layers are of several kinds or have experts (and Ministral 3), with the methods that are traced:
fake tensors have no product of groups in fp32, which a mixture that trains in full takes."""


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """What decides the memory of a step beside the model."""

    method: Literal["full", "lora", "qlora"]
    layers: int | None = None
    """Depth; None is the model's own."""

    batch: int = 1
    seq: int = 2048
    """Tokens in each of the `batch` rows."""

    labels_share: float = 1.0
    """Part of the tokens that carry a label."""

    r: int = 32
    targets: tuple[str, ...] | None = None
    """Names of the adapted layers; None is every matrix inside the layers."""

    new_rows: int = 0
    """Rows of new tokens that train beside the adapter."""

    dropout: float = 0.0
    base: Precision | None = None
    """Of weights that are not quantised; None is fp32 where everything trains, else bf16."""

    adapter: Precision = "fp32"
    autocast: Precision = "bf16"
    """The precision of products; fp32 is no autocast."""

    checkpointing: bool = True
    head: Literal["standard", "plain", "chunked"] = "standard"
    """standard: scores only where a label waits (label_head); plain: scores of all tokens; chunked: chunked_head."""

    optimizer: Literal["adamw_fused", "adamw", "none"] = "adamw_fused"
    micro_batches: int = 1
    """Of the step; from the second on all gradients exist while one is computed."""

    padded: bool = False
    """Rows of unlike length: attention needs a mask."""

    fp32_output: bool = True
    """Under autocast, 16-bit outputs become fp32: accelerate does it, a loop of one's own does not."""

    keeps_output: bool = False
    """The model's output, logits and all, lives until backward has ended, as in a loop that holds on to it."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    double_quant: bool = True
    kbit_prepared: bool = False
    """PEFT's prepare_model_for_kbit_training has run; the kit does not call it."""


@dataclass(frozen=True)
class Case:
    """One step of one model; `vocab` replaces the size of the model's vocabulary."""

    family: str
    settings: TraceSettings
    vocab: int | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The content of the model's config.json."""
        config = FAMILIES[self.family] if self.family in FAMILIES else LAYERED[self.family][0]
        return config | ({"vocab_size": self.vocab} if self.vocab else {})

    @property
    def key(self) -> str:
        """Names the case in the record: the family, and what differs from the defaults."""
        changed = {
            each.name: value
            for each in fields(TraceSettings)
            if (value := getattr(self.settings, each.name)) != each.default
        }
        words = {"vocab": self.vocab, **changed} if self.vocab else changed
        return " ".join([self.family, *(f"{name}={value}" for name, value in words.items())])


METHODS = ("full", "lora", "qlora")
RECORDED_FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox")
SMALL_VOCAB = 2048
"""So few scores that the layers, and not the head, decide the peak."""

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
VARIANTS: dict[str, dict[str, Any]] = {
    "chunked": {"head": "chunked"},
    "chunked in two micro-batches": {"head": "chunked", "micro_batches": 2},
    "a quarter labelled": {"labels_share": 0.25},
    "two micro-batches": {"micro_batches": 2},
    "padded": {"padded": True},
    "foreach": {"optimizer": "adamw"},
    "dropout": {"dropout": 0.1},
    "16-bit adapter": {"adapter": "bf16"},
    "fp32 without autocast": {"autocast": "fp32", "base": "fp32"},
    "attention only": {"targets": QKVO},
    "output kept": {"keeps_output": True, "fp32_output": False},
    "scales not quantised": {"double_quant": False},
    "rows of new tokens": {"new_rows": 50},
    "rows of new tokens, chunked": {"new_rows": 50, "head": "chunked"},
}
ADAPTER_VARIANTS = (
    "dropout", "16-bit adapter", "attention only", "rows of new tokens", "rows of new tokens, chunked"
)  # fmt: skip

CHECKPOINTED = {"checkpointing": True}
FULL = {"method": "full", "batch": 1}
EAGER = {"attention": "eager", "batch": 1, "seq": 2048}
PREPARED = {"method": "qlora", "kbit_prepared": True, "autocast": "fp32", "fp32_output": False}
"""In 4 bits as PEFT prepares it, without autocast: whatever is not in 4 bits is fp32."""

TERMS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "the MLP's kept tensors": (2048, {}),
    "the norms' fp32 inputs": (2048, {}),
    "attention's kept tensors": (2048, {}),
    "the copy that each pair keeps of its input": (2048, {}),
    "what the activation keeps": (2048, {}),
    "the scores": (None, {}),
    "the layers' inputs under checkpointing": (4096, CHECKPOINTED | {"layers": 16, "r": 1}),
    "16-bit copies of what trains in fp32": (2048, {"method": "full", "seq": 64}),
    "16-bit copy of the head": (None, FULL | {"layers": 2}),
    "the layers' rounded weights": (2048, FULL | CHECKPOINTED | {"seq": 64}),
    "a 4-bit weight unpacked": (
        512, CHECKPOINTED | {"method": "qlora", "batch": 1, "seq": 64, "layers": 2, "r": 1}
    ),
    "the MLP's working set": (2048, CHECKPOINTED),
    "a frozen MLP's working set": (2048, CHECKPOINTED | {"targets": QKVO}),
    "the scores that the caller keeps": (
        8192, CHECKPOINTED | {"head": "plain", "keeps_output": True, "fp32_output": False, "layers": 2, "r": 1}
    ),
    "eager attention's working set": (2048, CHECKPOINTED | EAGER),
    "eager attention's working set in fp32": (2048, CHECKPOINTED | EAGER | PREPARED),
}  # fmt: skip
"""Term of the closed form -> vocabulary and settings of a step of a Llama in which it is large."""

SHALLOW_CHUNKS = Case(
    "llama", TraceSettings(method="lora", layers=1, r=1, batch=4, seq=1024, checkpointing=True, head="chunked"), 512
)
"""A step in which a fifth of what lives in the head is what a loss in chunks keeps between them."""


def attention_of(family: str) -> Literal["sdpa", "eager"]:
    """What `model.attn: auto` means for the family: Gemma 2 caps the scores of its attention, and GPT-OSS has a sink
    beside them; sdpa does neither."""
    return "eager" if family in ("gemma2", "gpt_oss") else "sdpa"


def cases_by_depth(family: str, method: Any) -> Iterator[Case]:
    """Two depths and two lengths; checkpointing at the smaller depth."""
    for layers, tokens in ((2, 512), (4, 1024)):
        how = TraceSettings(
            method=method, layers=layers, batch=2, seq=tokens, checkpointing=layers == 2, attention=attention_of(family)
        )
        yield Case(family, how)


def cases_with_few_scores(family: str, method: Any) -> Iterator[Case]:
    """Steps whose peak a layer decides."""
    for checkpointing in (True, False):
        how = TraceSettings(
            method=method, layers=4, batch=2, seq=1024, checkpointing=checkpointing, attention=attention_of(family)
        )
        yield Case(family, how, SMALL_VOCAB)


def cases_of_layers(family: str) -> Iterator[Case]:
    """Steps whose peak the head decides, and a layer, with checkpointing and without."""
    config, methods = LAYERED[family]
    for method, vocab, checkpointing in product(methods, (SMALL_VOCAB, None), (True, False)):
        how = TraceSettings(
            method=method, layers=config["num_hidden_layers"], batch=2, seq=1024, checkpointing=checkpointing,
            attention=attention_of(family),
        )  # fmt: skip
        yield Case(family, how, vocab)


def cases_of_variant(name: str, method: Any) -> Iterator[Case]:
    """A Llama's step by one of `VARIANTS`; none where the method has no such variant."""
    if method == "full" and name in ADAPTER_VARIANTS:
        return
    if method == "qlora" and name == "fp32 without autocast":  # bitsandbytes' layer computes in 16 bits
        return
    for checkpointing in (True, False):
        more = {"checkpointing": checkpointing, **VARIANTS[name]}
        yield Case("llama", TraceSettings(method=method, layers=4, batch=2, seq=1024, **more))


def case_of_term(term: str) -> Case:
    """The step of `TERMS` in which `term` is large."""
    vocab, more = TERMS[term]
    usual: dict[str, Any] = {"method": "lora", "layers": 4, "batch": 2, "seq": 1024, "checkpointing": False}
    return Case("llama", TraceSettings(**(usual | more)), vocab)


def recorded_cases() -> list[Case]:
    """Every case whose trace is recorded, each once."""
    grid = list(product(RECORDED_FAMILIES, METHODS))
    found = [
        *(case for family, method in grid for case in cases_by_depth(family, method)),
        *(case for family, method in grid for case in cases_with_few_scores(family, method)),
        *(case for name, method in product(VARIANTS, METHODS) for case in cases_of_variant(name, method)),
        *map(case_of_term, TERMS),
        SHALLOW_CHUNKS,
        *(case for family in LAYERED for case in cases_of_layers(family)),
    ]
    return list({case.key: case for case in found}.values())

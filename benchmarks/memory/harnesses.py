"""What public measuring scripts do beyond what a row of their tables says, each fact with its public source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Harness:
    """What a public measuring script does beyond what a row's columns say."""

    source: str
    targets: tuple[str, ...] | None = None
    """Linears with an adapter; None is all of them."""

    has_autocast: bool = True
    qlora_autocast: bool = True
    qlora_stream_bytes: tuple[int, ...] = (2,)
    """4 where PEFT's k-bit preparation made the norms, and with them the residual stream, fp32. Two values: the
    harness's table holds both paths, which its columns do not tell apart; the first is the one without its own code."""

    qlora_other_bytes: int = 2
    """Of embedding and head beside 4-bit weights: 4 where that preparation reached them too."""

    full_bytes: int = 2
    """Of a weight where everything trains."""

    double_quant: bool = True
    reentrant: tuple[str, ...] = ()
    """Methods whose checkpoints are reentrant, which matters around frozen layers under torch's first FSDP."""

    counts_process: bool = False
    """True where the figure is the whole process's, as nvidia-smi shows it, not the allocator's."""

    counts_all_gpus: bool = False
    """True where the figures of all GPUs are added up."""

    has_dropout: bool = False
    holds_scores: bool = False
    shifts_scores: bool = False
    repeats_kv: bool = False


HARNESSES: Mapping[str, Harness] = {
    # Weights in fp16 and no autocast; `labels=batch`, the output kept until backward has ended; AdamW without fused;
    # adapters on q, k, v, o; 4-bit bases through prepare_model_for_kbit_training, which makes every other weight fp32;
    # keys and values copied out to the heads (build_model, measure, _install_gqa_sdpa_shim). Where everything trains,
    # weights become fp32 first (build_optimizer).
    "fitcheck": Harness(
        source="github.com/Anassbzdd/fitcheck scripts/measure.py",
        targets=QKVO,
        has_autocast=False,
        qlora_autocast=False,
        qlora_stream_bytes=(4,),
        qlora_other_bytes=4,
        full_bytes=4,
        double_quant=False,
        holds_scores=True,
        repeats_kv=True,
    ),
    # torch_dtype float16, with autocast (fp16) for 4 bits only; q, k, v, o; dropout 0.1 (scenarios.yaml). Double
    # quantisation; TRL prepares the baseline on one device, and not the accelerated path (framework_plugin_bnb.py).
    # transformers of that time (4.45) copies the scores to shift them. The size after loading that the same table gives
    # leaves room for fp32 norms only, not for fp32 embeddings. Two GPUs: FSDP in its first version, FULL_SHARD, layers
    # and adapters apart (accelerate.yaml); transformers' checkpoints were reentrant then (4.45, modeling_utils.py,
    # gradient_checkpointing_enable).
    "fms": Harness(
        source="github.com/foundation-model-stack/fms-acceleration scripts/benchmarks/scenarios.yaml, "
        "plugins/accelerated-peft/src/fms_acceleration_peft/framework_plugin_bnb.py",
        targets=QKVO,
        has_autocast=False,
        qlora_stream_bytes=(4, 2),
        reentrant=("LoRA", "QLoRA"),
        has_dropout=True,
        shifts_scores=True,
    ),
    # bfloat16, use_amp false, the output kept in the loop (run.py, default_training_params.json); adapters where PEFT
    # puts them on a Llama by itself, q and v, except in experiments that say otherwise (`PEFT_TARGETS`).
    "peft-bench": Harness(
        source="github.com/huggingface/peft method_comparison/MetaMathQA",
        targets=("q_proj", "v_proj"),
        has_autocast=False,
        qlora_autocast=False,
        holds_scores=True,
    ),
    # All linears, dropout 0.1, double quantisation, bf16; `use_reentrant` True for 4 bits only (run_peft_qlora_fsdp.sh,
    # run_peft_fsdp.sh). "Memory consumed per GPU" is a device's, not the allocator's (docs/source/accelerate).
    "peft-docs": Harness(
        source="github.com/huggingface/peft examples/sft",
        reentrant=("QLoRA",),
        counts_process=True,
        has_dropout=True,
    ),
    # "(2 GPUs)" beside sums that no single card holds.
    "qwen-2023": Harness(source="github.com/QwenLM/Qwen README", counts_all_gpus=True),
}

GENERIC = Harness(source="transformers' Trainer with PEFT as they come: 16-bit base, autocast, all linears adapted")

PEFT_TARGETS: Mapping[int, tuple[str, ...] | None] = {
    # experiments/lora/llama-3.2-3B-rank10-target-mlp and -rank16-all-linear
    10: ("gate_proj", "up_proj", "down_proj"),
    16: None,
}

NAMES = {
    "qwen-1.8b": "Qwen/Qwen-1_8B",
    "qwen-1_8b-chat": "Qwen/Qwen-1_8B",
    "qwen-7b-chat": "Qwen/Qwen-7B",
    "qwen-14b-chat": "Qwen/Qwen-14B",
    "qwen-72b-chat": "Qwen/Qwen-72B",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
}
"""Spellings of the sources -> names on the hub."""

"""Reads a user's DeepSpeed file. Refuses, with line numbers, keys that DeepSpeed 0.19 would ignore or reject late.

The file is JSON with `//` and `/* */` comments. The table below follows `deepspeed/runtime/config.py` and
`zero/config.py`. Values are left to DeepSpeed, apart from those that the run's config sets too."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sftplay.config.layers import check_small_file
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, ConfigErrors, nearest_names

ZERO = "zero_optimization"

SECTIONS: dict[str, str] = {
    "": (
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
        "steps_per_print dump_state disable_python_gc disable_allgather communication_data_type "
        "seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor gradient_allreduce_op "
        "zero_optimization activation_checkpointing comms_logger tensorboard csv_monitor wandb comet gradient_clipping "
        "fp16 bf16 torch_autocast optimizer scheduler zero_allow_untested_optimizer zero_force_ds_cpu_optimizer "
        "flops_profiler wall_clock_breakdown memory_breakdown autotuning use_data_before_expert_parallelism "
        "hybrid_engine pipeline data_efficiency checkpoint data_types aio dataloader_drop_last log_level "
        "weight_quantization compile timers tensor_parallel expert_parallel vocabulary_size"
    ),
    ZERO: (
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
        "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights "
        "elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size stage3_prefetch_bucket_size "
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients parameter_alignment zero_hpz_partition_size zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory leaf_module"
    ),
    f"{ZERO}.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    f"{ZERO}.offload_optimizer": (
        "device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload "
        "cpuadam_cores_perc"
    ),
    "fp16": (
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
        "min_loss_scale fp16_master_weights_and_grads"
    ),
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "activation_checkpointing": (
        "partition_activations contiguous_memory_optimization cpu_checkpointing number_checkpoints "
        "synchronize_checkpoint_boundary profile"
    ),
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
}
"""Section -> the names that DeepSpeed reads in it. The content of other sections is not checked."""

OUTDATED = {
    "bfloat16": "bf16",
    "max_grad_norm": "gradient_clipping",
    "fp32_allreduce": 'communication_data_type: "fp32"',
    "allgather_size": f"{ZERO}.allgather_bucket_size",
    f"{ZERO}.cpu_offload": f'{ZERO}.offload_optimizer: {{"device": "cpu"}}',
    f"{ZERO}.cpu_offload_param": f'{ZERO}.offload_param: {{"device": "cpu"}}',
    f"{ZERO}.cpu_offload_params": f'{ZERO}.offload_param: {{"device": "cpu"}}',
    f"{ZERO}.cpu_offload_use_pin_memory": "pin_memory in offload_optimizer or offload_param",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{ZERO}.prefetch_bucket_size": f"{ZERO}.stage3_prefetch_bucket_size",
    f"{ZERO}.param_persistence_threshold": f"{ZERO}.stage3_param_persistence_threshold",
    f"{ZERO}.max_live_parameters": f"{ZERO}.stage3_max_live_parameters",
    f"{ZERO}.max_reuse_distance": f"{ZERO}.stage3_max_reuse_distance",
    "fp16.dynamic_loss_scale": "fp16.loss_scale: 0, which is dynamic",
    "fp16.static_loss_scale": "fp16.loss_scale",
    "fp16.init_scale_power": "fp16.initial_scale_power",
    "fp16.scale_window": "fp16.loss_scale_window",
    "fp16.min_scale": "fp16.min_loss_scale",
    "fp16.opt_level": "fp16.auto_cast",
    "bf16.check_overflow": "bf16.check_grad_overflow",
}
"""Names of earlier releases, and common mistakes -> the present name."""

REMOVED = (
    "nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue", "sparse_attention",
    "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop", f"{ZERO}.mics_shard_size",
    f"{ZERO}.mics_hierarchical_params_gather", f"{ZERO}.zeropp_loco_param",
)  # fmt: skip
"""Names that DeepSpeed 0.19 no longer has and refuses."""

AUTO_NAMES = (
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping bf16.enabled "
    "fp16.enabled optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay "
    "scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr scheduler.params.warmup_num_steps "
    "scheduler.params.total_num_steps zero_optimization.reduce_bucket_size "
    "zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold "
    "zero_optimization.stage zero_optimization.offload_optimizer.device zero_optimization.offload_param.device "
    "zero_optimization.stage3_gather_16bit_weights_on_model_save"
)
"""Names for which "auto" is replaced (transformers 5.17 `integrations/deepspeed.py`, accelerate 1.15
`DeepSpeedPlugin`)."""

SCHEDULERS = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|/\*.*?\*/", re.DOTALL)
_TOKEN = re.compile(rf"({_STRING})(\s*:)?|[{{}}\[\]\n]")


def read_deepspeed(path: Path, expected: Mapping[str, tuple[Any, str]] | None = None) -> dict[str, Any]:
    """The file's content without comments. `expected` (see `run_values`) holds the only values besides "auto".

    Raises ConfigErrors with all problems of the file, in the order of the lines; ConfigError if it cannot be read, or
    is not JSON.
    """
    try:
        check_small_file(path, str(path))
        # Spaces instead of comments, so that positions stay. The content of strings stays too.
        plain = _COMMENT.sub(
            lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]), path.read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        fix = "correct cluster.deepspeed; deepspeed_configs/ holds examples"
        raise ConfigError(f"cannot be read: {reason}", where=str(path), fix=fix) from error

    def build_section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None)
        if twice is not None:
            raise ConfigError(f"{twice} is written twice in one section", where=str(path), fix="keep one of them")
        return dict(pairs)

    try:
        values = json.loads(plain, object_pairs_hook=build_section)
    except json.JSONDecodeError as error:
        raise ConfigError(f"no JSON: {error.msg}", where=f"{path}:{error.lineno}", fix="correct that line") from error
    if not isinstance(values, dict):
        raise ConfigError("holds no object", where=str(path), fix="start from deepspeed_configs/custom_example.json")
    lines = _line_numbers(plain)
    problems = [*_unknown(values), *_contradictions(values, expected or {})]
    problems.sort(key=lambda problem: lines.get(problem[0], 0))
    if problems:
        raise ConfigErrors(
            [ConfigError(what, where=f"{path}:{lines.get(name, 1)} {name}", fix=fix) for name, what, fix in problems]
        )
    return values


def run_values(cfg: RunConfig, *, world_size: int, stage: int | None = None) -> dict[str, tuple[Any, str]]:
    """Dotted name in a DeepSpeed file -> the value in the run's config and its key; without what is still `auto`."""
    train = cfg.train
    expected: dict[str, tuple[Any, str]] = {
        "train_batch_size": (train.effective_batch_size, "train.effective_batch_size"),
        "train_micro_batch_size_per_gpu": (train.batch_size, "train.batch_size"),
        "gradient_accumulation_steps": (train.grad_accum, "train.grad_accum"),
        "gradient_clipping": (train.max_grad_norm, "train.max_grad_norm"),
        "optimizer.params.lr": (train.peak_rate, "train.learning_rate"),
        "optimizer.params.weight_decay": (train.weight_decay, "train.weight_decay"),
        "scheduler.params.warmup_max_lr": (train.peak_rate, "train.learning_rate"),
        "optimizer.type": ("AdamW" if "adam" in train.optim or train.optim == "auto" else None, "train.optim"),
        "scheduler.type": (SCHEDULERS.get(train.lr_scheduler), "train.lr_scheduler"),
        # DeepSpeed's default warms up logarithmically, the run's own schedules linearly.
        "scheduler.params.warmup_type": ("linear", "train.lr_scheduler"),
    }
    if train.precision != "auto":
        for name in ("bf16", "fp16"):
            expected[f"{name}.enabled"] = (train.precision == name, "train.precision")
    if stage is not None:
        expected[f"{ZERO}.stage"] = (stage, "cluster.strategy")
    if isinstance(train.batch_size, int) and isinstance(train.grad_accum, int):
        expected["train_batch_size"] = (train.batch_size * train.grad_accum * world_size, "train.batch_size")
    return {name: (value, key) for name, (value, key) in expected.items() if value != "auto"}


def _line_numbers(plain: str) -> dict[str, int]:
    """Dotted name -> its line number."""
    lines: dict[str, int] = {}
    path: list[str] = []
    name, line = "", 1
    for token in _TOKEN.finditer(plain):
        if token[2]:
            name = json.loads(token[1])
            lines[".".join([*path[1:], name])] = line
        elif token[0] in "{[":
            path.append(name)
        elif token[0] in "}]" and path:
            path.pop()
        line += token[0].count("\n")
    return lines


def _leaves(values: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, str, Any]]:
    """Section, dotted name and value of every name, sections included."""
    for name, value in values.items():
        dotted = f"{inside}.{name}".lstrip(".")
        yield inside, dotted, value
        if isinstance(value, dict):
            yield from _leaves(value, dotted)


def _unknown(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Dotted name, problem and fix."""
    for section, dotted, value in _leaves(values):
        name = dotted.rpartition(".")[2]
        if dotted in OUTDATED:
            yield dotted, "is an outdated name", f"write {OUTDATED[dotted]}"
        elif dotted == "checkpoint.writer.decoupled" and value:
            # DeepSpeed reports it as saved while it still writes it (`runtime/checkpoint_engine/`).
            yield dotted, "a checkpoint would count as complete while it is still written", "remove it"
        elif dotted in REMOVED:
            yield dotted, "is no longer part of DeepSpeed", "remove it"
        elif section in SECTIONS and name not in SECTIONS[section].split():
            nearest = nearest_names(name, SECTIONS[section].split())
            right_section = next((other for other, names in SECTIONS.items() if name in names.split()), None)
            if right_section is None:
                fix = f"did you mean {nearest[0]!r}?" if nearest else "remove it"
            else:
                fix = f"move it to {right_section or 'the top, outside of any section'}"
            yield dotted, f"DeepSpeed has no key {name!r} {f'in {section}' if section else 'at the top'}", fix
        elif dotted in SECTIONS and not isinstance(value, dict):
            yield dotted, f"{json.dumps(value)} is no section", f'write "{name}": {{ ... }}'
        elif value == "auto" and dotted not in AUTO_NAMES.split():
            fix = "write a value, or remove it for DeepSpeed's default"
            yield dotted, 'nothing replaces "auto" here', fix


def _contradictions(
    values: Mapping[str, Any], expected: Mapping[str, tuple[Any, str]]
) -> Iterator[tuple[str, str, str]]:
    for _, dotted, value in _leaves(values):
        right, key = expected.get(dotted, (value, ""))
        is_equal = value == right and isinstance(value, bool) == isinstance(right, bool)
        if isinstance(value, str) and isinstance(right, str):
            is_equal = value.lower() == right.lower() or {value.lower(), right.lower()} == {"adam", "adamw"}
        if value == "auto" or is_equal:
            continue
        if right is None:
            what = f"{json.dumps(value)} would replace {key}, and DeepSpeed has no such kind"
            yield dotted, what, f"remove {dotted.partition('.')[0]}; then the run uses its own"
        else:
            what = f"{json.dumps(value)} contradicts {key}, which sets {json.dumps(right)}"
            yield dotted, what, f"set {key}" if "type" in dotted else f'write "auto", or set {key}'
    zero = values.get(ZERO)
    if zero is None:
        yield ZERO, "is missing, so nothing would be sharded", f'add "{ZERO}": {{"stage": 2}}'
    for name in ("offload_param", "offload_optimizer"):
        offload = zero.get(name) if isinstance(zero, dict) else None
        if isinstance(offload, dict) and offload.get("device") == "nvme" and not offload.get("nvme_path"):
            yield f"{ZERO}.{name}", "nvme needs a folder", 'add "nvme_path": "/folder/on/the/disk"'
    scheduler = values.get("scheduler")
    if isinstance(scheduler, dict) and "warmup_type" not in (scheduler.get("params") or {}):
        what = "warms up logarithmically by default, but the run's own schedules warm up linearly"
        yield "scheduler", what, 'add "warmup_type": "linear" to its params, or remove scheduler'

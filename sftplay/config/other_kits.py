"""Keys of other kits and of TRL, with the key of ours that does it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sftplay.config.keys import all_homes
from sftplay.config.layers import SPELLINGS, KeyPath

SECTIONS: dict[str, dict[str, str]] = {
    "distributed": {
        "device_placement.base_model_device": "score.devices.solver",
        "device_placement.guidance_model_device": "score.devices.guide",
        "device_placement.critic_device": "score.devices.critic",
        "device_placement.value_function_device": "score.devices.value",
        "device_placement.target_critic_device": "score.devices.target_critic",
        "device_placement.reference_model_device": "score.devices.ref",
    },
    "memory_optimization": {
        "use_gradient_checkpointing": "train.gradient_checkpointing",
        "use_flash_attention_2": "model.attn: flash_attention_2, or leave it to auto",
        "use_bf16_mixed_precision": "train.precision: bf16",
        "cpu_offloading.enable": (
            "score.devices.ref: cpu, with tuning.mode: full; adapters need none, their reference is the base without "
            "them"
        ),
        "cpu_offloading.offload_targets": (
            "score.devices.ref: cpu and score.devices.target_critic: cpu, with tuning.mode: full; adapters: the second"
        ),
    },
    "batch_optimization": {
        "total_batch_size": "train.effective_batch_size: the episodes of a step over all processes",
        "per_gpu_batch_size": "train.effective_batch_size: all GPUs together, each process has an equal share",
        "micro_batch_size": "train.batch_size",
        "gradient_accumulation_steps": "train.grad_accum: auto; it follows from the two sizes and the processes",
        "adaptive_batch_sizing": (
            "train.batch_size: auto; it is measured at the start, and halved where memory runs out"
        ),
        "min_batch_size": "train.batch_size: auto; it has no lower bound, as each size learns the same",
        "max_batch_size": "train.batch_size: auto, or the largest yourself",
    },
    "deepspeed_config": {
        "zero_stage": "score.placement: sharded, with tuning.mode: full; DeepSpeed trains one model, and here are two",
        "offload_optimizer": "tuning.mode: lora; its state is small, and nothing offloads it",
        "offload_param": (
            "score.placement: sharded, with tuning.mode: full; a process holds a part, nothing is offloaded"
        ),
    },
    "communication": {
        "gradient_compression": "cluster.comm.hook: none; task score sends gradients whole, once a step",
        "compression_ratio": "cluster.comm.hook: none; task score sends gradients whole, once a step",
    },
}  # fmt: skip
"""Section -> its keys -> what to write here, the key first."""


def keys_below(path: KeyPath, value: Any) -> Iterator[KeyPath]:
    """Yield the keys of a section of the guide, each to be answered by itself; any other unknown name is one key."""
    known = SECTIONS.get(str(path[0]))
    if known is None or action_for(path) or not isinstance(value, dict) or not value:
        yield path
        return
    for name, inner in value.items():
        yield from keys_below((*path, str(name)), inner)


def action_for(path: KeyPath) -> str:
    """Return what to write instead of a key of the guide; empty for any other name."""
    return SECTIONS.get(str(path[0]), {}).get(".".join(map(str, path[1:])), "")


_FILES = {"SFTConfig": "trainer/sft_config.py", "GRPOConfig": "trainer/grpo_config.py"}
"""Class -> its file in the package trl."""

_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "dict": ((dict,), "keys with values"),
    "list": ((list,), "a list"),
    "None": ((type(None),), "null"),
}  # fmt: skip
"""Word of an annotation -> the types it stands for, and how they are called."""


def config_fields(kind: str) -> frozenset[str] | None:
    """Read the names that the config `kind` of TRL takes, inherited ones too; None where its source cannot be read.

    None leaves the check to the run, where the library itself refuses what it does not know.
    """
    kinds = config_kinds(kind)
    return None if kinds is None else frozenset(kinds)


def unfit(kind: str, name: str, *, value: object) -> str:
    """What the field `name` of the config `kind` takes, in words, where `value` is no such thing; empty where it may be
    right."""
    words = (config_kinds(kind) or {}).get(name, ())
    if any(word not in _KINDS for word in words):
        return ""
    fitting = [word for word in words if word == "bool" or not isinstance(value, bool)]
    is_fit = any(isinstance(value, _KINDS[word][0]) for word in fitting)
    return "" if is_fit else " or ".join(_KINDS[word][1] for word in words)


@cache
def config_kinds(kind: str) -> dict[str, tuple[str, ...]] | None:
    """Field -> the words of its annotation, `dict[str, Any] | None` as dict and None."""
    classes: dict[str, ast.ClassDef] = {}
    bases = (("trl", "trainer/base_config.py"), ("transformers", "training_args.py"))
    for package, file in (("trl", _FILES[kind]), *bases):
        try:
            spec = find_spec(package)
        except (ImportError, ValueError):
            return None
        paths = [Path(folder, file) for folder in spec.submodule_search_locations or ()] if spec else []
        path = next((path for path in paths if path.is_file()), None)
        if path is None:
            return None
        body = ast.parse(path.read_text(encoding="utf-8")).body
        classes |= {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    fields: dict[str, tuple[str, ...]] = {}
    waiting = [kind]
    while waiting:
        found = classes.get(waiting.pop())
        if found is None:
            return None
        # The annotated names that the dataclass's constructor takes.
        fields = {
            line.target.id: tuple(word.partition("[")[0] for word in ast.unparse(line.annotation).split(" | "))
            for line in found.body
            if isinstance(line, ast.AnnAssign)
            and isinstance(line.target, ast.Name)
            and not line.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(line.annotation)
        } | fields
        waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return fields


_NAMES: dict[str, str] = {
    # rows and steps
    "train.batch_size": "micro_batch_size per_device_train_batch_size per_gpu_train_batch_size",
    "train.batch_size: auto": "auto_find_batch_size",
    "train.batching: tokens; a micro-batch then holds batch_size x max_seq_len tokens":
        "max_tokens_per_batch max_batch_tokens",
    "train.effective_batch_size": "train_batch_size global_batch_size total_batch_size",
    "train.grad_accum": "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches",
    "train.epochs": "num_train_epochs num_epochs max_epochs",
    "train.max_steps": "max_steps_per_epoch train_steps",
    "train.eval_steps": "evals_per_epoch eval_interval",
    "train.eval_steps, or leave it out for once an epoch": "evaluation_strategy eval_strategy",
    "train.save_steps": "saves_per_epoch",
    "train.save_steps, or leave it out for once an epoch": "save_strategy",
    "train.best_metric": "metric_for_best_model greater_is_better",
    "train.best_metric: loss": "load_best_model_at_end",
    "train.early_stopping": "early_stopping_patience",
    "train.resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    # rate and optimizer
    "train.learning_rate": "lr",
    "train.lr_scheduler": "lr_scheduler_type scheduler",
    "train.warmup_ratio, the share of all steps": "warmup_steps num_warmup_steps lr_warmup_steps",
    "train.decay_ratio, the share of all steps": "decay_steps num_decay_steps lr_decay_steps cooldown_steps",
    "train.min_lr_ratio, the share of the peak rate": "min_lr min_lr_rate cosine_min_lr_ratio lr_min_ratio",
    "train.optim": "optimizer optimizer_type",
    "train.max_grad_norm": "gradient_clipping clip_grad_norm grad_clip",
    # memory and numbers
    "train.precision": "mixed_precision dtype torch_dtype compute_dtype",
    "train.gradient_checkpointing":
        "enable_activation_checkpointing activation_checkpointing use_gradient_checkpointing",
    "train.packing": "sample_packing packed eval_packing packing_strategy padding_free",
    "train.loss_head: liger": "use_liger_kernel liger_kernel enable_liger_kernel",
    "train.neftune_alpha": "neftune_noise_alpha",
    "train.dataloader_num_workers": "preprocessing_num_workers",
    # model
    "model.name": "model_name_or_path base_model model_name model_path model_id",
    "model.revision": "model_revision",
    "model.max_seq_len": "cutoff_len max_length max_seq_length sequence_len sequence_length",
    "model.attn": "attn_implementation attn_impl",
    "model.attn: flash_attention_2, or leave it to auto": "flash_attention flash_attn",
    # what trains
    "tuning.mode": "finetuning_type tuner_type train_type sft_type",
    "tuning.mode: lora, or full": "use_peft",
    "tuning.mode: qlora": "load_in_4bit",
    "tuning.mode: qlora for 4 bits": "quantization_bit quant_bits",
    "tuning.mode: qlora for 4 bits; 8 bits are not offered": "load_in_8bit",
    "tuning.backend": "quantization_method quant_method",
    "tuning.quant_type": "bnb_4bit_quant_type",
    "tuning.double_quant": "bnb_4bit_use_double_quant double_quantization",
    "tuning.lora.r": "lora_r lora_rank",
    "tuning.lora.alpha": "lora_alpha",
    "tuning.lora.dropout": "lora_dropout",
    "tuning.lora.target_modules": "lora_target lora_target_modules lora_target_linear lora_attn_modules",
    "tuning.lora.modules_to_save": "lora_modules_to_save additional_target",
    "tuning.new_tokens.path, a file with one term a line":
        "add_tokens add_special_tokens new_special_tokens additional_special_tokens tokens",
    "tuning.new_tokens.count or path; the model gets the rows it needs, each the mean of its pieces":
        "resize_vocab resize_token_embeddings_to_32x mean_resizing_embeddings init_special_tokens",
    "tuning.lora.dora": "use_dora peft_use_dora",
    "tuning.lora.rslora": "use_rslora peft_use_rslora",
    # data
    "data.train_path": "dataset dataset_path dataset_name train_file train_data data_path data_paths",
    "data.val_path": "val_dataset eval_dataset validation_file test_datasets",
    "data.split": "val_size test_size split_dataset_ratio",
    "data.split, a share of the rows": "val_set_size",
    "data.template": "chat_template conversation_template chat_template_jinja chat_template_path",
    "data.too_long": "truncation_strategy excess_length_strategy truncation_mode",
    "data.processed_dir": "dataset_prepared_path",
    "data.format": "formatting data_format dataset_format conversation_style",
    "data.columns": "column_map column_mapping",
    "data.columns for columns of a row; the keys of a message are found by themselves": "message_property_mappings",
    "data.columns: {messages: NAME}": "field_messages messages_column",
    "data.columns: {conversations: NAME}": "conversation_column conversations_key",
    "data.columns: {instruction: NAME}": "field_instruction",
    "data.columns: {input: NAME}": "field_input",
    "data.columns: {output: NAME}": "field_output",
    "data.columns: {system: NAME}": "field_system",
    "data.columns: {tools: NAME}": "field_tools",
    "data.columns: {text: NAME}": "dataset_text_field text_column text_field",
    "data.system": "default_system system_prompt system_message new_system_prompt",
    "data.encoding": "file_encoding charset",
    "data.delimiter": "sep separator csv_delimiter",
    "data.duplicates: drop": "dataset_exact_deduplication deduplicate dedup remove_duplicates",
    "data.contamination: drop, and name the other rows with data.val_path or data.test_path":
        "decontaminate decontamination",
    # continued pre-training
    "task_mode: cpt, and name the documents with data.train_path": "pretraining_dataset",
    "datasets.weight, the share of each source":
        "interleave_probs interleave_prob mix_strategy dataset_weights dataset_mixture dataset_mixer",
    "cpt.on_source_end": "stopping_strategy",
    # rewards and completions
    "grpo.num_generations": "n_samples_per_prompt num_samples_per_prompt rollout_n group_size",
    "grpo.max_completion_length": "max_response_length generate_max_len response_length",
    "grpo.max_prompt_length": "prompt_max_len prompt_length",
    "grpo.steps_per_generation, or score.steps_per_generation for two turns": "generation_batch_size num_mini_batches",
    "grpo.num_iterations, or score.num_iterations for two turns": "ppo_epochs num_ppo_epochs",
    "grpo.epsilon, or score.epsilon for two turns": "eps_clip clip_ratio cliprange clip_ratio_low",
    "grpo.epsilon_high": "clip_ratio_high eps_clip_high",
    "grpo.beta": "kl_coef init_kl_coef kl_loss_coef kl_beta",
    "grpo.aggregation": "multi_objective_aggregation",
    "grpo.mask_truncated_completions": "overlong_filter",
    "grpo.dynamic_sampling_rounds": "dynamic_sample max_resample_times dynamic_sampling filter_groups",
    "grpo.samples": "log_completions num_completions_to_print log_unique_prompts",
    "grpo.generation: vllm_colocate or vllm_server": "use_vllm vllm_mode fast_inference",
    "grpo.generation: continuous": "use_transformers_continuous_batching use_transformers_paged",
    "grpo.vllm.memory_share": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "grpo.vllm.sleep": "vllm_enable_sleep_mode vllm_enable_sleep sleep_level enable_sleep_mode",
    "grpo.vllm.tensor_parallel": "vllm_tensor_parallel_size tensor_parallel_size",
    "grpo.vllm.url": "vllm_server_base_url vllm_server_host vllm_server_port",
    "grpo.vllm.timeout": "vllm_server_timeout",
    "grpo.max_prompt_length and grpo.max_completion_length; vLLM gets their sum":
        "vllm_max_model_length vllm_max_model_len",
    # two turns and a guide
    "score.value_flow: shared_trunk is full gradient flow, stop is partial":
        "gradient_flow value_gradient_flow full_gradient_flow stop_gradient stop_value_gradient",
    "score.value_coef": "value_coefficient value_function_coef value_loss_coef",
    "score.stage1_steps": "stage1_iterations stage_1_steps num_stage1_steps",
    "score.stage2_steps": "stage2_iterations stage_2_steps num_stage2_steps",
    "score.guidance_warmup": "guidance_warmup_steps guidance_warmup_iterations",
    "score.beta_guide": "guidance_kl_coef guidance_kl_coeff beta_guidance",
    "rewards.use": "reward_funcs reward_functions reward_func",
    "rewards.weight": "reward_weights",
    # puzzles
    "hrm.n_supervision": "halt_max_steps halt_max",
    "hrm.halt_exploration": "halt_exploration_prob",
    "hrm.puzzle_emb_dim": "puzzle_emb_ndim",
    "hrm.positions": "pos_encodings",
    # the run
    "task_mode": "stage rlhf_type",
    "output_dir": "save_dir",
    "seed": "data_seed random_seed",
    "eval.batch_size": "per_device_eval_batch_size eval_batch_size",
    "eval.max_new_tokens": "max_new_token",
    "eval.limit": "max_predict_samples",
    "logging.steps": "logging_steps log_every_n_steps",
    "logging.backend": "report_to metric_logger",
    "logging.backend: wandb": "use_wandb",
    "cluster.timeout": "ddp_timeout",
}  # fmt: skip
"""What to write here, the key first -> names of axolotl, LLaMA-Factory, TRL, ms-swift, Unsloth or torchtune for it."""

OTHER_KITS: dict[str, str] = {name: action for action, names in _NAMES.items() for name in names.split()}
"""Name in another kit -> what to write here, the key first."""

_PREFIXES = {
    "eval_": "train.eval_steps", "save_": "train.save_steps", "logging_": "logging.steps",
    "warmup_": "train.warmup_ratio",
}  # fmt: skip
"""Start of the name of an argument of TRL -> the key that decides this group of arguments."""

_LAUNCH = "the launcher decides how processes work together"

_WITHOUT_KEY: dict[str, str] = {
    "rows reach the trainer rendered, masked, cut and in order": (
        "dataset_kwargs dataset_num_proc shuffle_dataset completion_only_loss assistant_only_loss eos_token pad_token "
        "dataloader_drop_last dataloader_in_order dataloader_shuffle remove_unused_columns label_names "
        "train_sampling_strategy length_column_name group_by_length"
    ),
    _LAUNCH: "accelerator_config parallelism_config fsdp fsdp_config deepspeed local_rank use_cpu",
    "the kit writes and restores checkpoints itself":
        "ignore_data_skip restore_callback_states_from_checkpoint enable_jit_checkpoint",
    "the Make target decides what is done": "do_train do_eval do_predict",
    "the kit prints its own lines": "disable_tqdm log_level log_level_replica",
    "see the section eval": "prediction_loss_only batch_eval_metrics include_for_metrics",
    "the kit opens the model, see the section model": "model_init_kwargs",
    "the loss is always averaged over all tokens of a step": "average_tokens_across_devices",
    "a token does not belong in a file; set HF_TOKEN in the environment": "hub_token",
}  # fmt: skip

_WITHOUT_MEANING: dict[str, str] = {
    "task_mode grpo has no labels": "label_smoothing_factor",
    "the kit measures the held-out prompts itself, see the section eval": "num_generations_eval",
    "completions belong to samples/ in the run folder, see grpo.samples": "log_completions_hub_repo log_multimodal",
    "the moved reference model would not be in the checkpoints, so a resume would be another run":
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
}  # fmt: skip

WITHOUT_MEANING: dict[str, str] = {name: reason for reason, names in _WITHOUT_MEANING.items() for name in names.split()}
"""Argument of TRL's GRPOConfig -> why it cannot be given where a run draws completions."""

WITHOUT_KEY: dict[str, str] = {name: reason for reason, names in _WITHOUT_KEY.items() for name in names.split()}
"""Argument of TRL's configs that no key here decides -> why it cannot be given."""


class Answer(NamedTuple):
    """Why an argument of TRL cannot be given in `train.extra` or `grpo.extra`, and what to do."""

    key: str  # the key that decides it; empty when there is none
    what: str
    fix: str


def find_key(action: str) -> str:
    """Return the key at the start of what to write."""
    return re.split(r"[^\w.]", action, maxsplit=1)[0]


def kit_answer(name: str, *, draws: bool = False) -> Answer | None:
    """Answer an argument of TRL's SFTConfig, or of its GRPOConfig where a run `draws` completions; None when it
    may be given."""
    if name in WITHOUT_KEY:
        return Answer("", WITHOUT_KEY[name], "remove it")
    if draws and name in WITHOUT_MEANING:
        return Answer("", WITHOUT_MEANING[name], "remove it")
    sections = ("grpo", "", "train", "model") if draws else ("", "train", "model")
    actions = [key for key in all_homes().get(name, []) if key.rpartition(".")[0] in sections]
    actions += ["train.loss_head"] if name == "loss_type" and not draws else []  # in GRPOConfig it is something else
    actions += ["train.precision"] if name in SPELLINGS else []
    actions += [OTHER_KITS[name]] if name in OTHER_KITS else []
    actions += [key for start, key in _PREFIXES.items() if name.startswith(start)]
    if actions:
        key = find_key(actions[0])
        return Answer(key, f"the kit sets it from {key}", f"write {actions[0]}")
    return Answer("", _LAUNCH, "remove it") if name.startswith("ddp_") else None


CLUSTER_KEYS: dict[str, str] = {
    "name": "write cluster.strategy: ddp, fsdp, hsdp, zero1, zero2 or zero3; Ray is a target, make train-ray",
    "num_workers": "the command says how many processes: make train-ray WORKERS=4, or make train NPROC=4",
    "num_gpus": "the command says how many: make train-distributed takes every GPU, with NPROC=4 four",
    "num_nodes": "the command says how many: make submit NODES=4, or NNODES=4 with make train-distributed on each",
    "gpus_per_node": "make train-distributed takes every GPU of a node; make submit GPUS_PER_NODE=8",
    "resources_per_worker": (
        "each process has one whole GPU, as two ranks of NCCL cannot share one; for more of the rest: make train-ray "
        "ARGS='-- --resources CPU=4'"
    ),
    "placement_group": "make train-ray ARGS='-- --placement PACK'",
    "resources": "remove it: every step waits for its slowest process, so all get the same; make plan says how much",
    "fsdp_config": (
        "write cluster.strategy: fsdp; NO_SHARD is ddp, SHARD_GRAD_OP zero2; the rest is train.precision, "
        "train.gradient_checkpointing, and for offloading cluster.deepspeed"
    ),
    "pipeline_config": "write cluster.strategy: fsdp; a pipeline needs a schedule that the Trainer does not have",
}  # fmt: skip
"""Key below `cluster` as guides for Ray and NeMo RL write it -> what to do here."""

REFUSED_CHOICES: dict[tuple[str, str], tuple[str, str]] = {
    ("score.value_flow", "full"): ("is shared_trunk here: the gradient of V goes into the guide", "write shared_trunk"),
    ("score.value_flow", "partial"): ("is stop here: the gradient of V ends at the head", "write stop"),
    ("cluster.comm.hook", "powersgd_batched"): (
        "is not offered: torch's batched_powerSGD_hook hands its orthogonalisation a matrix where that asserts a batch "
        "of them, and dies (torch 2.13)",
        "write powersgd",
    ),
}  # fmt: skip
"""(key, word) -> why a choice that exists elsewhere is none here, and what to write."""

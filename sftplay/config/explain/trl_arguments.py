"""The arguments of TRL's SFTConfig: which there are, read from its source, and which of them the kit sets itself.

Nothing of TRL or transformers is imported, so a config is refused before seconds are spent on importing them.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_SOURCES = (
    ("trl", "trainer/sft_config.py"),
    ("trl", "trainer/base_config.py"),
    ("transformers", "training_args.py"),
)

OUR_KEYS: dict[str, str] = {
    "output_dir": "output_dir",
    "run_name": "run_name",
    "seed": "seed",
    "data_seed": "seed",
    "per_device_train_batch_size": "train.batch_size",
    "auto_find_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.grad_accum",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "learning_rate": "train.learning_rate",
    "lr_scheduler_type": "train.lr_scheduler",
    "optim": "train.optim",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.max_grad_norm",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "gradient_checkpointing": "train.gradient_checkpointing",
    "activation_checkpointing": "train.gradient_checkpointing",
    "packing": "train.packing",
    "eval_packing": "train.packing",
    "packing_strategy": "train.packing",
    "padding_free": "train.packing",
    "loss_type": "train.loss_head",
    "use_liger_kernel": "train.loss_head",
    "neftune_noise_alpha": "train.neftune_alpha",
    "load_best_model_at_end": "train.best_metric",
    "metric_for_best_model": "train.best_metric",
    "greater_is_better": "train.best_metric",
    "resume_from_checkpoint": "train.resume",
    "dataloader_num_workers": "train.dataloader_num_workers",
    "dataloader_pin_memory": "train.dataloader_pin_memory",
    "save_total_limit": "train.save_total_limit",
    "per_device_eval_batch_size": "eval.batch_size",
    "report_to": "logging.backend",
    "max_length": "model.max_seq_len",
    "trust_remote_code": "model.trust_remote_code",
    "chat_template_path": "data.template",
    "truncation_mode": "data.too_long",
    "ddp_timeout": "cluster.timeout",
}
"""Argument of SFTConfig -> the key that sets it here."""

OUR_PREFIXES: dict[str, str] = {
    "eval_": "train.eval_steps",
    "save_": "train.save_steps",
    "logging_": "logging.steps",
    "warmup_": "train.warmup_ratio",
}
"""Start of an argument's name -> the key that sets that group here; exact names in OUR_KEYS come first."""

_ROWS = "rows reach the trainer rendered, masked, cut and in order"
_LAUNCH = "the launcher decides how processes work together"
_SAVING = "the kit writes and restores checkpoints itself"

KIT_SETS: dict[str, str] = {
    **dict.fromkeys(
        (
            "dataset_text_field",
            "dataset_kwargs",
            "dataset_num_proc",
            "shuffle_dataset",
            "completion_only_loss",
            "assistant_only_loss",
            "eos_token",
            "pad_token",
            "dataloader_drop_last",
            "dataloader_in_order",
            "dataloader_shuffle",
            "remove_unused_columns",
            "label_names",
            "train_sampling_strategy",
            "length_column_name",
            "group_by_length",
        ),
        _ROWS,
    ),
    **dict.fromkeys(
        ("accelerator_config", "parallelism_config", "fsdp", "fsdp_config", "deepspeed", "local_rank", "use_cpu"),
        _LAUNCH,
    ),
    **dict.fromkeys(("ignore_data_skip", "restore_callback_states_from_checkpoint", "enable_jit_checkpoint"), _SAVING),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "the Make target decides what is done"),
    **dict.fromkeys(("disable_tqdm", "log_level", "log_level_replica"), "the kit prints its own lines"),
    **dict.fromkeys(("prediction_loss_only", "batch_eval_metrics", "include_for_metrics"), "see the section eval"),
    "model_init_kwargs": "the kit opens the model, see the section model",
    "average_tokens_across_devices": "the loss is always averaged over all tokens of a step",
    "hub_token": "a token does not belong in a file; set HF_TOKEN in the environment",
}
"""Argument of SFTConfig that has no key here -> why it cannot be set."""


def kit_answer(name: str) -> tuple[str, str] | None:
    """The key that sets an argument here ("" if none) and the reason it cannot be given, or None if it can."""
    prefix = next((start for start in OUR_PREFIXES if name.startswith(start)), None)
    if name in OUR_KEYS or (prefix and name not in KIT_SETS):
        ours = OUR_KEYS.get(name) or OUR_PREFIXES[prefix or ""]
        return ours, f"the kit sets it from {ours}"
    if name in KIT_SETS:
        return "", KIT_SETS[name]
    return ("", _LAUNCH) if name.startswith("ddp_") else None


@cache
def sft_config_fields() -> frozenset[str] | None:
    """The names SFTConfig takes, inherited ones included; None where its source cannot be found or followed.

    None leaves the check to the run, where the library itself refuses what it does not know.
    """
    classes: dict[str, ast.ClassDef] = {}
    for package, file in _SOURCES:
        source = _source(package, file)
        if source is None:
            return None
        classes |= {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields: set[str] = set()
    waiting = ["SFTConfig"]
    while waiting:
        found = classes.get(waiting.pop())
        if found is None:
            return None
        fields |= _fields_of(found)
        waiting += [base.id for base in found.bases if isinstance(base, ast.Name)]
    return frozenset(fields)


def _source(package: str, file: str) -> str | None:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, file)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def _fields_of(node: ast.ClassDef) -> set[str]:
    """The annotated names in a dataclass body that its constructor takes."""
    return {
        line.target.id
        for line in node.body
        if isinstance(line, ast.AnnAssign)
        and isinstance(line.target, ast.Name)
        and not line.target.id.startswith("_")
        and "ClassVar" not in ast.unparse(line.annotation)
    }

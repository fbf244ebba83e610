"""Names of other kits for config values, taken by `submit` and the sbatch file only. The list is closed.

A config file has one name for one thing: there these names are refused, each with what to write.
"""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.errors import ConfigError, nearest_names

BATCH, ACCUM, EFFECTIVE = "train.batch_size", "train.grad_accum", "train.effective_batch_size"

ALIASES: dict[str, str] = {
    "training_args.max_steps": "train.max_steps",
    "training_args.num_train_epochs": "train.epochs",
    "training_args.learning_rate": "train.learning_rate",
    "training_args.lr_scheduler_type": "train.lr_scheduler",
    "training_args.warmup_ratio": "train.warmup_ratio",
    "training_args.weight_decay": "train.weight_decay",
    "training_args.max_grad_norm": "train.max_grad_norm",
    "training_args.per_device_train_batch_size": BATCH,
    "training_args.gradient_accumulation_steps": ACCUM,
    "training_args.gradient_checkpointing": "train.gradient_checkpointing",
    "training_args.optim": "train.optim",
    "training_args.save_steps": "train.save_steps",
    "training_args.save_total_limit": "train.save_total_limit",
    "training_args.eval_steps": "train.eval_steps",
    "training_args.logging_steps": "logging.steps",
    "training_args.seed": "seed",
    "training_args.num_generations": "grpo.num_generations",
    "training_args.max_completion_length": "grpo.max_completion_length",
    "training_args.max_prompt_length": "grpo.max_prompt_length",
    "training_args.num_iterations": "grpo.num_iterations",
    "training_args.temperature": "grpo.temperature",
    "training_args.top_p": "grpo.top_p",
    "training_args.beta": "grpo.beta",
    "training_args.epsilon": "grpo.epsilon",
    "training_args.loss_type": "grpo.loss_type",
    "evaluation.eval_interval_steps": "train.eval_steps",
}
"""Name in the guide on distributed GRPO -> the key here."""

SECTIONS = ("training_args", "evaluation")


def in_our_names(overrides: Sequence[str], *, world_size: int) -> tuple[list[str], list[str]]:
    """The overrides in the names of the config, and a note on each value that was not typed.

    In the names of other kits micro-batch and accumulation decide the effective batch together.

    Raises:
        ConfigError: a name of these sections is not in the list.
    """
    ours, aliased = [], dict[str, str]()
    for text in overrides:
        name, sign, value = text.removeprefix("--").partition("=")
        if name.partition(".")[0] in SECTIONS:
            key = _key_of(name)
            aliased[key] = value
            ours.append(f"{key}{sign}{value}")
        else:
            ours.append(text)
    sizes = [aliased.get(key, "") for key in (BATCH, ACCUM)]
    if not all(size.isdecimal() for size in sizes) or any(text.startswith(f"{EFFECTIVE}=") for text in ours):
        return ours, []
    effective = int(sizes[0]) * int(sizes[1]) * world_size
    note = f"{EFFECTIVE} is {effective}: {sizes[0]} rows x {sizes[1]} micro-batches x {world_size} processes"
    return [*ours, f"{EFFECTIVE}={effective}"], [note]


def _key_of(name: str) -> str:
    if name in ALIASES:
        return ALIASES[name]
    near = nearest_names(name, ALIASES)
    fix = f"did you mean {near[0]}?" if near else "write the key of the config; docs/config.md lists them"
    raise ConfigError(f"there is no {name!r}", where="command line", fix=fix, nearest=near)

"""Which values of a config decide the weights of a run, and in which of them two configs differ.

What may differ between a run and its resume is written here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sftplay.config.schema.keys import all_keys, list_keys
from sftplay.config.schema.renamed import with_new_names
from sftplay.config.schema.run import RunConfig

FREE_TO_CHANGE = (
    "train.resume",
    "logging",
    "eval",
    "sandbox.executor",
    "run_name",
    "output_dir",
    "train.save_total_limit",
    "train.probe",
    "train.oom_recovery",
    "train.stall_timeout",
    "train.time_limit",
    "train.profile",
    "train.dataloader_num_workers",
    "train.dataloader_pin_memory",
    "data.processed_dir",
    "cpt.streaming",
    "grpo.samples",
    "grpo.stop_without_signal",
    "grpo.logprob_check_steps",
    "grpo.vllm",
    "score.samples",
    "score.generation_rows",
    "score.kl1_max",
    "score.min_hint_gain",
    "score.eval_samples",
    "score.eval_temperature",
    "score.placement",
    "score.devices",
    "hrm.eval_limit",
    "hrm.eval_halt",
    "hrm.puzzle_emb_placement",
    "cluster.max_restarts",
    "cluster.timeout",
    "cluster.nccl",
    "cluster.launcher",
)
"""Config keys that may differ when a run is resumed: they change neither rows nor weights."""

STRATEGY = "cluster.strategy"
"""In task score it goes with `score.placement`, and checkpoints are those of whole models."""

OF_REWARDS = ("rewards", "sandbox")
"""Keys that are measured with. They decide weights only where the model learns from rewards (grpo and score)."""

OTHER_ROWS = ("data.val_path", "data.test_path")
"""Files that are only evaluated on. Another file may be named as long as it decides nothing. Having one or none may not
change: without data.val_path, the rows to measure on are split off those that are trained on."""

SIZES = ("train.batch_size", "train.grad_accum")
"""How a step is cut into micro-batches. With other sizes, sums are rounded and dropout is drawn in another order."""


DRAWN = "grpo.generation_rows"
"""How a drawing is cut into parts. In other parts, random numbers are drawn in another order."""


def values_that_decide_weights(cfg: RunConfig) -> dict[str, Any]:
    """Dotted key -> JSON value of every key that decides which weights come out."""
    flat = flatten(cfg)
    free = FREE_TO_CHANGE if cfg.task.learns_from_rewards else (*FREE_TO_CHANGE, *OF_REWARDS)
    free = (*free, STRATEGY) if cfg.task.splits_itself else free
    return {key: value for key, value in flat.items() if not any(key == f or key.startswith(f"{f}.") for f in free)}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Keys in which a resumed run would be another run: (dotted key, before, after).

    Both mappings are those of `values_that_decide_weights`. A key that is missing in one of them has its default there:
    the run was begun before the kit had the key. `before` may have keys by the names of an older release.
    """
    before = with_new_names(before)
    free = () if held_out_decides(after) else OTHER_ROWS
    pairs = [
        (key, before.get(key, _defaults().get(key)), after.get(key, _defaults().get(key)))
        for key in sorted({*before, *after})
    ]
    return [
        (key, old, new)
        for key, old, new in pairs
        if old != new and not (key in free and (old is None) == (new is None))
    ]


@cache
def _defaults() -> dict[str, Any]:
    optional = {key: field for key, field in all_keys().items() if not field.is_required()}
    found = {key: field.get_default(call_default_factory=True) for key, field in optional.items()}
    return found | {key: [] for key in list_keys()}


def held_out_decides(values: Mapping[str, Any]) -> bool:
    """True when held-out rows decide which rows are trained on, or which weights are kept."""
    seeks_best = values.get("train.best_metric") is not None or values.get("train.early_stopping") is not None
    return values.get("data.contamination") == "drop" or seeks_best


def flatten(cfg: RunConfig) -> dict[str, Any]:
    """Dotted key -> JSON value of every key."""
    return _flat(cfg.model_dump(mode="json"))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, list) and all(isinstance(entry, dict) for entry in value) and value:
            value = {str(number): entry for number, entry in enumerate(value)}
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat

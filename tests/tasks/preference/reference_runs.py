"""What tests of the reference start from: a small model, rows of pairs, and what stands in for a trainer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from pair_rows import make_pairs
from plain_preference import sums_of
from preference_trainers import tiny_model

from sftplay.config.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import RunFolder


def small_model(seed: int = 0) -> Any:
    """A random Llama of two layers whose scores differ enough to tell rows apart."""
    return tiny_model(seed=seed, initializer_range=0.3, pad_token_id=0).eval()


def pairs_of(n_train: int = 13, n_held_out: int = 5, *, kto: bool = False, fingerprint: str = "rows") -> Any:
    """Pairs in the columns of `load_pairs`; `fingerprint` is theirs."""
    train, held_out = (
        Dataset.from_list(make_pairs(n, seed, kto=kto)) if n else None for seed, n in enumerate((n_train, n_held_out))
    )
    return SimpleNamespace(train=train, held_out=held_out, fingerprint=fingerprint)


def config_of(home: Path, model: Path | str = "builtin:tiny", **values: Any) -> RunConfig:
    """A config of task dpo whose cache and run folder lie below `home`; keyword `a__b=c` sets the key a.b."""
    cfg = RunConfig.model_validate(
        {
            "task_mode": "dpo", "model": {"name": str(model)}, "output_dir": str(home / "outputs"),
            "data": {"train_path": "rows.jsonl", "processed_dir": str(home / "processed")},
            "train": {"precision": "fp32", "batch_size": 4, "effective_batch_size": 8},
        }
    )  # fmt: skip
    return cfg.with_values({key.replace("__", "."): value for key, value in values.items()}, "test")


def run_folder(home: Path, name: str = "run") -> RunFolder:
    folder = RunFolder(home / "outputs" / name)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def trainer_of(model: Any, *, shares: bool = True, batch_size: int = 4) -> Any:
    """What the callbacks ask of a trainer on one process."""
    return SimpleNamespace(
        model=model, model_wrapped=model, micro_batcher=object(), shares_prompt=shares, heartbeat=Heartbeat(),
        processing_class=SimpleNamespace(pad_token_id=0), is_deepspeed_enabled=False,
        args=SimpleNamespace(per_device_eval_batch_size=batch_size, hf_deepspeed_config=None),
        compute_loss_context_manager=nullcontext,
    )  # fmt: skip


def state_at(step: int) -> Any:
    return SimpleNamespace(global_step=step, max_steps=10)


@torch.no_grad()
def plain_sums(model: Any, rows: Any) -> torch.Tensor:
    """Log-probabilities of the labels of both texts of each row, in fp64 by plain transformers: [rows, 2]."""
    return sums_of(copy.deepcopy(model).double(), list(rows))

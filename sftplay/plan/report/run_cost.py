"""How long a run is, and what it leaves on disk: steps, tokens, checkpoints, and a rough time with its basis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from sftplay.config.run import RunConfig
from sftplay.plan.memory.forecast import Setting
from sftplay.plan.memory.memory_setup import trained_params
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.sizing.task_sizing import find_sizing

COUNTED_BYTES = 2**28  # files up to this size are counted; larger ones would keep the answer waiting

LINE_FILES = (".jsonl", ".ndjson")

USED_SHARE = 0.35  # of a GPU's peak arithmetic that fine-tuning usually reaches

CPU_FLOPS_PER_CORE = 2e10  # what a core does in fp32 products of a middling size; half or double is usual


@dataclass(frozen=True)
class Workload:
    """Figures of a whole run."""

    steps: int | None
    steps_reason: str
    tokens: int | None
    checkpoint_bytes: int
    disk_bytes: int
    seconds: float | None
    time_basis: str


def estimate_workload(cfg: RunConfig, setting: Setting, *, lengths: RowLengths | None = None) -> Workload:
    """Estimate the workload of a config in which all is decided; `lengths` is what is known of its rows."""
    train = cfg.train
    steps, reason = _steps(cfg, lengths)
    row_tokens = lengths.mean if lengths else cfg.row_tokens
    tokens = round(steps * train.effective_batch_size * row_tokens) if steps is not None else None
    learners = setting.task.learners if setting.task else 1
    trained = learners * trained_params(setting.shape, setting.execution)
    checkpoint = int(trained * (setting.execution.trained_bytes + setting.execution.state_bytes))
    seconds, basis = _seconds(setting, tokens, rows=_described(cfg, lengths))
    if cfg.task.learns_from_rewards:
        seconds, basis = None, "it depends on the length of completions, which the model decides"
    # One more lies there while the newest is written, and the result at the end.
    disk = checkpoint * (train.save_total_limit + 1) + trained * setting.execution.trained_bytes
    if cfg.tuning.new_tokens.is_on or (cfg.model.merge_adapter and cfg.tuning.mode != "full"):
        # The run keeps a base of its own, in 16 bits as most are stored.
        disk += 2 * (setting.shape.total_params + setting.shape.vision_params)
    return Workload(steps, reason, tokens, checkpoint, disk, seconds, basis)


def _described(cfg: RunConfig, lengths: RowLengths | None) -> str:
    if lengths and not cfg.learns_documents and not cfg.task.learns_from_rewards:
        return f"rows of {lengths.mean:.0f} tokens, as they are"
    return find_sizing(cfg).describe_length(cfg)


def _steps(cfg: RunConfig, lengths: RowLengths | None) -> tuple[int | None, str]:
    train = cfg.train
    if train.max_steps:
        return train.max_steps, f"train.max_steps, {_described(cfg, lengths)}"
    if decided := find_sizing(cfg).steps(cfg):
        return decided
    if cfg.learns_documents and cfg.cpt.train_tokens is not None:
        return cfg.count_steps(cfg.cpt.train_tokens), f"cpt.train_tokens, {_described(cfg, lengths)}"
    rows = lengths.count if lengths else None
    path = Path(cfg.rows_path)
    is_counted = not cfg.learns_documents and path.suffix in LINE_FILES and path.is_file()
    if rows is None and is_counted and path.stat().st_size <= COUNTED_BYTES:
        with path.open("rb") as file:
            rows = sum(1 for line in file if line.strip())
    if rows is None:
        return None, "the rows are counted when the data are prepared"
    completions = rows * find_sizing(cfg).rows_per_record(cfg)
    steps = max(1, math.ceil(train.epochs * completions / train.effective_batch_size))
    kind = "blocks an epoch" if cfg.learns_documents else "prompts" if cfg.task.learns_from_rewards else "rows"
    return steps, f"{rows} {kind}, {_described(cfg, lengths)}"


def _seconds(setting: Setting, tokens: int | None, *, rows: str) -> tuple[float | None, str]:
    device = setting.device
    if tokens is None:
        return None, "the number of steps is not known"
    if device.is_gpu:
        if device.tflops is None:
            return None, f"the peak speed of {device.name} is not in the table"
        speed = device.tflops * 1e12 * USED_SHARE * setting.world_size
        basis = f"{USED_SHARE:.0%} of {device.tflops:g} TFLOP/s a GPU (data sheet), {rows}"
    else:
        speed = CPU_FLOPS_PER_CORE * device.cores
        basis = f"{CPU_FLOPS_PER_CORE / 1e9:g} GFLOP/s a core assumed, {rows}"
    return tokens * flops_per_token(setting) / speed, basis


def flops_per_token(setting: Setting) -> float:
    """Operations of one step per token in products with weights; those between queries and keys come to a few percent
    below some thousand tokens (PaLM, Chowdhery 2022, appendix B) and are left out."""
    shape, setup = setting.shape, setting.execution
    # A multiplication and an addition each: forward, once more where it is recomputed, and for the gradients of the
    # input and of the weight where that trains.
    passes = 2 + setup.checkpointing + setup.trains_all
    return float(2 * passes * (shape.linear_params + shape.vocab * shape.hidden))

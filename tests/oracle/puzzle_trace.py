"""A training step of a model of puzzles on fake tensors: what the closed form of its memory is checked against.

Model and losses are the kit's own, the optimizer torch's. It imports nothing of the closed form. Left out is the update
of the puzzle embeddings, which depends on the content of tensors and takes a few rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from oracle.gpu_kernels import CudaKernels, InPlaceSums, replaced
from oracle.live_bytes import LiveBytes
from sftplay.tasks.hrm.act import Puzzles, all_halted, concatenate, reset_halted, run_segment
from sftplay.tasks.hrm.network import Grid, PuzzleModel
from sftplay.tasks.hrm.section import HrmConfig

PHASES = {"segment": ("begin", "forward"), "layer": ("backward",), "step": ("together", "step")}
"""Phase of the plan -> phases of the trace."""


def trace_puzzles(hrm: HrmConfig, grid: Grid, *, rows: int, micro_batch: int, dtype: torch.dtype) -> dict[str, int]:
    """The most bytes that live at one time in each phase of a step, in its steady state."""
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.init, "trunc_normal_", lambda weight, **_: weight))  # reads its content
        stack.enter_context(CudaKernels(host_reads=0))
        stack.enter_context(FakeTensorMode())
        live = stack.enter_context(LiveBytes())
        stack.enter_context(InPlaceSums())
        model = PuzzleModel(hrm, grid, dtype=dtype)
        optimizer = _rested_optimizer(model)
        held: dict[str, Any] = {"carry": all_halted(model, rows)}
        live.forget_peaks()
        _run_step(model, held, live=live, rows=rows, micro_batch=micro_batch)
        live.enter_phase("step")
        optimizer.step()
        return {name: max(live.peaks_bytes[part] for part in parts) for name, parts in PHASES.items()}


def _run_step(model: PuzzleModel, held: dict[str, Any], *, live: LiveBytes, rows: int, micro_batch: int) -> None:
    """As `tasks.hrm.trainer` does it: the carry of the step before lives until all micro-batches have run."""
    live.enter_phase("begin")
    cells = torch.zeros(rows, model.grid.cells, dtype=torch.int64)
    numbers = torch.zeros(rows, dtype=torch.int64)
    carry = reset_halted(held["carry"], Puzzles(cells, cells.clone(), numbers), model=model)
    parts = []
    for start in range(0, rows, micro_batch):
        part = slice(start, start + micro_batch)
        live.enter_phase("forward")
        segment = run_segment(model, carry.rows(part), at_least=numbers[part])
        total = segment.losses.sum()
        live.enter_phase("backward")
        (total / rows).backward()
        parts.append(segment.carry)
    live.enter_phase("together")
    held["carry"] = concatenate(parts)


def _rested_optimizer(model: PuzzleModel) -> torch.optim.Optimizer:
    """The optimizer after a step on gradients of zero, so that its states exist."""
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, fused=True)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer

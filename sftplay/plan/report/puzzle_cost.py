"""How long a run of puzzles is, and what it leaves on disk."""

from __future__ import annotations

from sftplay.config.schema.run import RunConfig
from sftplay.plan.memory.forecast import Forecast
from sftplay.plan.puzzles.shape import PuzzleModelShape
from sftplay.plan.report.run_cost import CPU_FLOPS_PER_CORE, USED_SHARE, Workload

MULTIPLY_ADD, BACKWARD = 2, 2
"""Operations a weight and position; backward passes over forward passes."""


def flops_per_row(shape: PuzzleModelShape) -> float:
    """Operations of a step on one row in products with weights: all calls forward, those that learn backward, and all
    calls again where the worth of going on is learned. There the last block ends with one position alone."""
    puzzles, hrm = shape.puzzles, shape.puzzles.hrm
    looks_ahead = hrm.q_continue and hrm.n_supervision > 1
    blocks = (1 + looks_ahead) * puzzles.passed_blocks + BACKWARD * puzzles.learned_blocks
    products = puzzles.positions * (blocks * puzzles.block + 3 * hrm.hidden_size * puzzles.grid.words)
    spared = looks_ahead * (puzzles.positions - 1) * (puzzles.block - 3 * hrm.hidden_size**2)
    return float(MULTIPLY_ADD * (products - spared))


def workload_of_puzzles(cfg: RunConfig, seen: Forecast) -> Workload:
    """Steps, disk and time of a run, evaluations left out."""
    shape, device, train = seen.setting.shape, seen.setting.device, cfg.train
    assert isinstance(shape, PuzzleModelShape)
    steps, reason = train.max_steps, "train.max_steps"
    if steps is None and shape.rows is not None:
        steps = int(cfg.hrm.epochs * shape.rows / train.effective_batch_size)
        reason = f"hrm.epochs, {shape.rows:.0f} rows an epoch"
    elif steps is None:
        reason = "the puzzles are not there yet"
    puzzles = shape.puzzles
    result = 4 * (puzzles.weights + puzzles.table)
    state = seen.footprint.phases["segment"]["carry"] / 3 * seen.setting.world_size
    checkpoint = int(result + 4 * puzzles.weights * (2 + bool(cfg.hrm.ema)) + state)
    disk = checkpoint * (train.save_total_limit + 1) + result
    if steps is None:
        return Workload(steps, reason, None, checkpoint, disk, None, "the number of steps is not known")
    work = steps * train.effective_batch_size * flops_per_row(shape)
    tokens = steps * train.effective_batch_size * shape.row_tokens
    if device.is_gpu and device.tflops is None:
        basis = f"the peak speed of {device.name} is not in the table"
        return Workload(steps, reason, tokens, checkpoint, disk, None, basis)
    if device.is_gpu and device.tflops is not None:
        speed = device.tflops * 1e12 * USED_SHARE * seen.setting.world_size
        basis = f"{USED_SHARE:.0%} of {device.tflops:g} TFLOP/s a GPU (data sheet), without evaluations"
    else:
        speed = CPU_FLOPS_PER_CORE * device.cores
        basis = f"{CPU_FLOPS_PER_CORE / 1e9:g} GFLOP/s a core assumed, without evaluations"
    return Workload(steps, reason, tokens, checkpoint, disk, work / speed, basis)

"""The forecast of a run of puzzles: what each phase of a step takes of a device."""

from __future__ import annotations

from collections.abc import Callable

from sftplay.config.schema.run import RunConfig
from sftplay.plan.memory.forecast import Forecast, Place, Setting
from sftplay.plan.memory.memory_setup import BYTES, MemorySetup, workspace_bytes
from sftplay.plan.memory.step import Size
from sftplay.plan.puzzles.memory import PuzzleSize, collected_bytes, puzzle_footprint
from sftplay.plan.puzzles.shape import PuzzleModelShape


def foresee_puzzles(cfg: RunConfig, shape: PuzzleModelShape, *, place: Place) -> Callable[[int], Forecast]:
    """The forecast of a micro-batch of so many rows, for a config in which all but the sizes is decided."""
    compute = BYTES[str(cfg.train.precision)]
    setting = Setting(
        shape=shape,
        execution=MemorySetup(weight_bytes=4, compute_bytes=compute, stream_bytes=compute, checkpointing=False),
        device=place.device,
        strategy="ddp" if place.world_size > 1 else "single",
        world_size=place.world_size,
    )
    share = cfg.train.effective_batch_size // place.world_size
    on_host = round(collected_bytes(shape.puzzles, place.world_size)) if place.device.is_gpu else 0

    def look(rows: int) -> Forecast:
        footprint = puzzle_footprint(
            shape.puzzles,
            size=PuzzleSize(rows=share, micro_batch=rows),
            compute_bytes=compute,
            processes=place.world_size,
            workspace=workspace_bytes(place.device.capability) if place.device.is_gpu else 0,
        )
        return Forecast(setting, Size(rows=rows, seq=shape.row_tokens, accumulates=rows < share), footprint, on_host)

    return look

"""What the verb `plan` asks a task: advice, workload, a comparison, words. The answers here are those of supervised
fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

from sftplay.config.run import RunConfig
from sftplay.plan.memory.forecast import Forecast, Hardware
from sftplay.plan.memory.row_lengths import RowLengths
from sftplay.plan.report.run_cost import Workload, estimate_workload
from sftplay.plan.report.tables import describe_rows
from sftplay.plan.shape.model_shape import ModelShape
from sftplay.plan.sizing.task_sizing import SizedRun

if TYPE_CHECKING:
    from sftplay.plan.report.advice import Suggestion

Sizing = Callable[..., SizedRun]  # sizes a config for the machine in question; `shape` is that of its model


class TaskReport:
    """A task in the plan's text. Its `plan.py` holds one as PLAN, where it differs."""

    unit = "rows"
    """What a step counts."""

    def where_model(self, cfg: RunConfig) -> str:
        """Return the place that names the model, for an error about it."""
        return f"{cfg.origins.get('model.name', 'model')} model.name"

    def size(self, cfg: RunConfig, sizing: Sizing, *, shape: ModelShape, world_size: int, is_free: bool) -> SizedRun:
        """Size a config; with `is_free` nobody named the number of processes, and the task may take fewer."""
        return sizing(cfg, shape=shape, world_size=world_size)

    def suggest(self, cfg: RunConfig, sized: SizedRun, *, sizing: Sizing, hardware: Hardware) -> list[Suggestion]:
        """Suggest what would fit: of `cfg` as the user wrote it, and as it is `sized`."""
        from sftplay.plan.report.advice import suggest

        assert sized.forecast is not None
        return suggest(sized.cfg, sized.forecast.setting.shape, hardware=hardware)

    def workload(self, cfg: RunConfig, seen: Forecast, *, lengths: RowLengths | None = None) -> Workload:
        """Return steps, disk and time of a run."""
        return estimate_workload(cfg, seen.setting, lengths=lengths)

    def compare(self, cfg: RunConfig, shape: ModelShape, *, hardware: Hardware) -> tuple[list[Any], Iterator[str]]:
        """Compare what could be chosen: rows with `as_dict`, and the lines of their table.

        Raises:
            ConfigError: the task leaves no choice.
        """
        from sftplay.plan.report.compare import compare

        rows = compare(cfg, shape, hardware=hardware)
        return rows, describe_rows(rows)

    def describe_tokens(self, cfg: RunConfig, planned: int) -> str:
        """Describe the rows that memory is planned for."""
        if cfg.learns_documents:
            return f"full blocks of {planned} tokens, every one learned"
        limit = cfg.row_tokens
        shorter = f", the longest of these files (model.max_seq_len {limit})" if planned < limit else ""
        return f"rows of {planned} tokens{shorter}"

    def describe_sampling(self, seen: Forecast, plan: dict[str, Any]) -> Iterator[str]:
        """Yield lines about what the task alone has, above the decisions."""
        yield from ()

    def describe_phases(self, seen: Forecast) -> Iterator[str]:
        """Yield lines about memory by phase, below the memory of a step."""
        yield from ()


def find_report(cfg: RunConfig) -> TaskReport:
    """Find what the config's task answers, imported only now."""
    part = cfg.task.part("plan")
    return cast("TaskReport", part.PLAN) if part else TaskReport()

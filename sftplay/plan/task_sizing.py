"""What sizing asks a task, and what it gives: a sized run. The answers here are those of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sftplay.config.run import RunConfig
from sftplay.plan.decisions import Decision, Decisions
from sftplay.plan.forecast import Forecast, Hardware, Setting, TaskMemory, forecast, on_device, planned_tokens
from sftplay.plan.memory import Size, Strategy
from sftplay.plan.memory_setup import read_memory_setup
from sftplay.plan.shape import ModelShape

if TYPE_CHECKING:
    from sftplay.machine.gpu import Machine
    from sftplay.plan.fit import Fit


@dataclass(frozen=True)
class SizedRun:
    """A config without any `auto`, and how it came about."""

    cfg: RunConfig
    world_size: int
    decisions: Decisions  # of the keys that stood on `auto`
    notes: tuple[str, ...] = ()  # settings without effect on this machine, and what could not be planned
    forecast: Forecast | None = None  # None where the model's shape is not known before the download

    def as_plan(self) -> dict[str, Any]:
        """What goes to plan.json."""
        train = self.cfg.train
        sizes = {
            "world_size": self.world_size,
            "batch_size": train.batch_size,
            "grad_accum": train.grad_accum,
            "effective_batch_size": train.effective_batch_size,
            "learning_rate": train.peak_rate,
            **find_sizing(self.cfg).plan_fields(self.cfg),
            "decisions": [{"key": key, **vars(decision)} for key, decision in self.decisions.items()],
        }
        if self.forecast is None:
            return sizes
        setting = self.forecast.setting
        inputs = {"device": vars(setting.device), "strategy": setting.strategy, "model": setting.shape.name}
        return {**sizes, **self.forecast.as_dict(), **inputs}


class TaskSizing:
    """A task while a run is sized. Its `plan.py` holds one as PLAN, where it differs."""

    splits_by_strategy = True
    """Whether `cluster.strategy` alone splits the model over the processes."""

    def known_shape(self, cfg: RunConfig) -> ModelShape | None:
        """Return the shape of a model that `model.name` does not decide; asked only where there is no text."""
        return None

    def memory(self, cfg: RunConfig, *, hardware: Hardware) -> TaskMemory | None:
        """Return the memory of a step that is more than plain rows."""
        return None

    def size_whole(self, cfg: RunConfig, machine: Machine, *, shape: ModelShape, hardware: Hardware) -> SizedRun | None:
        """Size a run that shares no decision with a language model; None for any other."""
        return None

    def refuse_machine(self, cfg: RunConfig, machine: Machine, *, world_size: int) -> None:
        """Check that the task can run here.

        Raises:
            MachineError: a library or a GPU is missing or too old.
            ConfigError: the number of processes does not go with the config.
        """

    def choose_placement(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        """Decide where the task's models lie, where the config leaves that open."""
        return {}

    def fixed_strategy(self, cfg: RunConfig) -> Decision | None:
        """Return the strategy where the task leaves no choice."""
        return None

    def fixed_head(self, cfg: RunConfig) -> Decision | None:
        """Return the loss head where the task leaves no choice."""
        return None

    def decide_more(self, cfg: RunConfig, machine: Machine) -> Decisions:
        """Decide keys of the task's own section that depend on the machine alone."""
        return {}

    def decide_sampling(self, cfg: RunConfig, shape: ModelShape | None, *, hardware: Hardware) -> Decisions:
        """Decide how many answers are sampled at a time, where any are."""
        return {}

    def rows_sampled(self, cfg: RunConfig) -> int:
        """Return the answers that a process samples at a time, once it is decided; 0 where it samples none."""
        return 0

    def uses_several_gpus(self, cfg: RunConfig) -> bool:
        """Return whether one process may use a second GPU; the placement may be undecided."""
        return False

    def compiled(self, cfg: RunConfig) -> tuple[str, bool, str]:
        """Return the key that asks for kernels which Triton builds, whether it does, and the value that does not."""
        return "train.loss_head", cfg.train.loss_head == "liger", "chunked"

    def notes(self, cfg: RunConfig, shape: ModelShape | None) -> tuple[str, ...]:
        """Return what the user should know of a sized run."""
        return ()

    def plan_fields(self, cfg: RunConfig) -> dict[str, int]:
        """Return the task's own fields of plan.json; the preflight compares them with the trainer."""
        return {}

    def lengths(self, cfg: RunConfig) -> Iterator[tuple[str, int, int]]:
        """Yield what shorter rows would mean: the key, its value, and what must stay below it."""
        yield "cpt.block_size" if cfg.learns_documents else "model.max_seq_len", cfg.row_tokens, 0

    def steps(self, cfg: RunConfig) -> tuple[int, str] | None:
        """Return the optimizer steps of a run and why, where the task's own keys decide them."""
        return None

    def rows_per_record(self, cfg: RunConfig) -> int:
        """Return the rows of a step that a row of the file makes."""
        return 1

    def describe_length(self, cfg: RunConfig) -> str:
        """Describe rows of full length."""
        return f"full blocks of {cfg.row_tokens} tokens" if cfg.learns_documents else "every row at full length"


def find_sizing(cfg: RunConfig) -> TaskSizing:
    """Find what the config's task answers, imported only now."""
    part = cfg.task.part("plan")
    return cast("TaskSizing", part.PLAN) if part else TaskSizing()


def build_setting(
    cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, strategy: Strategy, fit: Fit | None = None
) -> Setting:
    """Build the setting of a config in which all but the sizes is decided."""
    execution = on_device(read_memory_setup(cfg), shape, device=hardware.device)
    is_copied = cfg.cluster.strategy == "hsdp" and strategy == "fsdp"  # once on each node, twice on a single one
    copies = max(2, hardware.world_size // (hardware.gpus or hardware.world_size)) if is_copied else 1
    return Setting(
        shape=shape, execution=execution, device=hardware.device, strategy=strategy, world_size=hardware.world_size,
        copies=copies, fit=fit, task=find_sizing(cfg).memory(cfg, hardware=hardware), measures_first=cfg.eval.before,
    )  # fmt: skip


def forecast_one_row(cfg: RunConfig, shape: ModelShape, *, hardware: Hardware, strategy: Strategy) -> Forecast:
    """Forecast one row a micro-batch, and one completion sampled at a time, the least that a run can do with.

    `cfg` has no `auto` besides its sizes.
    """
    setting = build_setting(cfg, shape, hardware=hardware, strategy=strategy)
    accumulates = cfg.train.effective_batch_size > hardware.world_size
    return forecast(setting, Size(rows=1, seq=planned_tokens(cfg, hardware.lengths), accumulates=accumulates))

"""How a trainer computes its steps, and what happens when memory runs out in one: the same rows in smaller parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import OUT_OF_MEMORY, RunFolder
from sftplay.monitor.gradient_sync import wants_overlap
from sftplay.monitor.out_of_memory import OutOfMemory, Shortage, describe_shortages, free_memory
from sftplay.tasks.step.micro_batches import MicroBatcher

ADVICE = (
    "`make plan` lists the cheapest changes that fit (a shorter model.max_seq_len, tuning.mode qlora, "
    "train.gradient_checkpointing); `make memory-check` shows who else holds memory"
)


class Replay:
    """Used by one attempt at a run, where `train.oom_recovery` is on."""

    def __init__(self, cfg: RunConfig, folder: RunFolder) -> None:
        self._folder = folder
        self.sends_afterwards = log.world_size() > 1 and not wants_overlap(cfg)
        """True where gradients are sent after the window all at once, so that any micro-batch can be run again. Full
        tuning on GPUs sends them while the last one computes, because they are as large as the model. So does a hook.
        """

        self.times = 0
        """Windows that this attempt has run again so far."""

    def step_down(
        self, micro_batcher: MicroBatcher, shortages: list[Shortage | None], *, step: int, window_rows: int
    ) -> MicroBatcher:
        """The micro-batcher with which the same rows are run again, the same on every rank.

        Raises:
            OutOfMemory: every micro-batch was a single row already.
        """
        free_memory()
        planned = self._folder.read_json("plan.json")
        what = f"step {step}: {describe_shortages(shortages, planned.get('peak_bytes'))}"
        smaller = micro_batcher.smaller(window_rows)
        if smaller is None:
            raise OutOfMemory(what, where="training", fix=ADVICE)
        self.times += 1
        log.say(f"{what}; running the same rows again, {smaller.micro_batch} at a time")
        if log.is_main():
            self._folder.add_event(  # a resume reads it
                OUT_OF_MEMORY,
                step=step,
                batch_size_before=micro_batcher.micro_batch,
                batch_size=smaller.micro_batch,
                ranks=[rank for rank, each in enumerate(shortages) if each],
                planned_bytes=planned.get("peak_bytes"),
                held_bytes=max(each.held_bytes for each in shortages if each),
            )
        return smaller


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """How a trainer computes its steps."""

    micro_batcher: MicroBatcher | None
    """How windows are cut; None: the Trainer accumulates."""

    loss_head: str
    """train.loss_head, decided."""

    replay: Replay | None = None
    """What happens when memory runs out for a window; None: the run ends."""

    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    check_loss: Callable[[Tensor], None] | None = None
    """Called with each loss before its backward pass, where that is the last moment to stop (DeepSpeed)."""

    source_names: tuple[str, ...] = ()
    """Names of a mixture's sources, in the order of their numbers."""

"""What becomes of a window for which memory did not suffice: a smaller cut, said aloud and written to events.jsonl."""

from __future__ import annotations

from typing import Any

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.launch.run_folder import OUT_OF_MEMORY, RunFolder
from sftplay.monitor.gradient_sync import wants_overlap
from sftplay.monitor.out_of_memory import Agreement, OutOfMemory, Shortage, describe_shortages, free_memory
from sftplay.tasks.step.micro_batches import MicroBatcher

ADVICE = (
    "`make plan` lists the cheapest changes that fit (a shorter model.max_seq_len, tuning.mode qlora, "
    "train.gradient_checkpointing); `make memory-check` shows who else holds memory"
)


class Replay:
    """One attempt's, where `train.oom_recovery` is on."""

    def __init__(self, cfg: RunConfig, folder: RunFolder) -> None:
        self._cfg, self._folder = cfg, folder
        self._agreement: Agreement | None = None
        self._trainer: Any = None
        self.sends_afterwards = log.world_size() > 1 and not wants_overlap(cfg)
        """True where gradients travel behind the window in one go, and any piece can be run again. Full tuning on GPUs
        sends them while the last piece computes: there they are as large as the model. So does a hook."""

        self.times = 0
        """Windows run again so far, on this attempt."""

    def attend(self, trainer: Any) -> None:
        """Know the trainer, and get ready what agreeing takes."""
        self._trainer, self._agreement = trainer, Agreement(trainer.args.device)

    def all_shortages(self, mine: Shortage | None) -> list[Shortage | None]:
        """Those of every rank; empty when there is none."""
        assert self._agreement is not None, "attend comes before training"
        return self._agreement.all_shortages(mine, self._trainer.heartbeat)

    def step_down(
        self, micro_batcher: MicroBatcher, window_rows: int, shortages: list[Shortage | None]
    ) -> MicroBatcher:
        """The cut with which the same rows are run again, the same on every rank.

        Raises:
            OutOfMemory: every piece was a single row already.
        """
        free_memory()
        planned = self._folder.read_json("plan.json")
        step = self._trainer.state.global_step + 1
        what = f"step {step}: {describe_shortages(shortages, planned.get('peak_bytes'))}"
        smaller = micro_batcher.smaller(window_rows)
        if smaller is None:
            raise OutOfMemory(what, where="training", fix=ADVICE)
        self.times += 1
        log.say(f"{what}; the same rows again, {smaller.micro_batch} at a time")
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

"""How the ranks of plain data parallelism exchange gradients, and the share of a step that only waits for that.

Gradients that are sent after the window take time that the rank's heartbeat counts as `communication`. When DDP sends
them while it computes, DDP's own log says how long sending took and how much of it was covered by computing.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType

from sftplay import log
from sftplay.config.schema.cluster import AVERAGED_AFTERWARDS, SHARDED, CommConfig
from sftplay.config.schema.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.monitor.observer import Observer, StepTrainer

NS = 1e-9

POWERSGD = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}
"""The first two steps send gradients uncompressed, because DDP rebuilds its buckets in them (torch 2.13,
powerSGD_hook.py)."""


def wants_overlap(cfg: RunConfig) -> bool:
    """True when DDP itself must send the gradients, within the last backward pass of a step.

    A hook and a static graph work only inside DDP. In full tuning on GPUs the gradients are as large as the model.
    """
    comm = cfg.cluster.comm
    is_large = cfg.tuning.mode == "full" and torch.cuda.is_available()
    return comm.hook != "none" or comm.static_graph or is_large


def choose_hook(handler: Any, comm: CommConfig) -> None:
    """Set the compression of `comm.hook` on accelerate's DDP handler. Call it before the trainer wraps the model."""
    kinds = {
        "fp16": DDPCommunicationHookType.FP16,
        "bf16": DDPCommunicationHookType.BF16,
        "powersgd": DDPCommunicationHookType.POWER_SGD,
    }
    if comm.hook in kinds:
        handler.comm_hook = kinds[comm.hook]
    if comm.hook == "powersgd":
        handler.comm_state_option = dict(POWERSGD)


def exposed_s(ddp_log: dict[str, Any]) -> float:
    """Seconds of the last step in which gradients were sent and nothing was computed, from DDP's own log.

    The log has no times before the second step. They are nanoseconds (torch 2.13, logger.hpp).
    """
    sending, covered = (ddp_log.get(key, 0) for key in ("backward_comm_time", "backward_compute_comm_overlap_time"))
    return max(0, sending - covered) * NS


class GradientSync(Observer):
    """Sets up how gradients are sent, and measures the part of it that computing does not cover."""

    def __init__(self, cfg: RunConfig, heartbeat: Heartbeat) -> None:
        self.comm, self.heartbeat = cfg.cluster.comm, heartbeat
        self._is_ddp = log.world_size() > 1 and cfg.cluster.strategy not in SHARDED
        """False for sharded strategies: they communicate all the time and do not report it."""

        self._averages_itself = cfg.task_mode in AVERAGED_AFTERWARDS
        self._exposed_s = self._all_s = 0.0
        self._logged_step = 0

    def attach(self, trainer: StepTrainer) -> None:
        super().attach(trainer)
        if self._is_ddp:
            choose_hook(trainer.accelerator.ddp_handler, self.comm)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._logged_step = state.global_step
        if self._overlaps():
            self.trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(1)
            self._print_costs()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._overlaps():
            ddp_log = self.trainer.model_wrapped._get_ddp_logging_data()
            self.heartbeat.recount(exposed_s(ddp_log), "backward", truly="communication")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "exposed_communication_share" not in logs:
            return
        interval_s = logs["step_s"] * (state.global_step - self._logged_step)
        self._logged_step = state.global_step
        self._all_s += interval_s
        self._exposed_s += logs["exposed_communication_share"] * interval_s

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_ddp and self._all_s:
            place = (
                "beyond what DDP overlaps with computing" if self._overlaps() else "after the computing of each step"
            )
            share = f"{self._exposed_s / self._all_s:.1%} of the time"
            log.say(f"communication: {share} went to exchanging gradients and waiting for other ranks, {place}")

    def _overlaps(self) -> bool:
        sends_afterwards = self._averages_itself or (self.trainer.replay and self.trainer.replay.sends_afterwards)
        return self._is_ddp and not sends_afterwards

    def _print_costs(self) -> None:
        comm = self.comm
        if comm.hook == "none" and not comm.static_graph:
            return
        setting = f"cluster.comm.hook {comm.hook}" if comm.hook != "none" else "cluster.comm.static_graph"
        log.say(f"{setting}: DDP sends gradients within the backward pass of each step's last micro-batch")
        if self.trainer.replay:
            log.say("  running out of memory in that micro-batch restarts the run; any other one is run again, smaller")
        if comm.hook == "powersgd":
            log.say(
                "  PowerSGD is lossy, keeps one more copy of the gradients, and does not save its state in checkpoints"
            )

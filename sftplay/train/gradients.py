"""Gradients over the processes: averaged once a step, when they are sent, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from sftplay import log
from sftplay.config.cluster import SHARDED
from sftplay.config.run import RunConfig
from sftplay.heartbeat import Heartbeat
from sftplay.train.metrics import Observer


def average_gradients(model: Any, *, others: Sequence[Any] = ()) -> None:
    """Replace every rank's gradients by their mean over the ranks; a missing gradient counts as zero.

    All ranks call it with the same trainable weights: those of the DistributedDataParallel `model`, and `others`
    outside of it. They are sent in buckets of DDP's own size. Those of weights in shards were averaged by the backward
    pass.
    """
    _reduce(model, others=others, divisor=torch.distributed.get_world_size())


def add_gradients(model: Any) -> None:
    """Do the same with their sum instead of the mean, for losses that are divided by the rows of all ranks already."""
    _reduce(model, others=(), divisor=1)


def _reduce(model: Any, *, others: Sequence[Any], divisor: int) -> None:
    trained = [*(p for p in model.parameters() if p.requires_grad), *others]
    weights = [weight for weight in trained if not isinstance(weight, DTensor)]
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    for bucket in _split_into_buckets([weight.grad for weight in weights], model.bucket_bytes_cap):
        flat = _flatten_dense_tensors(bucket).div_(divisor)
        torch.distributed.all_reduce(flat)
        for gradient, mean in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            gradient.copy_(mean)


def _split_into_buckets(gradients: list[Any], cap_bytes: int) -> Iterator[list[Tensor]]:
    """Yield successive gradients of one type, up to `cap_bytes` together; a larger one is alone."""
    bucket: list[Tensor] = []
    size_bytes = 0
    for gradient in gradients:
        if bucket and (size_bytes + gradient.nbytes > cap_bytes or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(gradient)
        size_bytes += gradient.nbytes
    if bucket:
        yield bucket


def wants_overlap(cfg: RunConfig) -> bool:
    """Return whether DDP itself must send the gradients, within the last backward pass of a step.

    A hook and a static graph work only inside DDP. In full tuning on GPUs the gradients are as large as the model.
    """
    comm = cfg.cluster.comm
    is_large = cfg.tuning.mode == "full" and torch.cuda.is_available()
    return comm.hook != "none" or comm.static_graph or is_large


def exposed_s(ddp_log: dict[str, Any]) -> float:
    """Return the seconds of the last step in which gradients were sent and nothing was computed, from DDP's own log.

    The log has no times before the second step. They are nanoseconds (torch 2.13, logger.hpp).
    """
    sending, covered = (ddp_log.get(key, 0) for key in ("backward_comm_time", "backward_compute_comm_overlap_time"))
    return max(0, sending - covered) * 1e-9


class GradientSync(Observer):
    """Sets up how gradients are sent, and measures the part of it that computing does not cover."""

    def __init__(self, cfg: RunConfig, heartbeat: Heartbeat) -> None:
        self.comm, self.heartbeat = cfg.cluster.comm, heartbeat
        self._is_ddp = log.world_size() > 1 and cfg.cluster.strategy not in SHARDED
        """False for sharded strategies: they communicate all the time and do not report it."""

        self._averages_itself = cfg.task.averages_itself
        self._exposed_s = self._all_s = 0.0
        self._logged_step = 0

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        hook, handler = self.comm.hook, trainer.accelerator.ddp_handler
        if self._is_ddp and hook != "none":
            handler.comm_hook = DDPCommunicationHookType("power_sgd" if hook == "powersgd" else hook)
        if self._is_ddp and hook == "powersgd":
            # The first two steps send gradients uncompressed, because DDP rebuilds its buckets in them (torch 2.13,
            # powerSGD_hook.py).
            handler.comm_state_option = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 3}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._logged_step = state.global_step
        if not self._overlaps():
            return
        self.trainer.model_wrapped._set_ddp_runtime_logging_sample_rate(1)
        hook = self.comm.hook
        if hook == "none" and not self.comm.static_graph:
            return
        setting = f"cluster.comm.hook {hook}" if hook != "none" else "cluster.comm.static_graph"
        log.say(f"{setting}: DDP sends gradients within the backward pass of each step's last micro-batch")
        if self.trainer.replay:
            log.say("  running out of memory in that micro-batch restarts the run; any other one is run again, smaller")
        if hook == "powersgd":
            log.say("  PowerSGD is lossy, keeps one more copy of the gradients, and saves no state in checkpoints")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._overlaps():
            ddp_log = self.trainer.model_wrapped._get_ddp_logging_data()
            self.heartbeat.recount(exposed_s(ddp_log), "backward", truly="communication")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "exposed_communication_share" in logs:
            interval_s = logs["step_s"] * (state.global_step - self._logged_step)
            self._logged_step = state.global_step
            self._all_s += interval_s
            self._exposed_s += logs["exposed_communication_share"] * interval_s

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_ddp and self._all_s:
            when = "beyond what DDP overlaps with computing" if self._overlaps() else "after the computing of each step"
            share = f"{self._exposed_s / self._all_s:.1%} of the time"
            log.say(f"communication: {share} went to exchanging gradients and waiting for other ranks, {when}")

    def _overlaps(self) -> bool:
        sends_afterwards = self._averages_itself or (self.trainer.replay and self.trainer.replay.sends_afterwards)
        return self._is_ddp and not sends_afterwards


CHUNK = 2**10  # how many squares are added up in fp32 at a time


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, fp32 []. With sharded gradients every rank must call it.

    On a CPU torch adds up a whole tensor in fp32, which loses 5e-4 of the norm at 10 million numbers (torch 2.13). Here
    short chunks are added up in fp32, and their sums in fp64.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(isinstance(gradient, DTensor) or gradient.device.type != "cpu" for gradient in gradients):
        return rough_gradient_norm(parameters)
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        flat = gradient.detach().reshape(-1)
        whole = flat.numel() // CHUNK * CHUNK
        for chunks in (flat[:whole].view(-1, CHUNK), flat[whole:].view(1, -1)):
            total += torch.linalg.vector_norm(chunks, dim=1, dtype=torch.float32).double().square().sum()
    return total.sqrt().float()


def rough_gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Compute the same, but rounded as torch rounds it, for a quarter of the time on a CPU."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm

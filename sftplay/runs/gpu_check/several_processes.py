"""Several processes: they exchange what they should, and every strategy has the losses of one process."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from sftplay.machine.ports import free_port
from sftplay.machine.probe import Machine
from sftplay.plan.find_shape import read_table
from sftplay.plan.shape_from_config import shape_from_config
from sftplay.runs.gpu_check.check import (
    NO_GPU,
    Broken,
    Check,
    CheckContext,
    NotPossible,
    a_gpu,
    call,
    learned,
    losses_apart,
    random_model,
    several_gpus,
    train,
    write_run,
)
from sftplay.runs.gpu_check.runs import BOUNDS

BOUND = 1e-3
"""How far each loss may be from that of one process, as a share: sums in another order."""


def exchange(_context: CheckContext, *, on_gpus: bool) -> str:
    """`comm-check`: every sum is right. Its table is in the output."""
    call("comm-check", None, "--nproc", "gpu" if on_gpus else "2", env={} if on_gpus else NO_GPU)
    return "every sum is right"


def same_losses(context: CheckContext, *, strategy: str, mode: str = "lora", on_gpus: bool = True) -> str:
    """As many processes as GPUs, or two on the CPU, have the losses of one."""
    usual = learned(context, mode=mode, precision="fp32", on_cpu=not on_gpus)
    count = processes(context.machine) if on_gpus else 2
    values = {"tuning.mode": mode, "train.precision": "fp32", "model.attn": "sdpa", "train.packing": False}
    run = write_run(
        context.folder, strategy, values={**values, "train.batch_size": "auto", "cluster.strategy": strategy}
    )
    call("train", run, "--nproc", str(count), env={} if on_gpus else NO_GPU)
    apart = losses_apart(run.losses, usual.losses)
    figure = f"{count} processes; losses within {apart:.2g} as a share of one process's"
    if not apart <= BOUND:
        raise Broken(f"{figure}, more than {BOUND:g}")
    return figure


def one_of_several(context: CheckContext) -> str:
    """A single process trains on the first of the visible GPUs, and the others stay empty."""
    run = train(context, "one", values={"train.precision": "fp32", "model.attn": "sdpa", "train.packing": False})
    apart = losses_apart(run.losses[:3], learned(context, mode="lora", precision="fp32", on_cpu=True).losses[:3])
    command = (run.folder.path / "launch.txt").read_text(encoding="utf-8")
    visible = next((word for word in command.split() if word.startswith("CUDA_VISIBLE_DEVICES=")), "")
    figure = f"{len(context.machine.gpus)} are visible, {visible or 'all'} for the worker; losses within {apart:.2g}"
    if not visible or "," in visible or not apart <= BOUNDS["fp32"]:
        raise Broken(figure)
    return figure


def larger_than_one(context: CheckContext) -> str:
    """FSDP fully tunes a model whose weights, gradients and Adam state exceed one card."""
    count = processes(context.machine)
    name = split_candidate(context.machine, count)
    values = {"model.name": str(random_model(context, name)), "tuning.mode": "full", "train.max_steps": 3}
    sizes = {"train.batch_size": 1, "train.gradient_checkpointing": True, "train.learning_rate": 1e-5}
    run = write_run(context.folder, "split", values={**values, **sizes, "cluster.strategy": "fsdp"})
    call("train", run, "--nproc", str(count))
    losses = run.losses
    figure = f"{name} on {count} GPUs; losses {', '.join(f'{loss:.3f}' for loss in losses)}"
    if len(losses) != 3 or not all(map(math.isfinite, losses)):
        raise Broken(figure)
    return figure


def split_candidate(machine: Machine, count: int) -> str:
    """Return the smallest model of the shipped table that one of these GPUs cannot hold and `count` can. Raise
    NotPossible where there is none, or no room on the disk for its weights.
    """
    table, least = read_table(), min(gpu.plannable_bytes for gpu in machine.gpus)
    for name in (f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "1.5B", "3B", "7B", "14B")):
        params = shape_from_config(table[name], name=name).total_params
        resident = 16 * params  # full tuning in fp32 with Adam, which may take 0.8 of all GPUs
        if least < resident < 0.8 * least * count:
            if (machine.disk_free_bytes or 0) < 3 * 2 * params:
                raise NotPossible(f"{name} needs more room on the disk")
            return name
    raise NotPossible(f"no shape exceeds one of these GPUs and fits {count}")


def processes(machine: Machine) -> int:
    """Return as many as there are GPUs, but a power of two up to 16, which divides the rows of a step."""
    return 1 << min(4, len(machine.gpus).bit_length() - 1)


def wrapped_alone(context: CheckContext) -> str:
    """DDP and FSDP2 on a single process compute the plain model's gradients, by NCCL on a GPU."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device, backend = ("cuda", "nccl") if context.has_gpu else ("cpu", "gloo")

    def small_model() -> Any:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
        return torch.nn.Sequential(*layers).to(device)

    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{free_port(29600)}", rank=0, world_size=1)
    try:
        plain = gradient_norm(small_model())
        by_ddp = gradient_norm(torch.nn.parallel.DistributedDataParallel(small_model()))
        sharded, mesh = small_model(), init_device_mesh(device, (1,))
        for layer in (sharded[0], sharded[2], sharded):
            fully_shard(layer, mesh=mesh)
        by_fsdp = gradient_norm(sharded)
    finally:
        dist.destroy_process_group()
    figure = f"gradient norm {plain:.6g}, by DDP {by_ddp:.6g}, by FSDP2 {by_fsdp:.6g} over {backend}"
    if max(abs(by_ddp - plain), abs(by_fsdp - plain)) > 1e-5 * plain:
        raise Broken(figure)
    return figure


def gradient_norm(model: Any) -> float:
    """Return the norm of the model's gradient for one fixed batch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    model(torch.randn(8, 256, generator=generator).to(device)).square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
    return float(torch.stack([grad.float().square().sum() for grad in whole]).sum().sqrt())


CHECKS = (
    Check(name="processes: comm-check over gloo", run=partial(exchange, on_gpus=False)),
    Check(name="processes: DDP over gloo", run=partial(same_losses, strategy="ddp", on_gpus=False)),
    Check(name="processes: one of two visible GPUs", run=one_of_several, needs=several_gpus),
    Check(
        name="processes: a split model larger than one card",
        run=larger_than_one,
        needs=several_gpus,
        limit_s=1800,
        is_long=True,
    ),
    Check(name="processes: DDP and FSDP2 on one GPU", run=wrapped_alone, needs=a_gpu),
    Check(name="processes: comm-check over NCCL", run=partial(exchange, on_gpus=True), needs=several_gpus),
    *(
        Check(name=f"processes: {title} over NCCL", run=partial(same_losses, strategy=strategy), needs=several_gpus)
        for title, strategy in (("DDP", "ddp"), ("FSDP2", "fsdp"), ("ZeRO-2", "zero2"), ("ZeRO-3", "zero3"))
    ),
)

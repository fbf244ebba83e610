"""Several processes: they exchange what they should, and every strategy has the losses of one process."""

from __future__ import annotations

from functools import partial
from typing import Any

from sftplay.atomic import read_lines
from sftplay.control.gpu_check.frame.check import Broken, Check, Place, a_gpu, several_gpus
from sftplay.control.gpu_check.frame.kit import NO_GPU, call, learned, losses_apart, run_script, write_run
from sftplay.machine.ports import free_port
from sftplay.machine.probe import Machine
from sftplay.units import GIB, format_bytes

FIRST_PORT = 29600

LARGE, ROOM_BYTES = "meta-llama/Llama-3.1-8B", 14 * GIB
"""16 GB of weights in 16 bits, and the memory that each card is left with."""

BOUND = 1e-3
"""How far each loss may be from that of one process, as a share: sums in another order."""


def exchange(_place: Place, *, on_gpus: bool) -> str:
    """`comm-check`: every sum is right. Its table is in the output."""
    call("comm-check", None, *(("--nproc", "gpu") if on_gpus else ("--nproc", "2")), env={} if on_gpus else NO_GPU)
    return "every sum is right"


def same_losses(place: Place, *, strategy: str, mode: str = "lora", on_gpus: bool = True) -> str:
    """As many processes as GPUs, or two on the CPU, have the losses of one."""
    usual = learned(place, mode=mode, precision="fp32", on_cpu=not on_gpus)
    count = processes(place.machine) if on_gpus else 2
    values = {"tuning.mode": mode, "train.precision": "fp32", "model.attn": "sdpa", "train.packing": False}
    run = write_run(place.folder, strategy, values={**values, "train.batch_size": "auto", "cluster.strategy": strategy})
    call("train", run, "--nproc", str(count), env={} if on_gpus else NO_GPU)
    apart = losses_apart(run.losses, usual.losses)
    told = f"{count} processes; losses within {apart:.2g} as a share of one process's"
    if not apart <= BOUND:
        raise Broken(f"{told}, more than {BOUND:g}")
    return told


def one_of_several(place: Place) -> str:
    """One process that sees several GPUs trains on one of them, with the losses of one that sees a single GPU."""
    values = {"train.precision": "fp32", "model.attn": "sdpa", "train.packing": False}
    runs = [write_run(place.folder, name, values=values) for name in ("all", "one")]
    call("train", runs[0])
    call("train", runs[1], env={"CUDA_VISIBLE_DEVICES": "0"})
    apart = losses_apart(*(run.losses for run in runs))
    (rank,) = runs[0].status["ranks"]
    told = f"{len(place.machine.gpus)} visible, world size {rank['world_size']}; losses within {apart:.2g} as a share"
    if rank["world_size"] != 1 or apart > BOUND:
        raise Broken(told)
    return told


def split_over_cards(place: Place) -> str:
    """A model that no card can hold alone trains in parts: on each card all memory but ROOM_BYTES is taken before."""
    import torch

    model = place.folder / "model"
    run_script("gpu_sizing.py", "--make", LARGE, str(model))
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    taken = []
    for number in range(torch.cuda.device_count()):
        free, _ = torch.cuda.mem_get_info(number)
        taken.append(torch.empty(max(0, free - ROOM_BYTES), dtype=torch.uint8, device=f"cuda:{number}"))
    values = {
        "model.name": str(model), "train.precision": "bf16", "train.max_steps": 2, "train.batch_size": "auto",
        "train.gradient_checkpointing": True, "train.learning_rate": 1e-4, "cluster.strategy": "fsdp",
        "data.template": "chatml",
    }  # fmt: skip
    run = write_run(place.folder, "split", values=values)
    call("train", run, "--nproc", str(processes(place.machine)))
    del taken
    peak = max(line["peak_bytes"] for line in read_lines(run.folder.metrics)[0])
    told = f"{format_bytes(weights)} of weights, {format_bytes(ROOM_BYTES)} free a card, {format_bytes(peak)} held"
    if weights < ROOM_BYTES or peak > ROOM_BYTES:
        raise Broken(told)
    return told


def large_cards(machine: Machine) -> str:
    """Several GPUs of Ampere or later on which the model of `split_over_cards` does not fit the room that is left."""
    if missing := several_gpus(machine):
        return missing
    if not all(gpu.has_bf16 and gpu.free_bytes > ROOM_BYTES for gpu in machine.gpus):
        return f"needs two GPUs with bf16 and {format_bytes(ROOM_BYTES)} of free memory"
    return ""


def processes(machine: Machine) -> int:
    """As many as there are GPUs, but a power of two up to 16, which divides the rows of a step."""
    return 1 << min(4, len(machine.gpus).bit_length() - 1)


def wrapped_alone(place: Place) -> str:
    """DDP and FSDP2 on a single process compute the plain model's gradients, by NCCL on a GPU."""
    import torch
    import torch.distributed as dist

    device, backend = ("cuda", "nccl") if place.has_gpu else ("cpu", "gloo")
    here = f"tcp://127.0.0.1:{free_port(FIRST_PORT)}"
    dist.init_process_group(backend, init_method=here, rank=0, world_size=1)
    try:
        plain = gradient_norm(_small_model(torch).to(device))
        by_ddp = gradient_norm(torch.nn.parallel.DistributedDataParallel(_small_model(torch).to(device)))
        by_fsdp = gradient_norm(_sharded(_small_model(torch).to(device), device))
    finally:
        dist.destroy_process_group()
    told = f"gradient norm {plain:.6g}, by DDP {by_ddp:.6g}, by FSDP2 {by_fsdp:.6g} over {backend}"
    if max(abs(by_ddp - plain), abs(by_fsdp - plain)) > 1e-5 * plain:
        raise Broken(told)
    return told


def _small_model(torch: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))


def _sharded(model: Any, device: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (1,))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gradient_norm(model: Any) -> float:
    """The norm of the model's gradient for one fixed batch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    model(torch.randn(8, 256, generator=generator).to(device)).square().mean().backward()
    whole = [each.grad.full_tensor() if hasattr(each.grad, "full_tensor") else each.grad for each in model.parameters()]
    return float(torch.stack([each.float().square().sum() for each in whole]).sum().sqrt())


CHECKS = (
    Check(name="processes: comm-check over gloo", run=partial(exchange, on_gpus=False)),
    Check(name="processes: DDP over gloo", run=partial(same_losses, strategy="ddp", on_gpus=False)),
    Check(name="processes: DDP and FSDP2 on one GPU", run=wrapped_alone, needs=a_gpu),
    Check(name="processes: one with several visible GPUs", run=one_of_several, needs=several_gpus),
    Check(
        name="processes: a model larger than one card",
        run=split_over_cards,
        needs=large_cards,
        limit_s=1800,
        is_long=True,
    ),
    Check(name="processes: comm-check over NCCL", run=partial(exchange, on_gpus=True), needs=several_gpus),
    *(
        Check(name=f"processes: {title} over NCCL", run=partial(same_losses, strategy=strategy), needs=several_gpus)
        for title, strategy in (("DDP", "ddp"), ("FSDP2", "fsdp"), ("ZeRO-2", "zero2"), ("ZeRO-3", "zero3"))
    ),
)

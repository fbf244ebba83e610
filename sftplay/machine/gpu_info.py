"""What `gpu-info` prints: the facts about a machine in lines for people."""

from __future__ import annotations

from sftplay.machine.gpu import Gpu, GpuProcess
from sftplay.machine.probe import Machine
from sftplay.units import GIB, format_bytes, format_count

UNSEEN_BYTES = 128 * 2**20
"""Memory in use that belongs to no visible process gets a line above this size. Idle drivers hold a little less."""

CPU_BASE_BYTES = 3 * GIB // 2  # what torch, the libraries and a small batch take besides the model

LINKS = {
    "PIX": "one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "across PCIe host bridges",
    "SYS": "across CPU sockets, slowest",
}
"""What nvidia-smi's names of a connection mean. `NV` comes with the number of NVLinks."""


def describe_machine(machine: Machine) -> list[str]:
    """The lines of `gpu-info` about GPUs and their driver."""
    lines = [f"Number of GPUs: {len(machine.gpus)}"]
    if not machine.gpus:
        lines.append(f"  none: {machine.gpu_reason}")
    lines += [f"  note: {note}" for note in machine.notes]
    for gpu in machine.gpus:
        formats = "bf16, fp16, flash attention 2" if gpu.has_bf16 else "fp16; neither bf16 nor flash attention 2"
        lines += [f"  {headline(gpu)}", f"    compute capability {'.'.join(map(str, gpu.capability))}: {formats}"]
        facts = [f"{gpu.temperature_c} C"] if gpu.temperature_c is not None else []
        if gpu.power_w is not None:
            facts.append(f"{gpu.power_w:.0f} W" + (f" of {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""))
        facts += [f"busy {gpu.busy_percent} %"] if gpu.busy_percent is not None else []
        errors = "not reported" if gpu.memory_errors is None else gpu.memory_errors
        lines.append(f"    {', '.join([*facts, f'uncorrected memory errors: {errors}'])}")
        held = [f"{label(p)} {format_bytes(p.used_bytes) if p.used_bytes is not None else '?'}" for p in holders(gpu)]
        lines.append(f"    in use by: {', '.join(held) or 'nobody'}")
    if machine.mig_instances:
        lines.append("MIG instances; a process sees one of them, which CUDA_VISIBLE_DEVICES=UUID selects:")
    for mig in machine.mig_instances:
        total, free = format_bytes(mig.total_bytes), format_bytes(mig.free_bytes)
        lines.append(f"  {mig.uuid}  on GPU {mig.machine_index}: {mig.name}, {total}, {free} free")
    if machine.links:
        kinds = sorted({kind for row in machine.links for kind in row} - {"X"})
        meanings = [f"{kind[2:]} NVLinks" if kind.startswith("NV") else LINKS.get(kind, "unknown") for kind in kinds]
        meaning = "; ".join(f"{kind}: {text}" for kind, text in zip(kinds, meanings))
        width, names = max(5, *(len(kind) + 1 for kind in kinds)), [f"GPU{n}" for n in range(len(machine.links))]
        lines += [f"Links between GPUs ({meaning}):", f"  {'':<5}" + "".join(f"{name:>{width}}" for name in names)]
        for name, row in zip(names, machine.links):
            lines.append(f"  {name:<5}" + "".join(f"{kind:>{width}}" for kind in row))
        if machine.without_peer_access:
            lines.append(f"  no peer access: {', '.join(f'{a}-{b}' for a, b in machine.without_peer_access)}")
    if machine.driver:
        cuda = f", runs CUDA up to {machine.cuda_driver[0]}.{machine.cuda_driver[1]}" if machine.cuda_driver else ""
        lines.append(f"NVIDIA driver {machine.driver}{cuda}")
    return lines


def describe_host(machine: Machine) -> list[str]:
    """Processor, memory, disk and libraries; without a GPU also how large a model the memory allows."""
    disk = "" if machine.disk_free_bytes is None else f"; disk: {format_bytes(machine.disk_free_bytes)} free"
    memory = f"{format_bytes(machine.ram_bytes)}, {format_bytes(machine.ram_available)} free"
    lines = [f"CPU cores: {machine.cores}, memory: {memory}{disk}; {machine.system}"]
    if not machine.gpus:
        room = max(0, machine.ram_available - CPU_BASE_BYTES)
        # 16 bytes: fp32 weight, gradient and two AdamW states
        full, adapter = (format_count(room // size) for size in (16, 4))
        lines.append(
            f"  allows on the CPU: tuning.mode full up to about {full} parameters (16 bytes each), lora up to about"
            f" {adapter} (4 bytes each); `make plan CONFIG=` shows what a run really takes"
        )
    if machine.torch:
        build = machine.torch
        kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.hip}" if build.hip else "the CPU alone"
        archs = f": {' '.join(build.archs)}" if build.archs else ""
        lines.append(f"torch {build.version}, built for {kind}{archs}")
    libraries = (f"{name} {v}" for name, v in machine.libraries.items() if name != "torch")
    lines.append(f"Python {machine.python}, " + ", ".join(libraries))
    if "unsloth" in machine.libraries:
        lines.append(f"unsloth: {'not usable, ' + machine.unsloth_problem if machine.unsloth_problem else 'usable'}")
    return lines


def headline(gpu: Gpu) -> str:
    """Name and memory of one GPU, in one line."""
    used, free = format_bytes(gpu.used_bytes), format_bytes(gpu.free_bytes)
    return f"GPU {gpu.index}: {gpu.name}, {format_bytes(gpu.total_bytes)}: {used} used, {free} free"


def holders(gpu: Gpu) -> list[GpuProcess]:
    """The processes that hold the GPU's memory, largest first. Those that cannot be seen come last, as process 0."""
    visible = [process.used_bytes for process in gpu.processes]
    unseen = gpu.used_bytes - sum(size or 0 for size in visible)
    others = [GpuProcess(0, "", unseen)] if unseen > UNSEEN_BYTES and None not in visible else []
    return [*gpu.processes, *others]


def label(process: GpuProcess) -> str:
    """`python (4450)`; process 0 stands for those that cannot be seen."""
    return f"{process.name or 'process'} ({process.pid})" if process.pid else "processes that cannot be seen from here"

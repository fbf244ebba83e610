"""What the parent of a run decides about the GPUs before it starts the workers."""

from __future__ import annotations

from sftplay.config.schema.run import RunConfig
from sftplay.errors import MachineError
from sftplay.launch.command.command import one_gpu_environment
from sftplay.machine.doctor.gpu import check_build
from sftplay.machine.probe import Machine
from sftplay.plan.devices.layout import uses_several_gpus


def refuse_unusable(machine: Machine) -> None:
    """Refuse a launch on GPUs that the installed torch cannot use: it would train on the CPU with the GPUs' plan.

    Raises:
        MachineError: the driver is too old for torch's CUDA, or torch has no CUDA or no code for a GPU.
    """
    for finding in check_build(machine):
        if finding.level == "stop":
            fix = f"{finding.fix}; or train on the CPU: export CUDA_VISIBLE_DEVICES=-1"
            raise MachineError(finding.what, where=finding.subject, fix=fix)


def one_gpu_of(cfg: RunConfig, machine: Machine) -> dict[str, str]:
    """The variables that leave a run's single process the one GPU that it uses."""
    if uses_several_gpus(cfg):
        return {}
    return one_gpu_environment(machine.gpus, by_uuid=cfg.grpo.generation != "vllm_colocate")

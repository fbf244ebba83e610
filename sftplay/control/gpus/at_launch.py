"""What the parent of a run decides about the GPUs before it starts the workers."""

from __future__ import annotations

from sftplay.config.schema.run import RunConfig
from sftplay.launch.command.command import one_gpu_environment
from sftplay.machine.probe import Machine
from sftplay.plan.devices.layout import uses_several_gpus


def one_gpu_of(cfg: RunConfig, machine: Machine) -> dict[str, str]:
    """The variables that leave a run's single process the one GPU that it uses."""
    if uses_several_gpus(cfg):
        return {}
    return one_gpu_environment(machine.gpus, by_uuid=cfg.grpo.generation != "vllm_colocate")

"""What the parent of a run decides about the GPUs before it starts the workers."""

from __future__ import annotations

import os

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.launch.command.command import one_gpu_environment
from sftplay.machine.libraries import compiler_remedy, find_compiler_problem
from sftplay.machine.probe import Machine
from sftplay.plan.devices.layout import uses_several_gpus
from sftplay.plan.sizing.task_sizing import find_sizing

FIXED_DRIVER = "550.40.07"
"""From this driver on RTX 40 cards know that they cannot read each other's memory. accelerate 1.15 refuses several of
them with an older one (utils/environment.py, `check_cuda_p2p_ib_support`) unless `WITHOUT_PEERS` are set."""

WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def refuse_unusable(machine: Machine) -> None:
    """Refuse a launch on GPUs that the installed torch cannot use: it would train on the CPU with the GPUs' plan. Raise
    MachineError where the driver is too old for torch's CUDA, or torch has no CUDA or no code for a GPU.
    """
    if not machine.gpus:
        return
    from sftplay.machine.doctor.gpu import check_build

    for finding in check_build(machine):
        if finding.level == "stop":
            fix = f"{finding.fix}; or train on the CPU: export CUDA_VISIBLE_DEVICES=-1"
            raise MachineError(finding.what, where=finding.subject, fix=fix)


def refuse_missing_compiler(cfg: RunConfig, machine: Machine) -> None:
    """Refuse a run on GPUs whose first step needs kernels that Triton cannot build here.

    Task grpo does without: `avoid_triton` in train.upstream. Raise MachineError where there is no C compiler, or
    Python's headers are missing.
    """
    key, is_compiled, other = find_sizing(cfg).compiled(cfg)
    if machine.gpus and is_compiled and (problem := find_compiler_problem()):
        where = f"{cfg.origins.get(key, 'chosen automatically')} {key}"
        what = f"{cfg.get_value(key)} needs kernels that Triton builds, and {problem}"
        raise MachineError(what, where=where, fix=f"{compiler_remedy()}, or write {key}: {other}")


def gpu_settings(cfg: RunConfig, machine: Machine, *, processes: int) -> dict[str, str]:
    """Return the variables that the workers need for the GPUs of this machine. The user's own stay."""
    alone: dict[str, str] = {}
    if processes == 1 and not uses_several_gpus(cfg):
        alone = one_gpu_environment(machine.gpus, by_uuid=cfg.grpo.generation != "vllm_colocate")
    cards = [gpu.name for gpu in machine.gpus if "RTX 40" in gpu.name]
    missing = {name: value for name, value in WITHOUT_PEERS.items() if name not in os.environ}
    if not (cards and missing and machine.driver):
        return alone
    from sftplay.machine.doctor.install import is_within

    if is_within(machine.driver, f">={FIXED_DRIVER}"):
        return alone
    names = " and ".join(missing)
    log.say(
        f"{cards[0]} with driver {machine.driver}, older than {FIXED_DRIVER}: {names} set, for accelerate asks for it"
    )
    return {**alone, **missing}

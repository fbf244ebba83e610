"""Decides who opens and adapts the model, from what the machine says of unsloth; imports neither."""

from __future__ import annotations

from sftplay.config.rules.cluster import BACKEND, unsloth_conflicts
from sftplay.config.schema.run import RunConfig
from sftplay.errors import MachineError
from sftplay.machine.probe import Machine

FIX = f"`make train-unsloth` builds and uses an environment that has it; or write {BACKEND}: bnb"


def choose_backend(cfg: RunConfig, machine: Machine, world_size: int) -> tuple[str, str]:
    """`bnb` or `unsloth`, and why.

    Raises:
        MachineError: unsloth is asked for and cannot be used. It is never replaced in silence.
    """
    wanted = cfg.tuning.backend
    if wanted == "bnb":
        return "bnb", "as given"
    obstacle, fix = _obstacle(cfg, machine, world_size)
    if wanted == "auto":
        if obstacle:
            return "bnb", f"unsloth is not taken: {obstacle}"
        if not machine.gpus:
            return "bnb", "unsloth is installed, but without a GPU it computes with the same libraries"
        return "unsloth", "it is installed, there is a GPU, and every library is within the versions it asks for"
    if obstacle:
        where = f"{cfg.origins.get(BACKEND, 'default')} {BACKEND}"
        raise MachineError(f"unsloth cannot be used: {obstacle}", where=where, fix=fix)
    return "unsloth", "as given"


def _obstacle(cfg: RunConfig, machine: Machine, world_size: int) -> tuple[str, str]:
    """What stands in unsloth's way and what to do about it; two empty words when nothing does."""
    for conflict in unsloth_conflicts(cfg):
        return f"{conflict.keys[0]}: {conflict.what}", conflict.fix
    if world_size > 1:
        # Not tried here with several GPUs, and its own source calls that a beta.
        return f"it trains in one process, not in {world_size}", f"use one process, or write {BACKEND}: bnb"
    return machine.unsloth_problem, FIX

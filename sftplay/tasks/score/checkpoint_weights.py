"""The checkpoint file of all trained weights and of the target critic, exact to the bit.

It leaves out a solver that trains in full: the Trainer saves that one.
"""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

from sftplay import log
from sftplay.errors import RunError
from sftplay.tasks.score.role_models import RoleModels
from sftplay.tasks.score.shards import copy_into, gather_tensor

WEIGHTS_FILE = "score.safetensors"


def save_weights(role_models: RoleModels, checkpoint: Path) -> None:
    """Write the file. Every rank must call it."""
    weights = {}
    for name, parameter in role_models.find_checkpoint_weights().items():
        whole = gather_tensor(parameter.detach())
        if log.is_main():
            weights[name] = whole.contiguous()
    if log.is_main():
        save_file(weights, checkpoint / WEIGHTS_FILE)


def load_weights(role_models: RoleModels, checkpoint: Path) -> None:
    """Load the weights of the file, on the devices where they lie. Every rank must call it.

    Raises:
        RunError: the file is missing.
    """
    path = checkpoint / WEIGHTS_FILE
    if not path.is_file():
        fix = "continue from a checkpoint of task mode score"
        raise RunError("the checkpoint has no weights of solver and guide", where=str(path), fix=fix)
    weights = role_models.find_checkpoint_weights()
    for name, whole in load_file(path).items():
        copy_into(whole, weights[name])

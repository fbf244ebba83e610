"""The file of a checkpoint with everything that trains, and the critic's slow copy, exact to the bit.

A solver all of whose weights train is not in it: the Trainer keeps that itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sftplay import log
from sftplay.errors import RunError
from sftplay.tasks.score.role_models import Cast
from sftplay.tasks.score.shards import gathered, put

FILE = "score.safetensors"


def save_weights(cast: Cast, checkpoint: Path) -> None:
    """Write the file. Every rank must call it."""
    weights = {}
    for name, parameter in cast.kept_weights().items():
        whole = gathered(parameter.detach())
        if log.is_main():
            weights[name] = whole.contiguous()
    if log.is_main():
        save_file(weights, checkpoint / FILE)


def load_weights(cast: Cast, checkpoint: Path) -> None:
    """Take the weights of the file, each where it lies. Every rank must call it.

    Raises:
        RunError: there is no such file.
    """
    path = checkpoint / FILE
    if not path.is_file():
        fix = "continue from a checkpoint of task mode score"
        raise RunError("the checkpoint has no weights of solver and guide", where=str(path), fix=fix)
    mine = cast.kept_weights()
    with torch.no_grad():
        for name, weight in load_file(path).items():
            put(weight, mine[name])

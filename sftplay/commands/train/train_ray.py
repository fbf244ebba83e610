"""The verb `train-ray`: `train` with its processes placed by Ray."""

from __future__ import annotations

import os
from argparse import Namespace

from sftplay.commands.train.train import train
from sftplay.errors import ConfigError
from sftplay.launch.command.ray_command import ADDRESS
from sftplay.log import CLUSTER_NAMES


def train_ray(args: Namespace) -> int:
    """`train-ray`: train on the cluster of RAY_ADDRESS, or on one that is started here.

    Raises:
        ConfigError: this is one process of another launch, or a single worker is asked for.
    """
    if numbers := [name for name in args.strays if name in CLUSTER_NAMES or name.startswith("TORCHELASTIC_")]:
        what = f"this is a process of another launch, which has set {', '.join(numbers)}"
        raise ConfigError(what, where="train-ray", fix="call it once, from a shell that no launcher has started")
    if args.workers == 1:
        raise ConfigError("one process needs no Ray", where="--workers", fix="use `make train`, or ask for --workers 2")
    args.overrides.append("cluster.launcher=ray")
    args.nproc, args.nnodes, args.node_rank, args.master_addr, args.master_port = str(args.workers), 1, 0, "", None
    args.documents, args.is_elsewhere = False, ADDRESS in os.environ
    return train(args)

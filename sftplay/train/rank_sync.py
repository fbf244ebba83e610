"""The ranks of a run wait for one another: without a limit before there is a process group, then `cluster.timeout`.

Before there is a process group the ranks wait for files, because nothing else connects them. Only the launcher ends a
rank that waits there, when another one has failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from transformers import TrainerCallback

from sftplay import log
from sftplay.launch.run_folder import RunFolder
from sftplay.launch.variables import PARENT

POLL_S = 0.1  # pause between two checks for a file


@contextmanager
def first_of_node(folder: RunFolder) -> Iterator[bool]:
    """Let the first rank of each node go through the body before the others; True where others wait for this one.

    The caches that it fills may belong to the node. When the body fails, the others stay outside and their launcher
    ends them, so the error is printed once.
    """
    is_first, marker = log.local_rank() == 0, marker_path(folder.logs)
    if is_first:
        (folder.logs / f".ready-{log.rank()}").unlink(missing_ok=True)
    if log.world_size() == 1:
        yield False
        return
    if is_first:
        marker.unlink(missing_ok=True)
    else:
        while not marker.exists():
            time.sleep(POLL_S)
    yield is_first
    if is_first:
        marker.touch()


def marker_path(logs: Path) -> Path:
    """Return the file by which the first rank of this node says that it is through, in this launch.

    The name has the node's first rank, because nodes share the folder, and the parent's pid, because another start must
    not find it. If both are equal by chance, the ranks only queue for the caches' locks in any order.
    """
    return logs / f".prepared-{log.rank() - log.local_rank()}-{os.environ.get(PARENT) or os.getppid()}"


def wait_for_nodes(folder: RunFolder) -> None:
    """Wait without a limit until the ranks of every node have come here. What follows, the rendezvous, has a limit.

    Raises:
        SystemExit: with the run's exit code, when a rank has ended before; that rank has said why.
    """
    here = log.local_ranks()
    if len(here) == log.world_size():
        return
    for first in range(0, log.world_size(), len(here)):
        marker = folder.logs / f".ready-{first}"
        if log.rank() == first:
            marker.touch()
        wait_for_main(marker, folder)


def wait_for_main(path: Path, folder: RunFolder) -> None:
    """Wait until the main rank, or another one, has written `path`.

    Raises:
        SystemExit: with the run's exit code, when a rank has ended before; that rank has said why.
    """
    while not path.exists():
        time.sleep(POLL_S)
        code = folder.read_json("status.json").get("exit_code")
        if code is not None:  # on another node, whose launcher ends only its own
            raise SystemExit(code)


class GroupTimeout(TrainerCallback):
    """Sets the time limit of every process group once there is one, and removes the node's marker.

    The Trainer gives its `ddp_timeout` to the process group, but not on CPUs, and not to the further groups of
    DeepSpeed and FSDP, which have torch's own limits (10 minutes with NCCL).
    """

    def __init__(self, timeout_s: int, logs: Path) -> None:
        self.timeout_s, self.logs = timeout_s, logs

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not torch.distributed.is_initialized():
            return
        for group in list(distributed_c10d._world.pg_map):  # torch 2.13 has no public list of groups
            distributed_c10d._set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        if log.local_rank() == 0:
            marker_path(self.logs).unlink(missing_ok=True)

"""One rank of a run inside a worker of Ray: it starts the kit's own worker and waits for it.

Ray calls a training function in a thread, where Python cannot handle signals. A process of its own also stands in no
connection with Ray's changes to `print` and to the environment of torch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from sftplay.launch.run_folder import PARENT
from sftplay.machine.ports import free_port
from sftplay.signals import popen_tied

POLL_S = 0.2

STOP = "ray.stop"  # in the run's folder, for ranks on other machines: the signal with which the run has to stop


class RankEnded(Exception):
    """A rank has not ended with 0. The text is that of torchrun's list of failed ranks, which `exit_cause` reads."""


class Uneven(Exception):
    """The nodes have different numbers of ranks. The kit's ranks find one another by the same number on each."""


def run_rank(task: dict[str, Any]) -> None:
    """Run `task["worker"]`, a module and a run's folder, as this rank of Ray's group.

    Raises RankEnded if it fails, after which Ray ends the other ranks; Uneven if nodes differ in their number of ranks.
    """
    import ray
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context = get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    here = context.get_local_world_size()
    meeting = (task["address"] or ray.util.get_node_ip_address(), free_port(0), here) if rank == 0 else None
    address, port, there = broadcast_from_rank_zero(meeting)
    if here != there:
        raise Uneven(f"Ray has placed {there} workers on one node and {here} on another")
    module, folder = task["worker"]
    numbers = {
        "RANK": rank, "WORLD_SIZE": context.get_world_size(), "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": address, "MASTER_PORT": port,
        PARENT: os.getppid(),  # Ray's own process of this node, as the same for all of its ranks
    }  # fmt: skip
    env = {**task["env"], **{name: str(value) for name, value in numbers.items()}}
    process = popen_tied([sys.executable, "-m", module, folder], output=1, env=env, cwd=Path(task["cwd"]))
    sent, note = 0, Path(folder, STOP)
    while process.poll() is None:
        time.sleep(POLL_S)
        if note.exists() and (number := int(note.read_text())) != sent:
            process.send_signal(signal.Signals(number))
            sent = number
    if process.returncode:
        raise RankEnded(
            f"\nrank      : {rank} (local_rank: {local_rank})\nexitcode  : {process.returncode} (pid: {process.pid})"
        )

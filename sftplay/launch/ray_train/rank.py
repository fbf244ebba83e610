"""One rank of a run inside a worker of Ray, which starts the kit's own worker; and the run's generation server.

Ray calls a training function in a thread, where Python cannot handle signals. A process of its own also stands in no
connection with Ray's changes to `print` and to the environment of torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.launch.generation_server import HOLDER_ENDING_S, ServerProcess
from sftplay.launch.run_folder import PARENT, RunFolder
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
    process = popen_tied([task["python"], "-m", module, folder], output=1, env=env, cwd=Path(task["cwd"]))
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


LOG, ADDRESS_FILE = "generation_server.log", "generation_server.url"
"""In the run's folder of logs, which all machines see."""

ANSWER_S = 60.0


class Host(ServerProcess):
    """Holds the server on its node. It runs in a process of Ray."""

    def __init__(self, task: dict[str, Any]) -> None:
        import ray

        logs, node = Path(task["logs"]), task["address"] or ray.util.get_node_ip_address()
        super().__init__(
            Path(task["config"]), logs / ADDRESS_FILE, log_file=logs / LOG, options=["--node", node], env=task["env"],
            cwd=Path(task["cwd"]),
        )  # fmt: skip


@contextmanager
def placed_server(
    cfg: RunConfig, folder: RunFolder, *, task: dict[str, Any], gpu: bool, limit_s: float
) -> Iterator[Callable[[], tuple[int | None, str]]]:
    """Hold the server in its bundle until the block ends; yield the server's `ServerProcess.look`.

    Its code is -1 where the server's process of Ray has gone. `task` names the folder and the variables of the
    processes. Raises MachineError if Ray has no place for it.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = cfg.grpo.vllm.tensor_parallel if gpu else 0
    group = placement_group([{"CPU": 1, **({"GPU": gpus} if gpus else {})}])

    def look() -> tuple[int | None, str]:
        try:
            code, url = ray.get(host.look.remote(), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:  # the machine is busy
            return None, ""
        except ray.exceptions.RayActorError:
            return -1, ""
        return code, url

    try:
        if not group.wait(limit_s):
            what = f"Ray has no place for the generation server: a CPU and {gpus} GPUs of one node"
            raise MachineError(what, where="grpo.generation", fix="ask for fewer WORKERS, or use a larger cluster")
        options = {"num_cpus": 1, "num_gpus": gpus, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0)}
        logs = folder.logs.absolute()
        logs.mkdir(exist_ok=True)
        files = {"logs": str(logs), "config": str(folder.resolved.absolute())}
        host = ray.remote(Host).options(**options).remote({**task, **files})
        try:
            yield look
        finally:
            with suppress(ray.exceptions.RayError):
                ray.get(host.end.remote(), timeout=2 * HOLDER_ENDING_S)
            ray.kill(host)
    finally:
        remove_placement_group(group)

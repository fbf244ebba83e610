"""The generation server of a run under Ray: a bundle of its own with its GPUs, and an actor there that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import MachineError
from sftplay.launch.generation_server import HOLDER_ENDING_S, ServerProcess
from sftplay.launch.run_folder import RunFolder

LOG, ADDRESS_FILE = "generation_server.log", "generation_server.url"
"""In the run's folder of logs, which all machines see."""

ANSWER_S = 60.0


class Host(ServerProcess):
    """Holds the server on its node. It runs in a process of Ray."""

    def __init__(self, task: dict[str, Any]) -> None:
        import ray

        logs, node = Path(task["logs"]), task["address"] or ray.util.get_node_ip_address()
        super().__init__(
            Path(task["config"]), logs / ADDRESS_FILE, log=logs / LOG, options=["--node", node], env=task["env"],
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

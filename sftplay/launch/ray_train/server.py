"""The generation server of a run under Ray: a bundle of its own with its GPUs, and an actor there that holds it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sftplay.config.run import RunConfig
from sftplay.errors import MachineError, RunError
from sftplay.launch.generation_server import host_command
from sftplay.launch.run_folder import RunFolder
from sftplay.signals import popen_tied

LOG, ADDRESS_FILE = "generation_server.log", "generation_server.url"
"""In the run's folder of logs, which all machines see."""

POLL_S, ANSWER_S, ENDING_S = 0.5, 60.0, 40.0


class Host:
    """Holds the server on its node. It runs in a process of Ray."""

    def __init__(self, task: dict[str, Any]) -> None:
        import ray

        logs = Path(task["logs"])
        self._address = logs / ADDRESS_FILE
        self._address.unlink(missing_ok=True)
        node = task["address"] or ray.util.get_node_ip_address()
        command = [*host_command(Path(task["config"]), self._address), "--node", node]
        with (logs / LOG).open("ab", buffering=0) as log:
            self._process = popen_tied(command, output=log, env=task["env"], cwd=Path(task["cwd"]))

    def look(self) -> tuple[int | None, str]:
        """The server's exit code, None while it runs; and its address, empty until it answers."""
        return self._process.poll(), self._address.read_text() if self._address.exists() else ""

    def end(self) -> None:
        for end in (self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
                break
        self._address.unlink(missing_ok=True)


class Server:
    """The server as the driver sees it."""

    def __init__(self, host: Any) -> None:
        self._host, self.url = host, ""

    def code(self) -> int | None:
        """The exit code of a server that has ended, -1 where its process of Ray has gone; None while it runs."""
        import ray

        try:
            code, self.url = ray.get(self._host.look.remote(), timeout=ANSWER_S)
        except ray.exceptions.GetTimeoutError:  # the machine is busy
            return None
        except ray.exceptions.RayActorError:
            return -1
        return code

    def await_address(self, stop: Path) -> None:
        """Wait until the server answers, or `stop` is there: a stop of the run.

        Raises MachineError if it was not ready in time, or cannot start; RunError if it has ended.
        """
        while (code := self.code()) is None and not self.url and not stop.exists():
            time.sleep(POLL_S)
        if code is not None:
            raise lost(code, "before it was ready", kind=MachineError if code == MachineError.exit_code else RunError)


def lost(code: int | None, when: str, *, kind: type[MachineError | RunError] = RunError) -> MachineError | RunError:
    """What is said of a server that has ended."""
    return kind(
        f"the generation server has ended with {code} {when}", where="grpo.generation", fix=f"look at logs/{LOG}"
    )


@contextmanager
def placed_server(
    cfg: RunConfig, folder: RunFolder, *, task: dict[str, Any], gpu: bool, limit_s: float
) -> Iterator[Server]:
    """The server in its bundle; it is ended with the block. `task` names the folder and the variables of the processes.

    Raises MachineError if Ray has no place for it.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    gpus = cfg.grpo.vllm.tensor_parallel if gpu else 0
    group = placement_group([{"CPU": 1, **({"GPU": gpus} if gpus else {})}])
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
            yield Server(host)
        finally:
            with suppress(ray.exceptions.RayError):
                ray.get(host.end.remote(), timeout=2 * ENDING_S)
            ray.kill(host)
    finally:
        remove_placement_group(group)

"""Starts a run's ranks by Ray Train and waits for them: on the cluster of RAY_ADDRESS, or on one of its own here.

`launch.command` describes its command; the run's parent follows it as it follows torchrun, and is the one that starts a
run again. Ray's checkpoints are not used: a run continues from its own folder.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.load import load_resolved
from sftplay.errors import MachineError, RunError
from sftplay.launch.command import ADDRESS, read_request
from sftplay.launch.generation_server import (
    FollowedServer,
    client_environment,
    find_worker_python,
    starts_server,
)
from sftplay.launch.processes import ROOT_CAUSE
from sftplay.launch.ray_train.rank import STOP, Uneven, placed_server, run_rank
from sftplay.launch.run_folder import PASSED_ON, RunFolder
from sftplay.signals import catch_signals

OBJECT_STORE_BYTES = 10**8  # Ray's memory for objects. The ranks exchange nothing by it.
LOOPBACK = "127.0.0.1"

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",  # otherwise a line that two ranks write is held back for seconds
    "RAY_COLOR_PREFIX": "0",
}

PREFIX = re.compile(r"^(?:\x1b\[[0-9;]*m)*\([^()]*\)(?:\x1b\[[0-9;]*m)* (?=[\x1c-\x1e])")
"""What Ray puts before a line of a rank, where the line is marked for the user's screen (`log`)."""


NOISE = "State API may be temporarily unavailable"  # Ray says it every second where it has no dashboard


class _Lines:
    """A stream of whole lines, without Ray's prefix before the kit's own."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._rest = stream, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if NOISE not in line:
                self._stream.write(PREFIX.sub("", line) + "\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main(words: list[str]) -> int:
    """Run the ranks to their end: 0, or the code of a machine or a run that has failed."""
    request = read_request(words)
    folder, received = RunFolder(Path(request.worker[1])), list[int]()
    stop = folder.path / STOP
    stop.unlink(missing_ok=True)
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(request.start_timeout)
    sys.stdout, sys.stderr = _Lines(sys.stdout), _Lines(sys.stderr)

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        write_text(stop, str(number))

    try:
        with _cluster(request):
            catch_signals(on_signal)  # ray.init sets its own
            return _fit(request, folder, received=received)
    except (MachineError, RunError) as error:
        folder.update_status(state="failed", exit_code=error.exit_code, error=error.as_json())
        log.show_error(str(error))
        return error.exit_code


@contextmanager
def _cluster(request: Namespace) -> Iterator[None]:
    """Be connected to the cluster of RAY_ADDRESS (else MachineError), or to our own on the loopback address."""
    address = os.environ.get(ADDRESS)
    if not address:
        # Ray would write a token of its own into the home folder. Whoever has it can run code here.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray  # it reads these variables while it is imported

    if address:
        try:
            ray.init(address=address)
        except (ConnectionError, ray.exceptions.RayError, RuntimeError) as error:
            fix = "start the cluster (ray start --head), or correct the address"
            raise MachineError(f"no cluster answers: {error}", where=f"{ADDRESS}={address}", fix=fix) from None
        yield
        return
    cpus = max(os.cpu_count() or 1, round(request.workers * request.resources.get("CPU", 1)) + 1)  # 1: a server
    with TemporaryDirectory(prefix="sftplay-ray-", ignore_cleanup_errors=True) as session:  # a short path: sockets
        ray.init(
            address="local", num_cpus=cpus, num_gpus=None if request.gpu else 0, include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES, _node_ip_address=LOOPBACK, _temp_dir=session,
        )  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()


def _fit(request: Namespace, folder: RunFolder, *, received: list[int]) -> int:
    import ray

    if not request.gpu and ray.cluster_resources().get("GPU"):
        fix = "type the command on a node with a GPU, for which the run is planned then"
        raise MachineError("this machine has no GPU, and the cluster has", where=ADDRESS, fix=fix)
    names = os.environ.get(PASSED_ON, "").split()
    env = {name: os.environ[name] for name in names if name in os.environ}
    cfg = load_resolved(folder.resolved)
    task = {"cwd": str(Path.cwd()), "address": "" if os.environ.get(ADDRESS) else LOOPBACK, "env": env}
    task["python"] = find_worker_python(cfg)
    if not starts_server(cfg):
        return _fit_ranks(request, folder, task=task)
    with placed_server(cfg, folder, task=task, gpu=request.gpu, limit_s=request.start_timeout) as look:
        server = FollowedServer(look, is_stopping=lambda: bool(received))
        if not (url := server.await_address()):
            return 128 + received[0]
        task["env"] = {**env, **client_environment(url, os.environ)}
        return _fit_ranks(request, folder, task=task, server=server)


def _fit_ranks(
    request: Namespace, folder: RunFolder, *, task: dict[str, Any], server: FollowedServer | None = None
) -> int:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.api.exceptions import ControllerError

    class Shared(Backend):
        share_cuda_visible_devices = True  # a rank takes the GPU by its number on the node

    class Plain(BackendConfig):
        """No process group in Ray's workers: it would take memory of each GPU. The ranks form their own."""

        @property
        def backend_cls(self) -> type[Backend]:
            return Shared

    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={**task, "worker": request.worker},
        backend_config=Plain(),
        scaling_config=ScalingConfig(
            num_workers=request.workers, use_gpu=request.gpu, placement_strategy=request.placement,
            resources_per_worker={**request.resources, **({"GPU": 1} if request.gpu else {})} or None,
        ),
        run_config=RunConfig(
            name="ray", storage_path=str(folder.logs.absolute()),
            failure_config=FailureConfig(max_failures=0, controller_failure_limit=0, max_preemption_failures=0),
        ),
    )  # fmt: skip
    with ThreadPoolExecutor(1) as threads:  # in the main thread Ray would end the ranks at Ctrl-C, without a checkpoint
        try:
            fitting = threads.submit(trainer.fit)
            if server:
                server.follow(
                    wait=lambda seconds: bool(wait([fitting], seconds).done),
                    stop=lambda number: write_text(folder.path / STOP, str(int(number))),
                )
                server.check()
            fitting.result()
        except ControllerError as error:
            fix = "look at logs/launch.log; ask for less with WORKERS= and --resources, or wait longer: --start-timeout"
            raise MachineError("Ray could not place the processes", where=str(folder.path), fix=fix) from error
        except TrainingFailedError as error:
            if Uneven.__name__ in str(error):
                fix = "ask for as many processes as fill whole nodes, or --placement STRICT_SPREAD"
                what = "Ray has placed more processes on one node than on another"
                raise MachineError(what, where="WORKERS", fix=fix) from error
            print(f"{ROOT_CAUSE}\n{error}")
            return RunError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

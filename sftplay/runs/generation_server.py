"""The generation server that `make train` starts on its own machine, where SLURM and Ray take another node."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import MachineError, RunError
from sftplay.launch.command import Launch
from sftplay.launch.follow import follow
from sftplay.launch.generation_server import (
    URL,
    FollowedServer,
    ServerProcess,
    client_environment,
    starts_server,
)
from sftplay.launch.processes import Death
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import HOST
from sftplay.machine.probe import find_gpus

NOTICED_S = 3.0
"""How long after its workers a generation server may be seen to have ended, which they have failed for want of."""


def choose_follow(cfg: RunConfig, args: Namespace) -> Callable[..., int]:
    """Return what follows the workers: with a server where none is named, and SLURM and Ray have started none."""
    is_elsewhere = bool(os.environ.get(URL)) or (cfg.cluster.launcher == "ray" and args.nproc not in (None, "", "1"))
    if not starts_server(cfg) or is_elsewhere or args.node_rank:
        return follow
    return partial(follow_with_server, cfg=cfg, nnodes=args.nnodes)


def follow_with_server(
    command: Launch, folder: RunFolder, *, cfg: RunConfig, nnodes: int, check_nodes: Callable[[], None] | None = None
) -> int:
    """Follow the workers next to a generation server on this machine: neither outlives the other. Raise MachineError or
    RunError where the server never answers.
    """
    processes = folder.read_json("plan.json")["world_size"] // nnodes
    own_env, log_file = server_gpus(cfg, processes), folder.logs / "generation_server.log"
    log.say("starting the generation server, which takes a minute; its own lines go to logs/generation_server.log")
    process = ServerProcess(
        folder.resolved, log_file.with_suffix(".url"), log_file=log_file, options=["--node", HOST], env=own_env
    )
    server = FollowedServer(process.look, is_stopping=lambda: False)

    def check_server() -> None:
        code, _ = process.look()
        if code is not None:  # the trainers may be started again with another one
            what = f"the generation server has ended with {code} while the run trained"
            raise Death(what, where="grpo.generation", fix="look at logs/generation_server.log, then `make resume`")

    def check() -> None:
        check_server()
        if check_nodes:
            check_nodes()

    try:
        url = server.await_address()
        log.say(f"the generation server answers at {url}")
        env = {**command.env, **client_environment(url, os.environ)}
        exit_code = follow(replace(command, env=env), folder, check_nodes=check)
        if exit_code == RunError.exit_code:  # the worker may have noticed first
            server.await_end(NOTICED_S)
            try:
                check_server()
            except Death as error:
                folder.update_status(error=error.as_json())
        return exit_code
    finally:
        process.end()


def server_gpus(cfg: RunConfig, processes: int) -> dict[str, str]:
    """Return what leaves the server the GPUs behind those that train. Raise MachineError where too few are left."""
    gpus, need = find_gpus()[0], cfg.grpo.vllm.tensor_parallel
    if not gpus:
        return {}
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(n) for n in range(len(gpus)))
    left = numbers.split(",")[processes:]
    if len(left) < need:
        what = f"{processes} of {len(gpus)} GPUs train, and the server needs {need} of its own"
        fix = "ask for fewer processes, name a server by grpo.vllm.url, or write grpo.generation: vllm_colocate"
        raise MachineError(what, where="grpo.generation", fix=fix)
    return {"CUDA_VISIBLE_DEVICES": ",".join(left[:need])}

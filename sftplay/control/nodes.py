"""Runs of several nodes: found to be alike before anything starts, led by node 0, joined by the others.

Node 0 decides, makes the run's folder and says how the run ended; the others start their processes for it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sftplay import __version__, log
from sftplay.config.load import load_config
from sftplay.config.rules.resume_keys import flatten
from sftplay.config.schema.run import RunConfig
from sftplay.control.inputs import check_inputs
from sftplay.control.start import build_command, read_scale
from sftplay.control.strategy_setup import make_ready, with_deepspeed
from sftplay.data.read.sources import content_digest, is_hub_name
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.launch.command.command import Scale
from sftplay.launch.nodes.compare import check_nodes_match
from sftplay.launch.nodes.join import await_ready, check_folder, join_run, watch_nodes
from sftplay.launch.nodes.rendezvous import Over, Rendezvous
from sftplay.launch.supervise.exit_cause import find_death
from sftplay.launch.supervise.follow import follow, log_name
from sftplay.machine.probe import Machine, library_versions, probe
from sftplay.model.digests import weights_digests
from sftplay.units import format_bytes

GLANCE_BYTES, GLANCES = 2**26, 64
"""Of weights: up to 64 MiB a file is read whole, of a larger one 64 MiB, so that large models do not hold nodes up."""

ENDING_S = 10.0
"""How long node 0 waits to hear how the other nodes have ended, once it has failed."""


def among_nodes(args: Namespace, work: Callable[[Rendezvous | None], int]) -> int:
    """Do `work` on the only node, or on node 0 of several that are alike; the others join the run it starts.

    Raises:
        SftplayError: a node is missing, differs, or has met an error; the same one on every node.
    """
    if args.nnodes == 1 or args.dry_run:
        return work(None)
    machine = probe()
    scale = read_scale(args, machine)
    log.say(
        f"node {scale.node_rank} of {scale.nnodes}: waiting for the others at {scale.master_addr}:{scale.master_port}"
    )
    with Rendezvous(scale) as rendezvous:
        report = describe_node(args, scale, machine=machine)
        try:
            check_nodes_match(rendezvous.gather({**describe_network(rendezvous, machine, report=report), **report}))
            if not rendezvous.is_host:
                return _join(rendezvous, machine)
        except Over as over:
            return over.code
        code = work(rendezvous)
        if code in (SftplayError.exit_code, RunError.exit_code):
            _tell_endings(rendezvous)
        return rendezvous.end(code)


def _tell_endings(rendezvous: Rendezvous) -> None:
    """Say how other nodes have ended, some of which may have begun it."""
    deadline = time.monotonic() + ENDING_S
    while len(endings := rendezvous.endings()) < rendezvous.scale.nnodes - 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    for node, how in endings.items():
        log.say(f"node {node}: {how}")


def _join(rendezvous: Rendezvous, machine: Machine) -> int:
    """Start this node's processes of the run that node 0 has begun; the run's exit code."""
    folder, digest = join_run(rendezvous)
    command, problem = None, None
    try:
        check_folder(folder, digest)
        cfg = load_config(folder.resolved)
        command = build_command(cfg, folder, scale=rendezvous.scale, machine=machine)
        make_ready(cfg, folder, command=command, node=rendezvous.scale.node_rank)
    except SftplayError as error:
        problem = error
    await_ready(rendezvous, problem)
    assert command is not None, "every problem is raised on all nodes"
    log.say(f"joined {folder.path}; node 0 shows how it goes on")
    node = rendezvous.scale.node_rank
    account = folder.logs / log_name(node)
    begins_at = account.stat().st_size if account.exists() else 0
    code = follow(command, folder, node=node, check_nodes=watch_nodes(rendezvous, folder))
    lines = account.read_bytes()[begins_at:].decode("utf-8", "replace").splitlines()
    return rendezvous.end(code, find_death(lines))


def describe_node(args: Namespace, scale: Scale, *, machine: Machine) -> dict[str, Any]:
    """What must be the same on all nodes, by the sections of `alike`; in place of config and files, an error met."""
    versions = {"python": platform.python_version(), "sftplay": kit_version(), **library_versions()}
    report: dict[str, Any] = {
        "host": socket.gethostname(),
        "launch": {"NNODES": scale.nnodes, "NPROC": scale.nproc, "what stands behind --": list(scale.launcher_args)},
        "versions": versions,
    }
    try:
        cfg = check_inputs(with_deepspeed(load_config(args.config, args.overrides), is_asked=args.deepspeed))
        files = describe_files(cfg)
    except SftplayError as error:
        return {**report, "error": error.as_json()}
    gpus = {} if isinstance(cfg.train.batch_size, int) else {"GPUs": describe_gpus(machine)}
    return {**report, "config": flatten(cfg), "files": files, "gpus": gpus}


def describe_gpus(machine: Machine) -> str:
    """The GPUs by which node 0 sizes the batch for all."""
    return ", ".join(f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in machine.gpus) or "none"


def describe_files(cfg: RunConfig) -> dict[str, str]:
    """Digests of what the run reads on this node, by config key; of a model's weights, by key and file."""
    found = {}
    for key in ("train_path", "val_path", "test_path"):
        path = getattr(cfg.data, key)
        if path is not None and not is_hub_name(path):
            found[f"data.{key}"] = content_digest(path)
    for key, given in (("data.template", cfg.data.template), ("cluster.deepspeed", cfg.cluster.deepspeed)):
        if given is not None and Path(given).is_file():
            found[key] = hashlib.sha256(Path(given).read_bytes()).hexdigest()
    for key, given in (("model.name", cfg.model.name), ("model.adapter", cfg.model.adapter)):
        digests = weights_digests(given, whole_bytes=GLANCE_BYTES, chunks=GLANCES)
        found |= {f"{key} ({Path(path).name})": digest for path, digest in digests.items()}
    return found


def kit_version() -> str:
    """The kit's version and a digest of its source: clones may stand at different commits."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__} (source {digest.hexdigest()[:12]})"


def describe_network(rendezvous: Rendezvous, machine: Machine, *, report: Mapping[str, Any]) -> dict[str, Any]:
    """An error where gloo would offer the other nodes an address that only this one can reach; empty otherwise.

    gloo takes the address of the host's own name (torch, `ProcessGroupGloo.cpp`, createDefaultDevice), which many
    systems give to the loopback. On GPUs it is used by FSDP only (accelerate's `state.py`); NCCL looks for an interface
    itself.
    """
    mine = rendezvous.own_address()
    config = report.get("config", {})
    is_named = "GLOO_SOCKET_IFNAME" in os.environ or config.get("cluster.nccl.socket_ifname")
    is_unused = machine.gpus and config.get("cluster.strategy") not in ("fsdp", "hsdp", "auto")
    if is_unused or is_named or mine.startswith("127.") or mine in ("::1", "localhost"):
        return {}
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "no address"
    if named != "no address" and not named.startswith("127."):
        return {}
    error = MachineError(
        f"this host's name leads to {named}, which the other nodes cannot reach",
        where=socket.gethostname(),
        fix=f"set cluster.nccl.socket_ifname to the interface of {mine} (`ip -br addr` lists them)",
    )
    return {"error": error.as_json()}

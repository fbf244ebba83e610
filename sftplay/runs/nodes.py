"""Runs of several nodes: the nodes are compared before anything starts, node 0 leads, the others join.

Node 0 decides, makes the run's folder and reports how the run ended. The others start their processes for it.
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
from sftplay.config.data import row_paths
from sftplay.config.keys import flatten
from sftplay.config.load import load_config
from sftplay.config.run import RunConfig
from sftplay.data.cache import content_digest
from sftplay.data.read import is_hub_name
from sftplay.errors import MachineError, RunError, SftplayError
from sftplay.launch.command import Scale
from sftplay.launch.follow import follow, log_name
from sftplay.launch.nodes import (
    Rendezvous,
    RendezvousEnded,
    await_ready,
    check_folder,
    check_nodes_match,
    join_run,
    watch_nodes,
)
from sftplay.launch.processes import find_death
from sftplay.machine.probe import Machine, library_versions, probe
from sftplay.model.start_point import weights_digests
from sftplay.places import ROOT
from sftplay.runs.inputs import check_inputs
from sftplay.runs.start import build_command, read_scale
from sftplay.runs.strategy_setup import prepare_deepspeed, with_deepspeed
from sftplay.units import format_bytes

ENDING_S = 10.0
"""How long node 0 waits, after it has failed, for the other nodes to report how they ended."""


def among_nodes(args: Namespace, work: Callable[[Rendezvous | None], int]) -> int:
    """Do `work` on node 0. The other nodes must match it, and join the run that it starts. Where a node is missing,
    differs, or has met an error, every node raises the same SftplayError.
    """
    machine = probe()
    scale = read_scale(args, machine)
    host = f"{scale.master_addr}:{scale.master_port}"
    log.say(f"node {scale.node_rank} of {scale.nnodes}: waiting for the others at {host}")
    with Rendezvous(scale) as rendezvous:
        report = _describe_node(args, scale, machine=machine)
        try:
            check_nodes_match(rendezvous.gather({**describe_network(rendezvous, machine, report=report), **report}))
            if not rendezvous.is_host:
                return _join(rendezvous, machine)
        except RendezvousEnded as over:
            return over.code
        exit_code = work(rendezvous)
        if exit_code in (SftplayError.exit_code, RunError.exit_code):  # which may have begun on another node
            deadline = time.monotonic() + ENDING_S
            while len(endings := rendezvous.endings()) < scale.nnodes - 1 and time.monotonic() < deadline:
                time.sleep(0.1)
            for node, ending in endings.items():
                log.say(f"node {node}: {ending}")
        return rendezvous.end(exit_code)


def _join(rendezvous: Rendezvous, machine: Machine) -> int:
    """Start this node's processes of the run that node 0 has started; the run's exit code."""
    folder, digest = join_run(rendezvous)
    command, problem = None, None
    try:
        check_folder(folder, digest)
        cfg = load_config(folder.resolved)
        command = build_command(cfg, folder, scale=rendezvous.scale, machine=machine)
        prepare_deepspeed(cfg, folder, command=command, node=rendezvous.scale.node_rank)
    except SftplayError as error:
        problem = error
    await_ready(rendezvous, problem)
    assert command is not None, "every problem is raised on all nodes"
    log.say(f"joined {folder.path}; node 0 shows its progress")
    node = rendezvous.scale.node_rank
    log_file = folder.logs / log_name(node)
    offset = log_file.stat().st_size if log_file.exists() else 0
    exit_code = follow(command, folder, node=node, check_nodes=watch_nodes(rendezvous, folder))
    lines = log_file.read_bytes()[offset:].decode("utf-8", "replace").splitlines()
    return rendezvous.end(exit_code, find_death(lines))


def _describe_node(args: Namespace, scale: Scale, *, machine: Machine) -> dict[str, Any]:
    """What must be the same on all nodes, by section. An error replaces config and files."""
    report: dict[str, Any] = {
        "host": socket.gethostname(),
        "launch": {"NNODES": scale.nnodes, "NPROC": scale.nproc, "arguments after --": list(scale.launcher_args)},
        "versions": {"python": platform.python_version(), "sftplay": kit_version(), **library_versions()},
    }
    try:
        cfg = check_inputs(with_deepspeed(load_config(args.config, args.overrides), is_asked=args.deepspeed))
        files = describe_files(cfg)
    except SftplayError as error:
        return {**report, "error": error.as_json()}
    # Node 0 sizes the batch for all nodes by its own GPUs.
    names = ", ".join(f"{gpu.name} {format_bytes(gpu.total_bytes)}" for gpu in machine.gpus) or "none"
    gpus = {} if isinstance(cfg.train.batch_size, int) else {"GPUs": names}
    return {**report, "config": flatten(cfg), "files": files, "gpus": gpus}


def describe_files(cfg: RunConfig) -> dict[str, str]:
    """Return digests of the files that the run reads on this node, by config key; of weights, by key and file."""
    digests_by_key = {key: content_digest(path) for key, path in row_paths(cfg) if not is_hub_name(path)}
    for key, name in (("data.template", cfg.data.template), ("cluster.deepspeed", cfg.cluster.deepspeed)):
        if name is not None and Path(name).is_file():
            digests_by_key[key] = hashlib.sha256(Path(name).read_bytes()).hexdigest()
    for key, name in (("model.name", cfg.model.name), ("model.adapter", cfg.model.adapter)):
        # At most 64 MiB of each file of weights are read, in 64 chunks, so that large models cost no time.
        digests = weights_digests(name, whole_bytes=2**26, chunks=64)
        digests_by_key |= {f"{key} ({Path(path).name})": digest for path, digest in digests.items()}
    return digests_by_key


def kit_version() -> str:
    """Return the kit's version and a digest of its source, because clones may be at different commits."""
    digest, root = hashlib.sha256(), ROOT / "sftplay"
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{__version__} (source {digest.hexdigest()[:12]})"


def describe_network(rendezvous: Rendezvous, machine: Machine, *, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return an error where gloo would offer the other nodes an address that only this node can reach; else nothing.

    gloo takes the address of the host's own name (torch, `ProcessGroupGloo.cpp`, createDefaultDevice). On many systems
    that is the loopback address. On GPUs only FSDP uses gloo (accelerate's `state.py`); NCCL finds an interface itself.
    """
    address, host, config = rendezvous.own_address(), socket.gethostname(), report.get("config", {})
    is_named = "GLOO_SOCKET_IFNAME" in os.environ or config.get("cluster.nccl.socket_ifname")
    is_unused = machine.gpus and config.get("cluster.strategy") not in ("fsdp", "hsdp", "auto")
    if is_unused or is_named or address.startswith("127.") or address in ("::1", "localhost"):
        return {}
    try:
        named = socket.gethostbyname(host)
    except OSError:
        named = "no address"
    if named != "no address" and not named.startswith("127."):
        return {}
    what = f"this host's name leads to {named}, which the other nodes cannot reach"
    fix = f"set cluster.nccl.socket_ifname to the interface of {address} (`ip -br addr` lists them)"
    return {"error": MachineError(what, where=host, fix=fix).as_json()}

"""Finds ports of this machine on which nothing listens."""

from __future__ import annotations

import socket
from contextlib import suppress
from random import SystemRandom

from sftplay.errors import MachineError

HOST = "127.0.0.1"
PORTS_TRIED = 50

JOB_PORTS = range(10_000, 20_000)
"""The nodes of a SLURM job meet at a port by the number of the job, so that two jobs of a node do not take the same."""

QUIET = range(JOB_PORTS.stop, 29_500)
"""Ports that Linux and macOS give to no program by themselves (ip(7), ip_local_port_range): a port that is found
here may be used a minute later, when a model is loaded. Jobs of SLURM and Ray's workers have the ports below; torchrun,
runs over several machines and Kubernetes have those above."""

RENDEZVOUS_PORT = 29511  # port of a run over several nodes when none is given


def free_port(first: int) -> int:
    """The first port from `first` on which nothing listens; for 0 any one of `QUIET`. MachineError if none is free."""
    tried = range(first, first + PORTS_TRIED) if first else SystemRandom().sample(QUIET, PORTS_TRIED)
    for port in tried:
        if number := bound_port(port):
            return number
    if first:
        what, fix = f"no free port in {min(tried)}..{max(tried)}", "give another with PORT="
    else:
        what = f"none of {PORTS_TRIED} ports drawn from {min(QUIET)}..{max(QUIET)} is free"
        fix = "end the programs that listen there (ss -ltn lists the ports)"
    raise MachineError(what, where=HOST, fix=fix)


def bound_port(port: int) -> int | None:
    """The port's number if a program can listen on it now, None if not. For 0 the system chooses a free port."""
    with socket.socket() as probe, suppress(OSError, OverflowError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return int(probe.getsockname()[1])
    return None

"""What a run asks of Ray, as words of the driver's command. It does not import ray."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NoReturn

from sftplay.errors import ConfigError, MachineError
from sftplay.units import parse_seconds

DRIVER = "sftplay.launch.ray_train.driver"
KEY = "cluster.launcher"
ADDRESS = "RAY_ADDRESS"
"""Ray's own variable: the cluster to run on. Without it the driver starts a cluster on this machine."""


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fix = "write --placement SPREAD --resources CPU=4 --start-timeout 600 behind `--`; see docs/ray.md"
        raise ConfigError(message, where="the options for ray", fix=fix)


def read_request(words: Sequence[str]) -> Namespace:
    """The command as `workers`, `gpu`, `placement`, `resources`, `start_timeout`, `worker`, or ConfigError."""
    parser = _Parser(prog="ray", add_help=False, allow_abbrev=False)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--placement", choices=("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"), default="PACK")
    parser.add_argument("--resources", type=_resources, default={})
    parser.add_argument("--start-timeout", type=_seconds, default=300.0)
    parser.add_argument("-m", dest="worker", nargs=2, metavar=("MODULE", "RUN"))
    return parser.parse_args(words)


def ray_command(workers: int, options: Sequence[str], *, has_gpu: bool, environ: Mapping[str, str]) -> list[str]:
    """The driver's command for so many workers, with the user's `options`. Raises ConfigError, MachineError."""
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if tasks > 1 or ("SLURM_JOB_ID" in environ and ADDRESS not in environ):
        what = f"this is part of the SLURM job {environ.get('SLURM_JOB_ID', '')}, which places processes itself"
        fix = f"use `make submit` without ray; or start Ray in the job, set {ADDRESS}, and call this once"
        raise ConfigError(what, where=KEY, fix=fix)
    if find_spec("ray") is None:
        raise MachineError("the package ray is not installed", where=KEY, fix="make install EXTRAS=ray")
    words = ["--workers", str(workers), *(["--gpu"] if has_gpu else []), *options]
    custom = set(read_request(words).resources) - {"CPU"}
    if custom and ADDRESS not in environ:
        what = f"a cluster on this machine has no {', '.join(sorted(custom))}"
        raise ConfigError(what, where="--resources", fix=f"set {ADDRESS} to a cluster that has it, or leave it out")
    return [sys.executable, "-m", DRIVER, *words]


def _resources(text: str) -> dict[str, float]:
    amounts = {}
    for part in text.split(","):
        name, _, amount = part.partition("=")
        try:
            amounts[name.strip()] = float(amount)
        except ValueError:
            raise ArgumentTypeError(f"{part!r} is not NAME=NUMBER") from None
    if "GPU" in amounts:
        raise ArgumentTypeError("each worker has one whole GPU: two ranks of NCCL cannot share one")
    return amounts


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None

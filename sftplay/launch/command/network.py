"""`cluster.nccl` as the variables that NCCL, gloo and torch read in the workers. It starts nothing.

The names are those of NCCL's manual (Environment Variables) and of torch 2.13 (ProcessGroupNCCL.hpp and
FlightRecorder.hpp; docs, Distributed, for gloo). NCCL's own files, such as /etc/nccl.conf, come behind the environment.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from sftplay.config.schema.cluster import NcclConfig
from sftplay.config.schema.run import RunConfig
from sftplay.errors import ConfigError, ConfigErrors, nearest_names

SECTION = "cluster.nccl"

NCCL_NAMES = {
    "debug": "NCCL_DEBUG",
    "ib_disable": "NCCL_IB_DISABLE",
    "ib_hca": "NCCL_IB_HCA",
    "ib_gid_index": "NCCL_IB_GID_INDEX",
    "p2p_disable": "NCCL_P2P_DISABLE",
    "shm_disable": "NCCL_SHM_DISABLE",
    "flight_recorder": "TORCH_FR_BUFFER_SIZE",
}
"""Key -> the variable that takes its value; the interface has two, which spell it differently."""

DUMP = "TORCH_FR_DUMP_TEMP_FILE"
DUMPS = (DUMP, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""Beginning of the names of the flight recorder's files, and what it was called before."""


def nccl_environment(
    cfg: RunConfig, logs: Path, *, has_gpu: bool, given: Mapping[str, str], interfaces: Collection[str]
) -> dict[str, str]:
    """The variables of several processes for `cluster.nccl`; without a GPU only gloo's, which take NCCL's place there.

    `given` is the user's environment, which the config never overrides in silence; `interfaces` are this machine's.
    What NCCL's flight recorder has to tell goes to `logs`, where the user has named no other place.

    Raises:
        ConfigErrors: an interface is not there, or a variable is given with another value.
    """
    wanted = list(_wanted(cfg.cluster.nccl, has_gpu=has_gpu))
    problems = [*_missing(cfg, interfaces), *_contradictions(cfg, wanted, given=given)]
    if problems:
        raise ConfigErrors(problems)
    env = {name: value for _, name, value in wanted}
    if has_gpu and not set(DUMPS) & set(given):
        env[DUMP] = str(logs / "flight-recorder-rank")
    return env


def list_interfaces() -> list[str]:
    """Names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _wanted(nccl: NcclConfig, *, has_gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Key, variable and value of all that is set."""
    if names := _names(nccl):
        yield "socket_ifname", "GLOO_SOCKET_IFNAME", ",".join(names)
        if has_gpu:  # NCCL takes a name for a beginning of names: eth1 would be eth10 too
            yield "socket_ifname", "NCCL_SOCKET_IFNAME", "=" + ",".join(names)
    if not has_gpu:
        return
    for key, name in NCCL_NAMES.items():
        value = getattr(nccl, key)
        if value is not None:
            yield key, name, str(int(value)) if isinstance(value, bool) else str(value)
    if nccl.flight_recorder:
        yield "flight_recorder", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1"


def _names(nccl: NcclConfig) -> list[str]:
    return [name.strip() for name in nccl.socket_ifname.split(",")] if nccl.socket_ifname else []


def _missing(cfg: RunConfig, interfaces: Collection[str]) -> Iterator[ConfigError]:
    for name in _names(cfg.cluster.nccl):
        if name not in interfaces:
            what = f"this machine has no network interface {name!r}"
            fix = f"choose from {', '.join(interfaces)} (`ip -br addr` shows their addresses)"
            nearest = nearest_names(name, interfaces)
            yield ConfigError(what, where=_place(cfg, "socket_ifname"), fix=fix, nearest=nearest)


def _contradictions(
    cfg: RunConfig, wanted: list[tuple[str, str, str]], *, given: Mapping[str, str]
) -> Iterator[ConfigError]:
    for key, name, value in wanted:
        if name in given and given[name].removeprefix("=") != value.removeprefix("="):
            what = f"would set {name}={value}, but the environment has {name}={given[name]}"
            yield ConfigError(what, where=_place(cfg, key), fix=f"unset {name}, or remove {SECTION}.{key}")


def _place(cfg: RunConfig, key: str) -> str:
    dotted = f"{SECTION}.{key}"
    return f"{cfg.origins.get(dotted, 'cluster')} {dotted}"

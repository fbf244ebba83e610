"""`cluster.nccl` as the variables that NCCL, gloo and torch read in the workers. It starts nothing.

The names come from NCCL's manual (Environment Variables) and torch 2.13 (ProcessGroupNCCL.hpp and FlightRecorder.hpp;
docs, Distributed, for gloo). The environment overrides NCCL's own files, such as /etc/nccl.conf.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from sftplay.config.cluster import NcclConfig
from sftplay.config.run import RunConfig
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
"""Key -> the variable for its value. The key for the interface sets two variables, each with its own spelling."""

DUMP = "TORCH_FR_DUMP_TEMP_FILE"
DUMPS = (DUMP, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
"""The prefix of the flight recorder's files: the variable's present name and its former one."""


def nccl_environment(
    cfg: RunConfig, logs: Path, *, has_gpu: bool, environ: Mapping[str, str], interfaces: Collection[str]
) -> dict[str, str]:
    """The variables for `cluster.nccl` in a run of several processes. Without a GPU only gloo's, which replaces NCCL.

    `environ` is the user's environment, `interfaces` are this machine's. NCCL's flight recorder writes to `logs` unless
    the user's environment names another place. Raises ConfigErrors if an interface does not exist, or the environment
    has another value than the config.
    """
    settings = list(_settings(cfg.cluster.nccl, has_gpu=has_gpu))
    problems = [*_missing_interfaces(cfg, interfaces), *_contradictions(cfg, settings, environ=environ)]
    if problems:
        raise ConfigErrors(problems)
    env = {name: value for _, name, value in settings}
    if has_gpu and not set(DUMPS) & set(environ):
        env[DUMP] = str(logs / "flight-recorder-rank")
    return env


def list_interfaces() -> list[str]:
    """Names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _settings(nccl: NcclConfig, *, has_gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Key, variable and value of every setting."""
    if names := _interface_names(nccl):
        yield "socket_ifname", "GLOO_SOCKET_IFNAME", ",".join(names)
        if has_gpu:  # NCCL reads a name without "=" as a prefix: eth1 would match eth10 too
            yield "socket_ifname", "NCCL_SOCKET_IFNAME", "=" + ",".join(names)
    if not has_gpu:
        return
    for key, name in NCCL_NAMES.items():
        value = getattr(nccl, key)
        if value is not None:
            yield key, name, str(int(value)) if isinstance(value, bool) else str(value)
    if nccl.flight_recorder:
        yield "flight_recorder", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1"


def _interface_names(nccl: NcclConfig) -> list[str]:
    return [name.strip() for name in nccl.socket_ifname.split(",")] if nccl.socket_ifname else []


def _missing_interfaces(cfg: RunConfig, interfaces: Collection[str]) -> Iterator[ConfigError]:
    for name in _interface_names(cfg.cluster.nccl):
        if name not in interfaces:
            what = f"this machine has no network interface {name!r}"
            fix = f"choose from {', '.join(interfaces)} (`ip -br addr` shows their addresses)"
            nearest = nearest_names(name, interfaces)
            yield ConfigError(what, where=_origin(cfg, "socket_ifname"), fix=fix, nearest=nearest)


def _contradictions(
    cfg: RunConfig, settings: list[tuple[str, str, str]], *, environ: Mapping[str, str]
) -> Iterator[ConfigError]:
    for key, name, value in settings:
        if name in environ and environ[name].removeprefix("=") != value.removeprefix("="):
            what = f"would set {name}={value}, but the environment has {name}={environ[name]}"
            yield ConfigError(what, where=_origin(cfg, key), fix=f"unset {name}, or remove {SECTION}.{key}")


def _origin(cfg: RunConfig, key: str) -> str:
    dotted = f"{SECTION}.{key}"
    return f"{cfg.origins.get(dotted, 'cluster')} {dotted}"

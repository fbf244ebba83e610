"""`cluster.nccl` in the environment of several processes: how they find and watch each other's network."""

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
    nccl, problems, env = cfg.cluster.nccl, list[ConfigError](), dict[str, str]()

    def find_origin(key: str) -> str:
        return f"{cfg.origins.get(f'{SECTION}.{key}', 'cluster')} {SECTION}.{key}"

    names = [name.strip() for name in nccl.socket_ifname.split(",")] if nccl.socket_ifname else []
    for name in names:
        if name not in interfaces:
            what = f"this machine has no network interface {name!r}"
            fix = f"choose from {', '.join(interfaces)} (`ip -br addr` shows their addresses)"
            nearest = nearest_names(name, interfaces)
            problems.append(ConfigError(what, where=find_origin("socket_ifname"), fix=fix, nearest=nearest))
    for key, name, value in _list_settings(nccl, names, has_gpu=has_gpu):
        if name in environ and environ[name].removeprefix("=") != value.removeprefix("="):
            what = f"would set {name}={value}, but the environment has {name}={environ[name]}"
            fix = f"unset {name}, or remove {SECTION}.{key}"
            problems.append(ConfigError(what, where=find_origin(key), fix=fix))
        env[name] = value
    if problems:
        raise ConfigErrors(problems)
    if has_gpu and not set(DUMPS) & set(environ):
        env[DUMP] = str(logs / "flight-recorder-rank")
    return env


def _list_settings(nccl: NcclConfig, interfaces: list[str], *, has_gpu: bool) -> Iterator[tuple[str, str, str]]:
    """Key, variable and value of every setting."""
    if interfaces:
        yield "socket_ifname", "GLOO_SOCKET_IFNAME", ",".join(interfaces)
        if has_gpu:  # NCCL reads a name without "=" as a prefix: eth1 would match eth10 too
            yield "socket_ifname", "NCCL_SOCKET_IFNAME", "=" + ",".join(interfaces)
    for key, name in NCCL_NAMES.items() if has_gpu else ():
        value = getattr(nccl, key)
        if value is not None:
            yield key, name, str(int(value)) if isinstance(value, bool) else str(value)
    if has_gpu and nccl.flight_recorder:
        yield "flight_recorder", "TORCH_NCCL_DUMP_ON_TIMEOUT", "1"


def list_interfaces() -> list[str]:
    """Names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]

"""Starts TensorBoard in the background, on this machine only, and stops it by its own pid file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import psutil

from sftplay import log
from sftplay.atomic import locked, write_text
from sftplay.errors import RunError
from sftplay.machine.ports import HOST, free_port
from sftplay.places import cache_root

PID_FILE = cache_root() / "tensorboard.json"
LOG_FILE = cache_root() / "tensorboard.log"

MODULE = "tensorboard.main"

START_S = 120.0
"""A busy machine takes long to import TensorBoard."""


def end_board(record: dict[str, Any]) -> None:
    """End the TensorBoard of `record`; kill it when it still runs after 10 seconds."""
    with suppress(ProcessLookupError):  # it may end by itself meanwhile
        os.kill(record["pid"], signal.SIGTERM)
        deadline = time.monotonic() + 10
        while running() and time.monotonic() < deadline:
            time.sleep(0.1)
        if running():
            os.kill(record["pid"], signal.SIGKILL)
    PID_FILE.unlink(missing_ok=True)


def start_board(folder: Path, port: int) -> str:
    """Start TensorBoard over `folder` on the next free port; return its address, once it answers. Raise MachineError
    where no port is free, and RunError where it ended, or it does not answer.
    """
    PID_FILE.parent.mkdir(parents=True, exist_ok=True)
    with locked(PID_FILE.with_suffix(".lock")):  # another start would record its own, and this one would be left
        return _start_board(folder, port)


def _start_board(folder: Path, port: int) -> str:
    record = running()
    if record is not None:
        log.say(f"already running: {record['url']} (over {record['folder']})", "tensorboard")
        if not folder.resolve().is_relative_to(Path(record["folder"]).resolve()):
            log.say(f"note: it does not show {folder}; `make tb-stop` first, then start it over that", "tensorboard")
        return str(record["url"])
    port = free_port(port)
    folder.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", MODULE, "--logdir", str(folder.absolute()), "--host", HOST, "--port", str(port)]
    with LOG_FILE.open("w") as handle:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, start_new_session=True)
    url = f"http://{HOST}:{port}"
    record = {"pid": process.pid, "started": start_time(process.pid), "url": url, "folder": str(folder)}
    write_text(PID_FILE, json.dumps(record))
    deadline = time.monotonic() + START_S
    while not answers(url, folder):
        if process.poll() is not None:
            PID_FILE.unlink()
            raise RunError("TensorBoard did not start", where=str(LOG_FILE), fix="read that log")
        if time.monotonic() > deadline:
            end_board(record)
            raise RunError(f"TensorBoard did not answer within {START_S:g} s", where=url, fix=f"read {LOG_FILE}")
        time.sleep(0.1)
    log.say(f"{url} (stop it with `make tb-stop`)", "tensorboard")
    return url


def running() -> dict[str, Any] | None:
    """Return the record of our TensorBoard; None when the file names no process that lives, is ours and is one."""
    try:
        record: dict[str, Any] = json.loads(PID_FILE.read_text())
        pid, started = record["pid"], record["started"]
        # 0 and below mean process groups to the system, and true is 1 to Python.
        is_known = type(pid) is int and pid > 1 and isinstance(record["url"], str) and isinstance(record["folder"], str)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # The system reuses pids. The start time shows whether this is still the process that we started.
    return record if is_known and is_board(pid) and start_time(pid) == started else None


def is_board(pid: int) -> bool:
    """Return whether process `pid` lives, belongs to this user and is a TensorBoard."""
    try:
        process = psutil.Process(pid)
        return process.uids().real == os.getuid() and MODULE in process.cmdline()
    except (psutil.Error, OverflowError):
        return False


def start_time(pid: int) -> str:
    """Return the kernel's start time of process `pid`; empty when there is none. A zombie counts as none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return done.stdout.strip() if not Path("/proc/self").exists() else ""
    return "" if fields[0] == "Z" else fields[19]


def answers(url: str, folder: Path) -> bool:
    """Return whether a TensorBoard over `folder` answers at `url`; another user's server there does not count."""
    # This machine's own address must not go through a proxy that the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/data/environment", timeout=5) as reply:
            environment = json.load(reply)
    except (OSError, ValueError, HTTPException):
        return False
    return isinstance(environment, dict) and environment.get("data_location") == str(folder.absolute())

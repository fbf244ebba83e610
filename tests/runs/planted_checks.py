"""Checks with planted faults: each goes wrong in its own way, between two that are well."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from sftplay.runs.gpu_check.check import Broken, Check, CheckContext, NotPossible
from sftplay.signals import popen_tied


def well(place: CheckContext) -> str:
    place.details["cores"] = place.machine.cores
    return "all is well"


def hangs(place: CheckContext) -> str:
    """A child hangs too; its pid is left for the test."""
    child = popen_tied(["sleep", "1000"], output=subprocess.DEVNULL)
    (place.shared / "pid").write_text(str(child.pid))
    time.sleep(1000)
    return "never"


def dies(_: CheckContext) -> str:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def runs_out(_: CheckContext) -> str:
    raise MemoryError("no room for 2 GiB")


def breaks(place: CheckContext) -> str:
    Path(place.folder / "scratch").touch()
    raise Broken("3 is not 4")


def cannot(_: CheckContext) -> str:
    raise NotPossible("needs a checkout")


CHECKS = (
    Check(name="well before", run=well),
    Check(name="hangs", run=hangs, limit_s=1.0),
    Check(name="dies", run=dies),
    Check(name="runs out", run=runs_out),
    Check(name="breaks", run=breaks),
    Check(name="cannot", run=cannot),
    Check(name="is long", run=well, is_long=True),
    Check(name="needs what is not here", run=well, needs=lambda _: "needs a moon"),
    Check(name="well behind", run=well),
)

"""A worker of a run that kills itself (-9) at a place of its loop, or when it is about to do something to a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

HOOK = """
import json, os, signal, sys
wanted = json.loads(os.environ.get("KILL_IN", "null"))
if wanted and "sftplay.tasks.worker" in " ".join(sys.orig_argv) and os.environ.get("RANK", "0") == wanted["rank"]:
    from sftplay.heartbeat import Heartbeat
    real, times = Heartbeat.enter, []
    def enter(self, phase, *, step=None):
        real(self, phase, step=step)
        if [phase, self.step] == [wanted["phase"], wanted["step"]]:
            times.append(step)
            if len(times) == wanted["time"]:
                os.kill(os.getpid(), signal.SIGKILL)
    Heartbeat.enter = enter
"""

FILE_HOOK = """
import json, os, re, signal, sys
wanted = json.loads(os.environ.get("KILL_AT", "null"))
def listen(event, args):
    if event == wanted["event"] and any(isinstance(a, (str, bytes, os.PathLike)) and
                                        re.search(wanted["path"], os.fsdecode(a)) for a in args[:2]):
        os.kill(os.getpid(), signal.SIGKILL)
if wanted and "sftplay.tasks.worker" in " ".join(sys.orig_argv):
    sys.addaudithook(listen)
"""


def killed_at(home: Path, event: str, path: str) -> dict[str, str]:
    """The environment of a run whose worker is killed before Python does what an audit event says to a path; `path` is
    a pattern."""
    return _hooked(home / "file hook", FILE_HOOK) | {"KILL_AT": json.dumps({"event": event, "path": path})}


def killed_in(home: Path, phase: str, step: int, *, time: int = 1, rank: int = 0) -> dict[str, str]:
    """The environment of a run whose rank is killed when it enters a phase of a step, for the `time`-th time there."""
    wanted = {"phase": phase, "step": step, "time": time, "rank": str(rank)}
    return _hooked(home / "hook", HOOK) | {"KILL_IN": json.dumps(wanted)}


def _hooked(folder: Path, hook: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(hook)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}

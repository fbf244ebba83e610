"""A worker of a run that kills itself (-9) at a place of its loop."""

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


def killed_in(home: Path, phase: str, step: int, *, time: int = 1, rank: int = 0) -> dict[str, str]:
    """The environment of a run whose rank is killed when it enters a phase of a step, for the `time`-th time there."""
    (home / "hook").mkdir(exist_ok=True)
    (home / "hook" / "sitecustomize.py").write_text(HOOK)
    wanted = {"phase": phase, "step": step, "time": time, "rank": str(rank)}
    return {"KILL_IN": json.dumps(wanted), "PYTHONPATH": f"{home / 'hook'}{os.pathsep}{ROOT}"}

"""The process of a job, started as its job file does, with a stand-in for the trainer. No cluster is asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from processes import HANG_S

from sftplay.launch.slurm.job import JobFolder

ROOT = Path(__file__).resolve().parents[2]

TRAINER = """
import json, os, signal, sys, time
from pathlib import Path
if sys.orig_argv[1:4] == ["-m", "sftplay", "train"]:
    wanted = json.loads(os.environ["TRAINER"])
    run = Path(sys.orig_argv[7]).parent
    print("trainer", *sys.orig_argv[8:], flush=True)
    attempt = {"from_step": wanted.get("from", 0), "to_step": wanted.get("to", 4), "cause": "x"}
    status = json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {"attempts": []}
    status |= {"state": "stopped", "step": attempt["to_step"], "attempts": [*status["attempts"], attempt]}
    (run / "status.json").write_text(json.dumps(status))
    if "child" in wanted:
        (run / "child").write_text(str(os.spawnvp(os.P_NOWAIT, "setsid", ["setsid", "sleep", "1000"])))
    if "waits" in wanted:
        received = []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, frame: received.append(number))
        (run / "ready").touch()
        while not received:
            time.sleep(0.02)
        wanted["code"] = 128 + received[0]
        while "deaf" in wanted and not (run / "fail").exists():
            time.sleep(0.02)
        wanted["code"] = 1 if "deaf" in wanted else wanted["code"]
    if "killed" in wanted:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(wanted["code"])
"""
"""A sitecustomize.py: TRAINER in the environment is JSON that says how the kit's `train` behaves."""


class Life:
    """Starts the process of job 12, as its job file does."""

    def __init__(self, home: Path) -> None:
        self.run = home / "run"
        self.run.mkdir()
        self.job = JobFolder(self.run, 12)
        (home / "hook").mkdir()
        (home / "hook" / "sitecustomize.py").write_text(TRAINER)
        self.hook = home / "hook"

    def start(self, *options: str, restarts: int = 0, **trainer: object) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": f"{self.hook}:{ROOT}", "TRAINER": json.dumps(trainer), "SLURM_JOB_ID": "12"}
        env |= {"SLURM_RESTART_COUNT": str(restarts), "HF_TOKEN": "hf_secret", "SLURM_JOB_NODELIST": "n1"}
        env |= {"SLURM_JWT": "a_secret", "HF_ENDPOINT": "https://me:a_secret@mirror"}
        (self.run / "ready").unlink(missing_ok=True)
        argv = [sys.executable, "-m", "sftplay.launch.slurm.job", str(self.run), "--nproc", "2", *options]
        with self.job.output.open("ab") as output:
            return subprocess.Popen(argv, env=env, stdout=output, stderr=output)

    def end(self, *options: str, **trainer: object) -> int:
        return self.start(*options, **trainer).wait(HANG_S)

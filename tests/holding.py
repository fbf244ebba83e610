"""A hook that holds a run's worker at a chosen moment, found by Python's own audit events, until it is let go."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from processes import HANG_S, wait_until

HOOK = """
import json, os, re, signal, sys, threading, time
wanted = json.loads(os.environ.get("HOLD_AT", "null"))
def listen(event, args):
    if event != wanted["event"] or not args or not re.search(wanted["name"], os.fsdecode(str(args[0]))):
        return
    if wanted["mode"] and args[1] != wanted["mode"]:
        return
    wanted["nth"] -= 1
    if wanted["nth"] == 0:
        open(wanted["held"], "w").close()
        while not os.path.exists(wanted["go"]):
            time.sleep(0.02)
def tell(signals):
    # The kernel's own signal has come. This is seen here even while the main thread waits outside Python.
    while os.read(signals, 1)[0] not in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        continue
    open(wanted["told"] + os.environ.get("RANK", "0"), "w").close()
if wanted and "sftplay.tasks.worker" in " ".join(sys.orig_argv):
    sys.addaudithook(listen)
    signals, come = os.pipe()
    os.set_blocking(come, False)
    signal.set_wakeup_fd(come)
    threading.Thread(target=tell, args=(signals,), daemon=True).start()
"""
"""The text of a sitecustomize.py."""

METRICS = r"/metrics\.jsonl$"
"""A line is appended to this file behind each step."""


class Hold:
    """One run that is to be held; its files begin with `at`."""

    def __init__(self, at: Path) -> None:
        self.held, self.go, self._told = (at.with_name(f"{at.name}.{what}") for what in ("held", "go", "told"))

    def environment(
        self, hook: Path, event: str = "open", name: str = METRICS, *, mode: str = "", nth: int = 1
    ) -> dict[str, str]:
        """Variables of the run. It is held at the `nth` event whose first argument matches the pattern `name`.

        `hook` is the folder of sitecustomize.py. Files opened in another mode than `mode` do not count.
        """
        wanted = {"event": event, "name": name, "mode": mode, "nth": nth}
        files = {"held": str(self.held), "go": str(self.go), "told": str(self._told)}
        return {"PYTHONPATH": str(hook), "HOLD_AT": json.dumps(wanted | files)}

    def after_step(self, step: int, hook: Path) -> dict[str, str]:
        """Variables of a run that is held behind this step, whose line of metrics is not written yet. Of several
        processes the first one is held."""
        return self.environment(hook, mode="a", nth=step)

    def wait(self, process: subprocess.Popen[bytes], limit_s: float = HANG_S) -> bool:
        """True once the run is held, False when it has ended before."""
        wait_until(lambda: self.held.exists() or process.poll() is not None, limit_s)
        return process.poll() is None

    def await_signal(self, process: subprocess.Popen[bytes], rank: int = 0) -> None:
        """Return when a stop signal has come to a worker, which the run's parent forwards, or the run has ended."""
        told = self._told.with_name(f"{self._told.name}{rank}")
        wait_until(lambda: told.exists() or process.poll() is not None)

    def let_go(self) -> None:
        self.go.touch()


def write_hook(folder: Path) -> Path:
    """The folder, with the hook in it."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(HOOK)
    return folder

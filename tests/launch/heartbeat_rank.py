"""A rank of a run for tests: it writes its heartbeat, answers with its stacks and stays in the given phase.

Started as a process, with one argument: a JSON object of what is to differ from the fields of `Rank`.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from sftplay import heartbeat as beating
from sftplay.launch.supervise.stacks import answer_with_stacks

NUMBER = int(os.environ.get("RANK", "0"))


class Rank:
    logs = "."
    phase = "data"
    step = 5
    listens = True
    place = "nobody_feeds_me"
    later_s = 0.0
    """The heartbeat's time is later than the real one by this."""

    def __init__(self, settings):
        vars(self).update(settings)
        self.folder = Path(self.logs)
        threading.Thread(target=self.a_thread_beside, daemon=True).start()
        if self.listens:
            answer_with_stacks(self.folder, NUMBER)
        beating.time = SimpleNamespace(monotonic=lambda: time.monotonic() + self.later_s)
        self.heartbeat = beating.Heartbeat(beating.heartbeat_path(self.folder, NUMBER), pid=os.getpid())
        self.heartbeat.enter(self.phase, step=self.step)

    def a_thread_beside(self):
        time.sleep(600)

    def nobody_feeds_me(self):
        time.sleep(600)

    def goes_on(self):
        while True:
            self.heartbeat.enter(self.phase, step=self.step)
            time.sleep(0.01)

    def notes_signals(self):
        # Like a rank inside a step.
        signal.signal(signal.SIGTERM, lambda *_, **__: (self.folder / "noted").touch())
        (self.folder / "ready").touch()
        time.sleep(600)

    def waits_in_collective(self):
        # A stack shows only the file's name.
        path = self.folder / "torch" / "distributed" / "distributed_c10d.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import time\ntime.sleep(600)\n")
        runpy.run_path(str(path))


if __name__ == "__main__":
    rank = Rank(json.loads(sys.argv[1]))
    getattr(rank, rank.place)()

"""A rank of a run for tests: it writes its heartbeat, answers with its stacks and stays in the given phase.

Started as a process, with one argument: a JSON object of what is to differ from the fields of `Rank`. Its phase begins
when its main thread is in its place, so that whoever has seen the phase finds it there.
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
from sftplay.launch.processes import answer_with_stacks

NUMBER = int(os.environ.get("RANK", "0"))


class Rank:
    logs = "."
    phase = "data"
    step = 5
    listens = True
    place = "nobody_feeds_me"
    now_s: float | None = None
    """The time at which its phase begins; the real one without it."""

    def __init__(self, settings):
        vars(self).update(settings)
        self.folder = Path(self.logs)
        if self.listens:
            answer_with_stacks(self.folder, NUMBER)
        if self.now_s is not None:
            beating.time = SimpleNamespace(monotonic=self.clock)
        self.heartbeat = beating.Heartbeat(beating.heartbeat_path(self.folder, NUMBER), pid=os.getpid())
        threading.Thread(target=self.a_thread_beside, daemon=True).start()

    def clock(self):
        self.now_s += 1e-6  # so that two beats differ
        return self.now_s

    def a_thread_beside(self):
        main = threading.main_thread().ident
        while not self.is_place(sys._current_frames()[main].f_code):
            time.sleep(0.01)
        self.heartbeat.enter(self.phase, step=self.step)
        time.sleep(600)

    def is_place(self, code):
        return code.co_name == self.place or code.co_filename == str(self.collective)

    @property
    def collective(self):
        return self.folder / "torch" / "distributed" / "distributed_c10d.py"

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
        self.collective.parent.mkdir(parents=True, exist_ok=True)
        self.collective.write_text("import time\ntime.sleep(600)\n")
        runpy.run_path(str(self.collective))


if __name__ == "__main__":
    rank = Rank(json.loads(sys.argv[1]))
    getattr(rank, rank.place)()

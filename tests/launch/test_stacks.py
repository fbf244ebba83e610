"""The stack of a rank's main thread, and whether it is in a collective."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sftplay.launch.processes import COLLECTIVES, NATIVE_COLLECTIVES, Stack, main_stack


def test_torch_has_the_files_in_which_collectives_start():
    site = Path(importlib.util.find_spec("torch").origin).parents[1]
    assert "def all_gather_object(" in (site / COLLECTIVES).read_text()
    assert all("broadcast_coalesced(" in (site / name).read_text() for name in NATIVE_COLLECTIVES[:2])
    assert "def _engine_run_backward(" in (site / NATIVE_COLLECTIVES[2]).read_text()


def test_the_last_thread_of_an_answer_is_the_main_one_and_after_too_many_threads_none_is():
    # The headings of threads in CPython 3.11 and 3.14.
    text = (
        'Thread 0x01 (most recent call first):\n  File "a.py", line 1 in a\n\n'
        'Current thread 0x02 [python] (most recent call first):\n  File "b.py", line 2 in b\n'
        '  File "c.py", line 3 in c\n'
    )
    assert main_stack(text).lines == ('  File "b.py", line 2 in b', '  File "c.py", line 3 in c')
    assert main_stack(text + "...\n") == Stack()
    assert main_stack("") == Stack()

"""Imports of a process of the kit: when Python looks for circles of objects, and which libraries it leaves out."""

from __future__ import annotations

import subprocess
import sys

from processes import HANG_S

SEARCHES = """
import gc
from sftplay.startup import begin_imports, end_imports
end_imports()
before, searches = gc.get_threshold(), []
gc.callbacks.append(lambda phase, _: searches.append(phase))
assert gc.get_freeze_count() == 0
begin_imports()
begin_imports()
held = [[] for _ in range(50_000)]
rare = len(searches)
end_imports()
assert gc.get_threshold() == before
assert gc.get_freeze_count() > 50_000
held += [[] for _ in range(50_000)]
print(rare, len(searches) > 10)
"""


def test_imports_are_not_searched_and_what_comes_behind_them_is():
    done = subprocess.run(
        [sys.executable, "-c", SEARCHES], capture_output=True, text=True, check=False, timeout=HANG_S
    )  # fmt: skip
    assert done.stdout.split() == ["0", "True"], done.stderr


LEFT_OUT = """
import sys
from importlib.util import find_spec
from sftplay.startup import begin_imports, leave_out
leave_out(["graphlib"])
print(find_spec("graphlib") is None)
begin_imports()
import colorsys
leave_out(["graphlib", "colorsys"])
print(find_spec("graphlib") is None, find_spec("colorsys") is None)
sys.modules["peft"] = sys
leave_out(["chunk"])
print(find_spec("chunk") is None)
"""


def test_a_library_is_left_out_by_an_entry_point_only_and_not_once_it_or_who_asks_for_it_is_there():
    done = subprocess.run(
        [sys.executable, "-c", LEFT_OUT], capture_output=True, text=True, check=False, timeout=HANG_S
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True", "False", "False"], done.stderr

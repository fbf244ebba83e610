"""Imports of a process of the kit: when Python looks for circles of objects, and which libraries it leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_S

ROOT = Path(__file__).resolve().parents[1]

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


COUNTING = """
import contextlib, io, json, sys
from sftplay.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    code = main(sys.argv[1:])
own = sum(name.split(".")[0] == "sftplay" for name in sys.modules)
print(json.dumps([code, own, sorted({name.split(".")[0] for name in sys.modules})]))
"""


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (["validate", "--config", "configs/run_lora.yaml"], 140),
        (["plan", "--config", "configs/run_lora.yaml", "--gpus", "2xH200"], 165),
    ],
    ids=["validate", "plan"],
)
def test_a_plan_and_a_check_import_little(words: list[str], most: int):
    """Each took a second on a plain machine: numpy, the manual and the planner of puzzles were among the imports."""
    argv = [sys.executable, "-c", COUNTING, *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    code, own, names = json.loads(done.stdout.splitlines()[-1])
    assert code == 0
    assert own <= most
    assert not {"numpy", "torch", "transformers", "datasets", "pyarrow", "lxml", "psutil"} & {*names}

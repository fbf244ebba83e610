"""No program gets out of its box or forges its verdict: every attack of the suite, on every executor that is here."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from processes import HANG_S

from sftplay.commands.sandbox import BEGIN, END
from sftplay.sandbox.attacks import suite
from sftplay.sandbox.attacks.suite import (
    find_hole,
    read_attacks,
    run_attacks,
)
from sftplay.sandbox.boxes.executors import PlainProcess

ROOT = Path(__file__).resolve().parents[2]

FAST = (
    "os._exit(0)", "an object that equals everything", "an int that equals everything, in the test's box",
    "finds the nonce and answers for itself", "says that the machinery failed", "leaves a daemon", "forks without end",
    "looks for the expected values in memory", "writes the reward to files",
)  # fmt: skip

ATTACKS = read_attacks()

SYSTEM_PYTHON = Path("/usr/bin/python3")

AS_NOBODY = """
from sftplay.sandbox.attacks.suite import run_attacks
from sftplay.sandbox.pool import SAFE, WARM, find_problem
if problem := find_problem({name!r}, is_warm={is_warm}):
    print("cannot be used here:", problem)
else:
    executor = (WARM if {is_warm} else SAFE)[{name!r}]()
    rows = run_attacks(executor, note=lambda row: None)
    executor.close()
    print(len(rows), [(row.attack.name, row.problems) for row in rows if row.problems])
"""


def test_the_page_names_every_attack_and_none_that_got_through():
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) == 215
    page = (ROOT / "docs" / "sandbox.md").read_text().partition(BEGIN)[2].partition(END)[0]
    assert "**" not in page
    named = set()
    for item in " ".join(page.split()).removeprefix("- ").removesuffix(".").split(". - "):
        alike, _, attacks = item.partition(": ")
        named |= {(alike.partition(",")[0], attack) for attack in attacks.split("; ")}
    assert named == {(attack.group, attack.name) for attack in ATTACKS}


def test_the_self_test_finds_no_hole_in_a_box_and_many_without_one(executor):
    assert find_hole(executor) == ""
    found = find_hole(PlainProcess())
    assert "reads a private file" in found
    assert "connects by TCP" in found


def test_some_attacks_of_each_kind_do_not_get_through(executor):
    patient = {"timeout_s": HANG_S, "test_timeout_s": HANG_S}
    chosen = [replace(attack, limits={**attack.limits, **patient}) for attack in ATTACKS if attack.name in FAST]
    assert len(chosen) == len(FAST)
    assert not [attack.name for attack in chosen if "timeout" in attack.statuses]
    rows = run_attacks(executor, chosen=chosen, note=lambda row: None)
    assert {row.attack.name: row.problems for row in rows if row.problems} == {}


@pytest.fixture
def many_open_files():
    """1,100, which is more than select(2) can name, let alone the limit of a box."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    with ExitStack() as files:
        for _ in range(1_100):
            files.enter_context(open(os.devnull))
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
def test_a_box_is_the_same_however_many_files_its_opener_has_open(executor):
    chosen = [attack for attack in ATTACKS if attack.name == "puts a pipe of its own where orders come from"]
    rows = run_attacks(executor, chosen=chosen, note=lambda row: None)
    assert [row.problems for row in rows] == [()]


@pytest.mark.slow
def test_no_attack_gets_through(executor):
    rows = run_attacks(executor, note=lambda row: None)
    assert {row.attack.name: row.problems for row in rows if row.problems} == {}


@pytest.mark.parametrize(
    ("name", "is_warm"),
    [
        pytest.param("bwrap", True, marks=pytest.mark.slow),
        pytest.param("bwrap", False, marks=pytest.mark.slow),
        pytest.param("landlock", False, marks=pytest.mark.long),
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.skipif(not SYSTEM_PYTHON.exists(), reason="needs a Python that every user can read")
def test_no_attack_by_an_ordinary_user_gets_through(name, is_warm, request):
    readable = Path(tempfile.mkdtemp(prefix="sftplay-as-nobody-"))  # pytest closes its own folders to others
    request.addfinalizer(lambda: shutil.rmtree(readable))
    readable.chmod(0o755)
    shutil.copytree(ROOT / "sftplay", readable / "sftplay")
    if name == "landlock" and (found := find_spec("sandlock")):
        shutil.copytree(Path(str(found.origin)).parent, readable / "sandlock")
    python = [str(SYSTEM_PYTHON), "-B", "-s", "-c", AS_NOBODY.format(name=name, is_warm=is_warm)]
    become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run(
        [*become, *python], cwd=readable, env={"PATH": os.environ["PATH"], "HOME": str(readable)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "cannot be used here" in done.stdout:
        pytest.skip(f"needs {name} for an ordinary user: {done.stdout}")
    assert done.stdout == f"{len(ATTACKS)} []\n"


@pytest.mark.slow
def test_the_harmless_attacks_succeed_where_there_is_no_box(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "wait_gone", lambda *_, **__: [])  # what is left here stays
    chosen = [attack for attack in ATTACKS if attack.is_harmless]
    rows = run_attacks(PlainProcess(), chosen=chosen, note=lambda row: None)
    assert len(rows) > 25
    assert [row.attack.name for row in rows if row.verdict.status != "ok"] == []

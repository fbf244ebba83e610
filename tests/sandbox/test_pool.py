"""Many jobs: their order, their cache, and what the verb makes of lines."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENT
from processes import HANG_S

from sftplay.errors import ConfigError, MachineError
from sftplay.sandbox import pool
from sftplay.sandbox.boxes.box import Lost
from sftplay.sandbox.boxes.executors import Bwrap, WarmBwrap
from sftplay.sandbox.boxes.job import Job
from sftplay.sandbox.pool import SAFE, Sandbox, find_problem

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(workers=2) as opened:
        yield opened


def adder(n: int) -> Job:
    return Job(code=f"def f(x): return x + {n}", tests=("assert f(1) == 3", "assert f(2) == 4"), limits=PATIENT)


def lines_of(*jobs: dict[str, object]) -> str:
    """Jobs that a slow machine does not cut off, as the verb reads them."""
    limits = {"timeout_s": HANG_S, "test_timeout_s": HANG_S}
    return "".join(f"{json.dumps({**job, 'limits': limits})}\n" for job in jobs)


def open_files() -> set[tuple[str, str]]:
    """Number and target of each descriptor of this process."""
    gc.collect()
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing
            found.add((path.name, str(path.readlink())))
    return found


def test_verdicts_come_in_the_order_of_the_jobs_and_equal_jobs_run_once(sandbox):
    verdicts = sandbox.run(adder(n) for n in (1, 2, 3, 2))
    assert [verdict.status for verdict in verdicts] == ["wrong", "ok", "wrong", "ok"]
    assert {verdict.executor for verdict in verdicts} == {sandbox.executor}
    assert verdicts[3] is verdicts[1] is sandbox.run([adder(2)])[0]


def test_without_an_executor_it_refuses_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(pool, "SAFE", {"bwrap": Bwrap})
    pool.find_problem.cache_clear()
    with pytest.raises(MachineError) as caught:
        Sandbox()
    pool.find_problem.cache_clear()
    assert "bubblewrap is not installed" in caught.value.what
    assert "apt-get install bubblewrap" in caught.value.fix
    assert caught.value.exit_code == 3


def test_an_executor_with_a_hole_is_refused(monkeypatch):
    monkeypatch.setattr(pool, "SAFE", {"bwrap": pool.PlainProcess})
    pool.find_problem.cache_clear()
    with pytest.raises(MachineError, match="escaped: reads a private file"):
        Sandbox("bwrap")
    pool.find_problem.cache_clear()


def test_an_unknown_executor_or_package_is_refused():
    with pytest.raises(ConfigError, match="bwarp") as caught:
        Sandbox("bwarp")
    assert caught.value.nearest == ["bwrap"]
    with pytest.raises(ConfigError, match="no package is called 'nunpy'"):
        Sandbox(packages=["nunpy"])


@pytest.mark.contract
def test_the_verb_answers_each_line_with_a_line(tmp_path, sftplay):
    half = {"code": "def f(x): return x", "tests": ["assert f(1) == 1", "assert f(2) == 3"]}
    (tmp_path / "jobs.jsonl").write_text(lines_of(half, {"code": "x ="}))
    done = sftplay("sandbox", "--in", tmp_path / "jobs.jsonl", "--timeout", "9")
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(each["status"], each["passed"], each["total"]) for each in verdicts] == [("wrong", 1, 2), ("syntax", 0, 0)]
    (tmp_path / "jobs.jsonl").write_text('{"code": ""}\n{"code": "", "test": []}')
    done = sftplay("sandbox", "--in", tmp_path / "jobs.jsonl")
    assert done.returncode == 4
    assert f"{tmp_path / 'jobs.jsonl'}:2, test: is no key of a job" in done.stderr
    assert "did you mean" in done.stderr or "there are code, tests" in done.stderr


@pytest.mark.contract
def test_a_refused_start_leaves_earlier_verdicts_alone(tmp_path, sftplay):
    out, jobs = tmp_path / "verdicts.jsonl", tmp_path / "jobs.jsonl"
    out.write_text("earlier")
    jobs.write_text('{"code": "x = 1"}\n{"code": 3}')
    assert sftplay("sandbox", "--in", jobs, "--out", out).returncode == 4
    assert out.read_text() == "earlier"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["jobs.jsonl", "verdicts.jsonl"]


@pytest.mark.contract
def test_verdicts_may_go_to_a_new_folder_or_nowhere_or_replace_their_jobs(tmp_path, sftplay):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text(lines_of({"code": "x = 1"}))
    assert sftplay("sandbox", "--in", jobs, "--out", tmp_path / "new" / "verdicts.jsonl").returncode == 0
    assert sftplay("sandbox", "--in", jobs, "--out", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()
    assert sftplay("sandbox", "--in", jobs, "--out", jobs).returncode == 0
    assert json.loads(jobs.read_text())["status"] == "ok"


@pytest.mark.skipif(bool(find_problem("bwrap", is_warm=True)), reason="needs bubblewrap, and user namespaces in it")
def test_a_server_that_dies_costs_no_verdict_however_often_it_does():
    with Sandbox("bwrap", workers=1) as sandbox:
        assert sandbox.run([adder(2)])[0].status == "ok"
        server = sandbox._all[0]
        assert isinstance(server, WarmBwrap)
        judge_once, died = server.open, []

        def open_and_die(limits):
            box = judge_once(limits)
            if server._process is not None:
                died.append(server._process.pid)
                server._process.kill()
                server._process.wait()
            return box

        server.open = open_and_die
        right = Job(code="def f(x): return x", tests=("assert f(1) == 1", "assert f(2) == 2"), limits=PATIENT)
        assert [verdict.status for verdict in sandbox.run([right, adder(3)])] == ["ok", "wrong"]
        assert died
        server.open = judge_once
        assert [verdict.status for verdict in sandbox.run([adder(1), adder(0)])] == ["wrong", "wrong"]
        assert server._process.pid not in died


@pytest.mark.skipif(bool(find_problem("bwrap")), reason="needs bubblewrap")
@pytest.mark.parametrize("is_warm", [False, True])
def test_an_executor_that_is_gone_gives_no_verdict_until_it_is_back(is_warm, tmp_path):
    program = tmp_path / "bwrap"
    program.symlink_to(str(shutil.which("bwrap")))
    with Sandbox("bwrap", workers=1, is_warm=is_warm) as sandbox:
        executor = sandbox._all[0]
        executor._program = str(program)
        program.rename(tmp_path / "gone")
        before = open_files()
        lost = sandbox.run([adder(2), adder(3)])
        assert [(each.status, each.passed) for each in lost] == [("infra", 0)] * 2
        assert "No such file" in lost[0].stderr
        assert open_files() <= before
        (tmp_path / "gone").rename(program)
        assert [each.status for each in sandbox.run([adder(2), adder(3)])] == ["ok", "wrong"]


@pytest.mark.skipif(bool(find_problem("bwrap")), reason="needs bubblewrap")
def test_a_box_that_another_ends_is_no_wrong_answer(monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(*args, **options):
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr("sftplay.sandbox.boxes.executors.subprocess.Popen", start)
    box = Bwrap().open(PATIENT)
    started[0].kill()
    with pytest.raises(Lost) as lost:
        box.ask("load", code=f"import time\ntime.sleep({HANG_S})", late_setup="", within_s=HANG_S)
    box.close()
    assert lost.value.status == "infra"


@pytest.mark.parametrize(
    ("name", "is_warm"), [("bwrap", True), ("bwrap", False), pytest.param("landlock", False, marks=pytest.mark.slow)]
)
def test_a_program_imports_the_packages_that_are_named_and_no_others(name, is_warm):
    pytest.importorskip("numpy")
    if problem := find_problem(name, is_warm=is_warm):
        pytest.skip(f"needs {name}: {problem}")
    code = "import numpy\ndef f(x): return numpy.arange(x).sum()\ndef g(): import yaml"
    tests = ("assert f(4) == 6", "assert f(4) + 1 == 7", "assert f(5) == 6", "assert g() is None")
    job = Job(code=code, tests=tests, limits=replace(PATIENT, memory_bytes=1 << 30))
    with Sandbox(name, workers=1, is_warm=is_warm, packages=["numpy"]) as sandbox:
        verdict = sandbox.run([job])[0]
        assert verdict.per_test == ("ok", "ok", "wrong", "runtime")
        assert ", numpy " in sandbox.version
    with Sandbox(name, workers=1, is_warm=is_warm) as sandbox:
        assert sandbox.run([job])[0].status == "runtime"

"""Dead processes: which deaths are noticed, when a run restarts, and that it ends like an undisturbed run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from processes import HANG_S, is_alive, wait_until
from project import Project, open_project
from small_run import Inputs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from sftplay.atomic import write_text
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.launch.checkpoints import mark_complete
from sftplay.launch.command import Launch
from sftplay.launch.follow import final_exit_code
from sftplay.launch.processes import Death, cause_of_death, find_death
from sftplay.launch.run_folder import PARENT, RunFolder
from sftplay.machine.probe import probe
from sftplay.plan.sizing import size_run
from sftplay.runs import start as launching
from sftplay.tasks import worker

ROOT = Path(__file__).resolve().parents[2]
STEPS, SAVE_STEPS = 24, 5


def failure_list(*codes: tuple[int, int]) -> list[str]:
    """torchrun's lines about ranks that ended with these codes; `codes` are (rank, code), the first to end first."""
    failures = {rank: ProcessFailure(rank, 4000 + rank, code, "<N/A>") for rank, code in codes}
    return str(ChildFailedError("sftplay.tasks.worker", failures)).splitlines()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([(1, -9)], "rank 1 was killed by SIGKILL"),
        ([(1, -9), (0, -15)], "rank 1 was killed by SIGKILL"),
        ([(0, -11), (1, -9)], "rank 0 was killed by SIGSEGV"),
        ([(2, 17), (0, 143)], "rank 2 ended with code 17 and no message"),
        ([(1, -9), (0, 5)], "rank 1 was killed by SIGKILL"),
        # A bug on rank 0; rank 1 waited for it, and torchrun killed it in the end.
        ([(0, 1), (1, -9)], ""),
        ([(1, -15)], ""),
        *(([(0, code), (1, -9)], "") for code in (2, 3, 4, 5, 129, 130, 138, 143)),
    ],
)
def test_rank_that_died_first_is_named_from_what_torchrun_says(codes: list[tuple[int, int]], expected: str):
    assert find_death(["a warning", *failure_list(*codes), "last words"]) == expected


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run in its first attempt."""
    run = RunFolder(tmp_path / "run")
    run.create()
    attempts = [{"from_step": 0, "to_step": None, "cause": None}]
    run.update_status(state="running", exit_code=None, step=3, ranks=[{"pid": 1}], error=None, attempts=attempts)
    return run


def record_end(folder: RunFolder, code: int, cause: str, **more: Any) -> None:
    folder.update_status(exit_code=code, **more)
    folder.close_attempt(cause)


def test_rank_that_lost_another_and_the_launcher_agree_on_the_death(folder: RunFolder):
    """The surviving rank has ended by its library's error, by ours for a lost rank, or by torchrun's SIGTERM."""
    lost = Death("rank 1 (pid 7) died").as_json()
    endings = [(1, "RuntimeError", None), (5, "rank 1 (pid 7) died", lost), (143, "SIGTERM", None)]
    for code, cause, error in endings:
        record_end(folder, code, cause, error=error, signal="SIGTERM" if code == 143 else None)
        assert final_exit_code(folder, 1, received=0, unmarked=failure_list((1, -9), (0, code))) == 5
        status = folder.read_json("status.json")
        assert (status["state"], status["exit_code"], status["signal"]) == ("failed", 5, None)
        assert status["attempts"] == [{"from_step": 0, "to_step": 3, "cause": "rank 1 was killed by SIGKILL"}]
        assert cause_of_death(folder) == "rank 1 was killed by SIGKILL"


def test_rank_that_was_lost_is_the_one_that_died_even_if_torchrun_noticed_the_other_first(folder: RunFolder):
    lost = Death("rank 1 (pid 4001) died")
    record_end(folder, 5, lost.what, error=lost.as_json())
    assert final_exit_code(folder, 1, received=0, unmarked=failure_list((0, 5), (1, -9))) == 5
    assert cause_of_death(folder) == "rank 1 was killed by SIGKILL"
    record_end(folder, 5, lost.what, error=lost.as_json())
    assert final_exit_code(folder, 1, received=0, unmarked=failure_list((0, 5), (2, -9))) == 5
    assert cause_of_death(folder) == "rank 1 (pid 4001) died"


def test_a_rank_lost_after_a_stop_signal_is_no_death_to_restart_from(folder: RunFolder):
    record_end(folder, 5, "rank 1 (pid 7) died", error=Death("rank 1 (pid 7) died").as_json())
    assert final_exit_code(folder, 1, received=signal.SIGTERM, unmarked=failure_list((1, -9), (0, 5))) == 143
    status = folder.read_json("status.json")
    assert (status["state"], status["signal"], status["attempts"][0]["cause"]) == ("stopped", "SIGTERM", "SIGTERM")
    assert cause_of_death(folder) == ""


def test_launcher_that_ends_without_a_report_is_a_death_only_when_it_was_killed_or_the_ranks_had_met(folder: RunFolder):
    for code, ranks, expected in ((-9, [], "killed by SIGKILL"), (1, [{"pid": 1}], "ended with code 1"), (1, [], "")):
        folder.update_status(exit_code=None, error=None, ranks=ranks)
        final_exit_code(folder, code, received=0, unmarked=[])
        assert cause_of_death(folder).startswith(expected), (code, ranks)
        assert bool(cause_of_death(folder)) is bool(expected)


class Deaths:
    """Replaces a launch. It ends as the list says: a text is a death, a number an exit code."""

    def __init__(self, *endings: str | int) -> None:
        self.endings, self.resumes = list(endings), []

    def __call__(self, command: Launch, folder: RunFolder, *, check_nodes: Any) -> int:
        self.resumes.append(load_config(folder.resolved).train.resume)
        ending = self.endings.pop(0)
        code, error = (5, Death(ending).as_json()) if isinstance(ending, str) else (ending, None)
        folder.update_status(exit_code=code, error=error)
        return code


@pytest.fixture
def run_with(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, Deaths, RunFolder]]:
    """Runs the endings of `Deaths` with this many restarts: (exit code, the deaths, the folder)."""

    def run(most: int, *endings: str | int, **changes: Any) -> tuple[int, Deaths, RunFolder]:
        sized = size_run(load_config(write_config(cluster__max_restarts=most, **changes)), probe(), vocab_size=400)
        folder, deaths = RunFolder(tmp_path / "run"), Deaths(*endings)
        write_text(folder.resolved, dump_resolved(sized.cfg))
        monkeypatch.setattr(launching, "follow", deaths)
        monkeypatch.setattr(launching, "report_at_end", lambda _: None)
        args = Namespace(tb=False, json=False, verb="train", node_rank=0, nnodes=1, deepspeed=False)
        return launching.run_workers(Launch(("python",), {}), folder, cfg=sized.cfg, args=args), deaths, folder

    return run


def test_a_death_is_followed_by_as_many_restarts_as_the_config_allows(run_with: Callable[..., Any], capsys: Any):
    code, deaths, _ = run_with(2, "rank 1 was killed by SIGKILL", "killed by SIGSEGV", 0)
    assert (code, deaths.endings) == (0, [])
    assert deaths.resumes == ["never", "auto", "auto"]
    output = [line for line in capsys.readouterr().out.splitlines() if "restart" in line]
    assert output == [
        "[train] restart 1 of 2: rank 1 was killed by SIGKILL",
        "[train] restart 2 of 2: killed by SIGSEGV",
    ]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 129, 130, 138, 143])
def test_stops_and_errors_that_would_come_again_are_not_restarted(run_with: Callable[..., Any], code: int):
    ended, deaths, _ = run_with(3, code, 0)
    assert (ended, deaths.endings) == (code, [0])


def test_restart_begins_with_the_configured_checkpoint_until_the_run_has_its_own(
    run_with: Callable[..., Any], tmp_path: Path
):
    configured = str(tmp_path / "another" / "checkpoint-7")
    _, deaths, folder = run_with(1, "killed by SIGKILL", 0, train__resume=configured)
    assert deaths.resumes == [configured, configured]
    own = folder.checkpoints / "checkpoint-9"
    own.mkdir(parents=True)
    (own / "optimizer.pt").write_bytes(b"state")
    mark_complete(own, {})
    assert run_with(1, "killed by SIGKILL", 0, train__resume=configured)[1].resumes == [configured, "auto"]


@pytest.mark.parametrize("recorded", [None, 4])
def test_rank_that_loses_another_ends_with_the_reason_of_that_one_or_calls_it_a_death(
    folder: RunFolder, recorded: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    folder.update_status(ranks=[{"pid": os.getpid()}, {"pid": ended.pid}], exit_code=recorded)
    assert worker.find_lost_rank(folder) == ""  # no process group: the others have ended as they should
    monkeypatch.setattr(worker, "is_in_process_group", lambda: True)
    gone = worker.find_lost_rank(folder)
    assert gone == f"rank 1 (pid {ended.pid}) died"
    assert worker.end_after_lost_rank(folder, gone) == (recorded or 5)
    assert cause_of_death(folder) == ("" if recorded else gone)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a child can be tied to its parent")
def test_worker_whose_launch_died_before_it_looked_does_no_work(folder: RunFolder):
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    argv = [sys.executable, "-m", "sftplay.tasks.worker", str(folder.path)]
    before = folder.read_json("status.json")
    done = subprocess.run(argv, cwd=ROOT, env={**os.environ, PARENT: str(ended.pid)}, timeout=HANG_S, check=False)
    assert done.returncode == 5
    assert folder.read_json("status.json") == before


HOOK = """
import json, os, re, sys, time
moments = json.loads(os.environ.get("HOLD_AT", "null"))
seen = {}
def listen(event, args):
    wanted = next((each for each in moments if not os.path.exists(each["held"])), None)
    if wanted is None or event != wanted["event"] or not re.search(wanted["name"], os.fsdecode(str(args[0]))):
        return
    if event == "open" and args[1] not in ("a", "w"):
        return
    seen[wanted["held"]] = seen.get(wanted["held"], 0) + 1
    if seen[wanted["held"]] == wanted["nth"]:
        open(wanted["held"], "x").close()
        while not os.path.exists(wanted["held"] + ".go"):
            time.sleep(0.02)
if moments and os.environ.get("RANK", "0") == "0" and "sftplay.tasks.worker" in " ".join(sys.orig_argv):
    sys.addaudithook(listen)
"""
"""Holds rank 0 at each moment once in a run. Python's audit events show the moments."""

METRICS = r"/metrics\.jsonl$"
BETWEEN = "between two checkpoints"
MOMENTS = [
    ("the first step", "open", METRICS, 1),
    ("a checkpoint is written", "open", r"checkpoint-10/trainer_state\.json$", 1),
    (BETWEEN, "open", METRICS, 8),
    ("the result is saved", "os.mkdir", r"\.adapter\.part$", 1),
]
"""Name, event, file, and at which occurrence in an attempt. Each step writes one line of metrics."""

HELD_DIES = ("a checkpoint is written", "the result is saved")
"""Here the rank that is held is killed, else the one that waits for it."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs) -> Iterator[Project]:
    changes = {
        "tuning__lora__dropout": 0.1, "train__max_steps": STEPS, "train__batch_size": 2,
        "train__save_steps": SAVE_STEPS, "train__save_total_limit": 9,
    }  # fmt: skip
    with open_project(tmp_path_factory.mktemp("restarts"), inputs, **changes) as project:
        (project.hook / "sitecustomize.py").write_text(HOOK)
        yield project


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> str:
    """Name of an undisturbed run on two processes."""
    assert project.start("train", "whole", "--nproc", 2).wait(HANG_S) == 0, project.output("whole")
    return "whole"


def hold(project: Project, name: str, moments: list[Any]) -> dict[str, str]:
    """Environment in which a run is held at each of these moments."""
    wanted = [
        {"event": event, "name": path, "nth": nth, "held": str(project.root / f"{name} {key}")}
        for key, event, path, nth in moments
    ]
    return {"PYTHONPATH": str(project.hook), "HOLD_AT": json.dumps(wanted)}


def assert_same_run(project: Project, name: str, whole: str) -> None:
    """Weights, rows and losses equal those of the undisturbed run bit by bit, and each step is there once."""
    ours, theirs = project.weights(name), project.weights(whole)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    metrics, expected = project.metrics(name), project.metrics(whole)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for key in ("loss", "row_ids", "learning_rate", "grad_norm"):
        assert [line[key] for line in metrics] == [line[key] for line in expected], key


def kill_rank(project: Project, name: str, rank: int) -> None:
    os.kill(project.status(name)["ranks"][rank]["pid"], signal.SIGKILL)


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[bytes], output: Callable[[], str]) -> None:
    wait_until(lambda: condition() or process.poll() is not None)
    assert process.poll() is None, output()


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_out",
    # Wherever in a step a rank is killed in any case.
    [pytest.param((BETWEEN,), id="three"), pytest.param((), id="four", marks=pytest.mark.long)],
)
def test_ranks_killed_at_every_kind_of_moment_are_started_again_and_nothing_is_lost(
    left_out: tuple[str, ...], project: Project, undisturbed: str
):
    moments = [moment for moment in MOMENTS if moment[0] not in left_out]
    name = f"killed-{len(moments)}"
    kills = [0 if key in HELD_DIES else 1 for key, *_ in moments]
    process = project.start("train", name, "--nproc", 2, "cluster.max_restarts=5", **hold(project, name, moments))
    for (key, *_), rank in zip(moments, kills, strict=True):
        wait_for((project.root / f"{name} {key}").exists, process, lambda: project.output(name))
        kill_rank(project, name, rank)
        (project.root / f"{name} {key}.go").touch()
        if key == "the first step":  # the next one is killed wherever in a step it is
            wait_for(lambda: len(project.status(name)["attempts"]) == 2, process, lambda: project.output(name))
            wait_for(lambda: len(project.metrics(name)) >= 2, process, lambda: project.output(name))
            kill_rank(project, name, 1)
    assert process.wait(HANG_S) == 0, project.output(name)
    attempts = project.status(name)["attempts"]
    dead = [1, *kills]
    assert [each["cause"] for each in attempts] == [*(f"rank {n} was killed by SIGKILL" for n in dead), "done"]
    begun = [each["from_step"] for each in attempts]
    assert begun[2] in (0, 5)  # the kill inside a step may have come after the first checkpoint
    assert [*begun[:2], *begun[3:]] == [0, 0, 5, *([] if left_out else [10]), STEPS]
    output = project.output(name)
    for number, rank in enumerate(dead, 1):
        assert f"[train] restart {number} of 5: rank {rank} was killed by SIGKILL\n" in output
    assert re.search(rf"continuing from .*checkpoint-{5 if left_out else 10}\b", output)
    assert_same_run(project, name, undisturbed)


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    """All processes of this machine that were started for this run."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if str(folder.path) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
    return processes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a child can be tied to its parent")
def test_launcher_that_is_killed_while_its_launch_begins_leaves_nobody(project: Project):
    """A launch starts torchrun, then its ranks one after the other. A rank is tied to its parent a little later."""
    name = "begun"
    process = project.start("train", name, "--nproc", 2, "cluster.max_restarts=5")
    wait_for(lambda: len(processes_of(project.folder(name))) >= 3, process, lambda: project.output(name))
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(project.folder(name)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a child can be tied to its parent")
def test_launcher_that_is_killed_while_its_ranks_train_leaves_nobody_and_nothing_starts_again(project: Project):
    name = "left"
    overrides = ["--nproc", 2, "cluster.max_restarts=5", "train.max_steps=100000", "train.dataloader_num_workers=1"]
    process = project.start("train", name, *overrides)
    wait_for(lambda: project.metrics(name), process, lambda: project.output(name))
    everybody = psutil.Process(process.pid).children(recursive=True)
    assert len(everybody) >= 5  # torchrun, two ranks, a loader of rows each
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(each.pid) for each in everybody) and not processes_of(project.folder(name)))

"""The parent of a launch: gives the run's own code, logs the launcher's lines, forwards signals, leaves no process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import HANG_S, is_alive, wait_until

from sftplay import log as console
from sftplay import signals
from sftplay.launch import follow as following
from sftplay.launch.command import Launch
from sftplay.launch.follow import FolderGone, follow
from sftplay.launch.run_folder import RunFolder
from sftplay.log import LINE, STATUS

ROOT = Path(__file__).resolve().parents[2]

CONFIG = "model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n"

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
from sftplay import log
from sftplay.launch.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
def wait_for_signal():
    got = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: got.append(n))
    folder.update_status(ranks=[{"pid": os.getpid()}], ready=True)
    while not got:
        time.sleep(0.02)
    return got[0]
def wait_for_file(name):
    while not (folder.path / name).exists():
        time.sleep(0.02)
"""


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.update_status(state="running", exit_code=None, ranks=[], attempts=[{"from_step": 0, "cause": None}])
    return run


def worker(folder, body):
    return Launch((sys.executable, "-c", PRELUDE + body, str(folder.path)), {"SFTPLAY_FOLLOWED": "1"})


def status_of(folder):
    return folder.read_json("status.json")


@pytest.mark.parametrize(("recorded", "launcher_code"), [(4, 1), (0, 1), (143, 0)])
def test_the_code_in_status_goes_before_the_launchers_code(folder, recorded, launcher_code):
    body = f"folder.update_status(exit_code={recorded}, state='told'); os._exit({launcher_code})"
    assert follow(worker(folder, body), folder) == recorded
    assert status_of(folder)["state"] == "told"


@pytest.fixture
def no_sign_of_life(monkeypatch):
    """A worker that starts slowly, because the machine is busy, is no reason for a line of its own."""
    monkeypatch.setattr(console, "SIGN_OF_LIFE_S", 10 * HANG_S)


@pytest.mark.usefixtures("no_sign_of_life")
def test_marked_lines_reach_the_screen_and_all_others_the_log(folder, capsys):
    body = "log.say('two\\nlines'); print('a library speaks', flush=True); folder.update_status(exit_code=0)"
    assert follow(worker(folder, body), folder) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[train] two\n[train] lines\n", "")
    assert (folder.logs / "launch.log").read_text() == "a library speaks\n"
    assert not {LINE, STATUS} & set(captured.out)


@pytest.mark.usefixtures("no_sign_of_life")
def test_under_json_the_lines_of_a_run_go_to_standard_error(folder, capsys, monkeypatch):
    monkeypatch.setenv(console.JSON, "1")
    body = "log.say('hello'); folder.update_status(exit_code=0)"
    assert follow(worker(folder, body), folder) == 0
    assert capsys.readouterr() == ("", "[train] hello\n")


def test_a_worker_killed_from_outside_is_a_failed_run_with_5(folder, capsys):
    body = "folder.update_status(step=3); print('last words', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    assert follow(worker(folder, body), folder) == 5
    status = status_of(folder)
    assert (status["state"], status["exit_code"]) == ("failed", 5)
    assert status["attempts"] == [{"from_step": 0, "to_step": 3, "cause": "killed by SIGKILL"}]
    error = capsys.readouterr().err
    assert "last words" in error
    assert "memory may have run out" in error
    assert "fix: look at" in error


def test_a_worker_that_ends_without_a_report_is_a_bug_with_its_traceback_shown(folder, capsys):
    assert follow(worker(folder, "import sftplay.nowhere"), folder) == 1
    assert status_of(folder)["state"] == "failed"
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_a_launcher_that_ends_with_1_after_the_ranks_had_met_has_lost_one_of_them(folder, capsys):
    assert follow(worker(folder, "folder.update_status(ranks=[{'pid': 1}]); sys.exit(1)"), folder) == 5
    assert status_of(folder)["exit_code"] == 5
    assert "ended with code 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("how", "then", "end"),
    [
        ("shutil.rmtree(folder.path)", "folder.update_status(exit_code=0)", "pass"),
        ("shutil.rmtree(folder.path)", "log.say('result: ' + str(folder.path))", "pass"),
        ("folder.path.rename(folder.path.with_name('moved'))", "pass", "time.sleep(600)"),
    ],
)
def test_a_run_whose_folder_goes_away_ends_with_5_and_says_what_is_gone(folder, how, then, end, tmp_path, monkeypatch):
    folder.resolved.write_text(CONFIG)
    done = tmp_path / "done"
    # It looks twice. Between the two the worker does all it does to the folder.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: wait_until(done.exists))
    monkeypatch.setattr(following, "time", clock)
    body = f"import shutil; {how}; {then}; Path({str(done)!r}).touch(); {end}"
    with pytest.raises(FolderGone, match="removed or moved while the run was going on") as caught:
        follow(worker(folder, body), folder)
    assert caught.value.exit_code == 5
    if "update" in then:  # a worker may have made a part of it anew
        assert "config.resolved.yaml, logs" in caught.value.what
    else:
        assert "the whole folder" in caught.value.what
        assert not folder.path.exists()


DRIVER = """
import sys
from pathlib import Path
from sftplay.launch.command import Launch
from sftplay.launch.run_folder import RunFolder
from sftplay import signals
from sftplay.launch import follow
signals.ECHO_OF_MAKE_S = float(sys.argv[2])
launch = Launch(tuple(sys.argv[3:]), {"SFTPLAY_FOLLOWED": "1"})
sys.exit(follow.follow(launch, RunFolder(Path(sys.argv[1]))))
"""


@pytest.fixture
def followed(folder):
    """A process that follows a worker with this body; returned when the worker is ready."""
    started = []

    def start(body, *, echo_s=signals.ECHO_OF_MAKE_S):
        argv = [sys.executable, "-c", DRIVER, str(folder.path), str(echo_s), *worker(folder, body).argv]
        driver = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(driver)
        wait_until(lambda: status_of(folder).get("ready") or driver.poll() is not None)
        return driver

    yield start
    for driver in started:
        with contextlib.suppress(ProcessLookupError):
            driver.kill()
        driver.communicate()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_stop_signal_reaches_the_worker_and_its_code_comes_back(folder, followed, name, code):
    body = "n = wait_for_signal(); folder.update_status(got=n, exit_code=128 + n); sys.exit(1)"
    driver = followed(body)
    driver.send_signal(getattr(signal, name))
    assert driver.wait(HANG_S) == code
    assert status_of(folder)["got"] == getattr(signal, name)


def test_a_second_signal_ends_a_worker_that_takes_its_time(folder, followed, monkeypatch):
    monkeypatch.delenv("MAKELEVEL", raising=False)  # the suite may have been started by make
    driver = followed("wait_for_signal(); folder.update_status(saving=True); time.sleep(600)")
    driver.send_signal(signal.SIGTERM)
    wait_until(lambda: status_of(folder).get("saving"))
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(HANG_S) == 143
    assert status_of(folder)["state"] == "stopped"


def test_sigterm_that_make_passes_on_is_no_second_signal(folder, followed, monkeypatch):
    # A signal to make's process group reaches the command directly, and a second time through make.
    monkeypatch.setenv("MAKELEVEL", "1")
    body = "n = wait_for_signal(); folder.update_status(saving=True); wait_for_file('sent')\n"
    # The second one may come late, because the machine is busy.
    driver = followed(body + "folder.update_status(exit_code=128 + n, saved=True)", echo_s=10 * HANG_S)
    driver.send_signal(signal.SIGTERM)
    wait_until(lambda: status_of(folder).get("saving"))
    driver.send_signal(signal.SIGTERM)
    (folder.path / "sent").touch()
    assert driver.wait(HANG_S) == 143
    assert status_of(folder)["saved"]


def test_ranks_of_another_node_get_no_signal_here(folder, followed):
    # The list includes another node's ranks. On this node such a pid is another process.
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        body = (
            f"pids = [{{'pid': {stranger.pid}}}]\n"
            "got = []; signal.signal(signal.SIGTERM, lambda *_, **__: got.append(1))\n"
            "folder.update_status(ranks=pids + [{'pid': os.getpid()}], ready=True)\n"
            "while not got: time.sleep(0.02)\n"  # a handler that writes would wait for a lock that it holds
            "folder.update_status(exit_code=143)"
        )
        driver = followed(body)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(HANG_S) == 143
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a child can be tied to its parent")
def test_a_worker_dies_with_a_follower_that_is_killed(folder, followed):
    driver = followed(f"folder.update_status(pid=os.getpid(), ready=True); time.sleep({2 * HANG_S})")
    driver.kill()
    driver.wait()
    wait_until(lambda: not is_alive(status_of(folder)["pid"]))


def test_the_run_goes_on_when_its_screen_is_gone(folder, followed):
    body = "folder.update_status(ready=True); wait_for_file('closed')\nfor n in range(20): log.say(f'line {n}')\n"
    driver = followed(body + "folder.update_status(exit_code=0, finished=True)")
    driver.stdout.close()
    driver.stdout = None
    (folder.path / "closed").touch()
    assert driver.wait(HANG_S) == 0
    assert status_of(folder)["finished"]
    assert driver.stderr.read() == ""

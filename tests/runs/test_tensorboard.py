"""TensorBoard: on this machine only, on a free port, in the background, and stopped by its own pid file."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import HANG_S, wait_until

from sftplay.commands.report import stop
from sftplay.errors import RunError
from sftplay.runs import tensorboard

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(".cache/tensorboard.json")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which a TensorBoard is started once; it is ended at the end whatever happened."""
    root = tmp_path_factory.mktemp("place with space")
    yield root
    with contextlib.suppress(OSError, ValueError):
        os.kill(json.loads((root / RECORD).read_text())["pid"], signal.SIGKILL)


def call(place, *words):
    # Returning at once means that nothing of the child keeps these pipes open either.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "sftplay", *words]
    return subprocess.run(argv, cwd=place, env=env, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.fixture(scope="module")
def started(place):
    """The output of `tensorboard` when its first port is taken, the port, and the record it left."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = call(place, "tensorboard", "--port", str(port))
    return done, port, json.loads((place / RECORD).read_text())


@pytest.mark.contract
def test_it_answers_on_the_next_free_port_of_this_machine_when_the_command_returns(started):
    done, taken, record = started
    assert done.returncode == 0, done.stderr
    url = re.search(r"http://127\.0\.0\.1:(\d+)", done.stdout)
    assert taken < int(url[1]) <= taken + 50
    assert record["url"] == url[0]
    with urllib.request.urlopen(url[0], timeout=HANG_S) as page:
        assert b"TensorBoard" in page.read()


@pytest.mark.contract
def test_it_listens_on_the_loopback_address_only(started):
    port = int(started[2]["url"].rsplit(":", 1)[1])
    with socket.socket() as elsewhere:  # 127.0.0.2 is this machine too, but not the address it is bound to
        elsewhere.settimeout(5)
        assert elsewhere.connect_ex(("127.0.0.2", port)) != 0


@pytest.mark.contract
def test_started_again_it_only_says_where_it_is(place, started):
    done = call(place, "tensorboard")
    assert (done.returncode, json.loads((place / RECORD).read_text())) == (0, started[2])
    assert f"already running: {started[2]['url']}" in done.stdout


@pytest.mark.contract
def test_over_another_folder_it_says_that_this_one_is_not_shown(place, started):
    done = call(place, "tensorboard", "--config", str(ROOT / "configs/run_demo.yaml"), "output_dir=elsewhere")
    assert done.returncode == 0, done.stderr
    assert "it does not show elsewhere; `make tb-stop` first" in done.stdout
    inside = call(place, "tensorboard", "--run", "mine")
    assert "does not show" not in inside.stdout


def test_stopped_it_is_gone_and_stopping_again_finds_nothing(place, started):
    pid = started[2]["pid"]
    assert tensorboard.start_time(pid) == started[2]["started"]
    assert f"stopped (process {pid})" in call(place, "tb-stop").stdout
    wait_until(lambda: tensorboard.start_time(pid) == "")
    assert not (place / RECORD).exists()
    again = call(place, "tb-stop")
    assert again.returncode == 0
    assert "no TensorBoard of ours is running" in again.stdout


@contextlib.contextmanager
def serving(status, body):
    """The port of a server on this machine that gives every question the same answer."""

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_a_stranger_that_takes_the_port_at_the_last_moment_is_no_success(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(200, json.dumps({"data_location": "/elsewhere"}).encode()) as port:
        monkeypatch.setattr(tensorboard, "free_port", lambda first: port)
        with pytest.raises(RunError, match="did not start"):
            tensorboard.start_board(tmp_path / "outputs", port)
    assert not RECORD.exists()


def test_two_starts_at_once_make_one_board(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started, may_answer = [], threading.Event()

    def start(*_, **__):
        started.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(tensorboard, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    monkeypatch.setattr(tensorboard, "running", lambda: json.loads(RECORD.read_text()) if RECORD.exists() else None)
    monkeypatch.setattr(tensorboard, "answers", lambda *_: may_answer.wait(HANG_S))
    with ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(tensorboard.start_board, tmp_path / "outputs", 0) for _ in "ab"]
        wait_until(lambda: len(started) > 0)
        may_answer.set()
        assert len({each.result() for each in starts}) == 1
    for board in started:
        board.communicate()
    assert len(started) == 1


WHOLE = {"url": "http://127.0.0.1:1", "folder": "outputs"}
UNFIT_RECORDS = {
    "this process group": {**WHOLE, "pid": 0, "started": ""},
    "every process": {**WHOLE, "pid": -1, "started": ""},
    "init": {**WHOLE, "pid": 1, "started": tensorboard.start_time(1)},
    "true": {**WHOLE, "pid": True, "started": tensorboard.start_time(1)},
    "a pid no system has": {**WHOLE, "pid": 2**70, "started": ""},
    "a pid with a fraction": {**WHOLE, "pid": float(os.getpid()), "started": tensorboard.start_time(os.getpid())},
    "no TensorBoard": {**WHOLE, "pid": os.getpid(), "started": tensorboard.start_time(os.getpid())},
    "one without an address": {"pid": os.getpid(), "started": tensorboard.start_time(os.getpid())},
    "a list": [],
}  # fmt: skip


@pytest.mark.parametrize("record", UNFIT_RECORDS)
def test_a_pid_file_that_names_anything_else_stops_nothing(tmp_path, monkeypatch, record):
    monkeypatch.chdir(tmp_path)
    RECORD.parent.mkdir()
    RECORD.write_text(json.dumps(UNFIT_RECORDS[record]))
    sent = []
    monkeypatch.setattr(tensorboard.os, "kill", lambda *signalled: sent.append(signalled))
    assert stop(None) == 0
    assert sent == []
    assert not RECORD.exists()


@pytest.mark.contract
def test_a_run_that_is_not_there_is_refused_with_the_nearest_name_and_starts_nothing(tmp_path):
    for name in ("night-1", "demo"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
        (tmp_path / "outputs" / name / "config.resolved.yaml").touch()
    done = call(tmp_path, "tensorboard", "--run", "nihgt-1")
    assert done.returncode == 2
    assert "no run 'nihgt-1'" in done.stderr
    assert "did you mean --run=night-1?" in done.stderr
    done = call(tmp_path, "tensorboard", "--run", "zzz")
    assert "leave --run= out to see all runs" in done.stderr
    assert not (tmp_path / RECORD).exists()
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == {"night-1", "demo"}


def test_a_process_of_somebody_else_is_not_ours(monkeypatch):
    words = [sys.executable, "-c", "import time; print(); time.sleep(600)", tensorboard.MODULE]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as other:
        other.stdout.readline()  # a process has no command line yet while it is being replaced by exec
        assert tensorboard.is_board(other.pid)
        monkeypatch.setattr(tensorboard.os, "getuid", lambda: 12345)
        assert not tensorboard.is_board(other.pid)
        other.kill()

"""A rank that fails leaves its code and its reason, also where nothing can be read or written any more."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sftplay.launch.run_folder import RunFolder
from sftplay.tasks import worker

TOLD = {"cause": "disk gone", "text": "outputs/run: disk gone\n  fix: mount it again"}
ERROR: dict[str, object] = {"code": "run", "what": "disk gone"}


@pytest.fixture
def no_more_files() -> Iterator[None]:
    """No file can be opened: the process holds as many as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in taken:
            os.close(handle)


def test_a_rank_whose_run_folder_was_removed_still_says_why_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert worker._fail(RunFolder(tmp_path / "removed"), 5, **TOLD, error=ERROR) == 5
    assert TOLD["text"] in capsys.readouterr().err


def test_a_rank_that_has_no_file_left_to_open_still_says_why_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_more_files: None
):
    folder = RunFolder(tmp_path)
    with pytest.raises(OSError, match="Too many open files"):
        folder.read_json("status.json")
    assert worker._fail(folder, 5, **TOLD, error=ERROR) == 5
    assert TOLD["text"] in capsys.readouterr().err


def test_a_bug_on_the_main_rank_behind_anothers_failure_is_its_consequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.update_status(state="failed", exit_code=4, error={"code": "data", "what": "no rows"})
    assert worker._fail(folder, 1, cause="RuntimeError: nobody came", text="Traceback: nobody came") == 4
    assert folder.read_json("status.json")["error"] == {"code": "data", "what": "no rows"}
    output = capsys.readouterr()
    assert "nobody came" in output.err  # the rank's log
    assert "nobody came" not in output.out


@pytest.mark.parametrize(("rank", "code"), [("0", 143), ("1", 0)])
def test_a_stopped_run_ends_with_the_signals_code_on_the_main_rank_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, code: int
):
    monkeypatch.setenv("RANK", rank)
    folder = RunFolder(tmp_path)
    folder.update_status(state="running", exit_code=None)
    # torchrun ends the others where one ends with another code than 0.
    assert worker._stop(folder, signal.SIGTERM) == code
    assert folder.read_json("status.json")["state"] == "stopped"


def test_a_rank_that_failed_before_the_main_rank_began_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.update_status(state="failed", exit_code=4, error=ERROR)
    seen = []
    monkeypatch.setattr(worker.log, "redirect", lambda path: None)
    monkeypatch.setattr(worker, "die_with_parent", lambda: None)
    monkeypatch.setattr(worker, "answer_with_stacks", lambda *_: None)
    monkeypatch.setattr(worker.StopAtOnce, "install", lambda self: None)
    monkeypatch.setattr(worker, "_work", lambda folder, outside: seen.append(folder.read_json("status.json")) or 0)
    assert worker.main(str(tmp_path)) == 0
    assert seen == [{"state": "failed", "exit_code": 4, "error": ERROR, "pid": os.getpid()}]

"""A rank that fails leaves its code and its reason, and what several ranks meet is said once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from sftplay.launch.run_folder import RunFolder
from sftplay.log import LINE
from sftplay.tasks import worker


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    return folder


def test_a_rank_whose_run_folder_was_removed_still_says_why_and_ends_with_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    error: dict[str, object] = {"code": "run", "what": "disk gone"}
    assert worker._fail(RunFolder(tmp_path / "removed"), 5, cause="disk gone", text="run: disk gone", error=error) == 5
    assert "run: disk gone" in capsys.readouterr().err


def test_a_bug_on_the_main_rank_behind_anothers_failure_is_its_consequence(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
):
    folder.update_status(state="failed", exit_code=4, error={"code": "data", "what": "no rows"})
    assert worker._fail(folder, 1, cause="RuntimeError: nobody came", text="Traceback: nobody came") == 4
    assert folder.read_json("status.json")["error"] == {"code": "data", "what": "no rows"}
    output = capsys.readouterr()
    assert "nobody came" in output.err  # the rank's log
    assert "nobody came" not in output.out


@pytest.mark.parametrize(("rank", "code"), [("0", 143), ("1", 0)])
def test_a_stopped_run_ends_with_the_signals_code_on_the_main_rank_only(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, rank: str, code: int
):
    monkeypatch.setenv("RANK", rank)
    folder.update_status(state="running", exit_code=None)
    # torchrun ends the others where one ends with another code than 0.
    assert worker._stop(folder, signal.SIGTERM) == code
    assert folder.read_json("status.json")["state"] == "stopped"


@pytest.mark.parametrize("is_bug", [False, True])
def test_two_ranks_that_fail_alike_are_told_of_once_and_others_each(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_bug: bool
):
    monkeypatch.setenv("SFTPLAY_FOLLOWED", "1")
    folder.write_json("status.json", {"exit_code": None, "error": None})
    error = None if is_bug else {"code": "data", "what": "row 7 is bad"}
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        text = "row 7 is bad\n  fix: mend it"
        assert worker._fail(folder, 4, cause="row 7 is bad", text=text, error=error) == 4
    output = capsys.readouterr()
    assert output.out == f"{LINE}row 7 is bad\n{LINE}  fix: mend it\n"
    assert output.err.count("row 7 is bad") == 2  # the log of each rank
    worker._fail(folder, 5, cause="disk full", text="disk full", error={"code": "run", "what": "disk full"})
    assert f"{LINE}disk full" in capsys.readouterr().out
    assert folder.read_json("status.json")["exit_code"] == 5

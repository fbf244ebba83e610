"""report and compare as commands, and the report that every run leaves at its end."""

from __future__ import annotations

import json
import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from in_process import Inputs, train_in, written_config

from sftplay import cli
from sftplay.config.load import load_config
from sftplay.data.read import read_rows
from sftplay.launch.command import Launch
from sftplay.launch.run_folder import RunFolder
from sftplay.runs import start

pytestmark = pytest.mark.usefixtures("verbs_environment")


def work(launch: Launch, folder: RunFolder, *, check_nodes: Any = None, **named: Any) -> int:
    """Stands for the workers and their parent: the run itself, in this process."""
    outcome = train_in(load_config(folder.resolved), folder, **named).outcome
    ended = {"state": "done", "exit_code": 0} if not outcome.stop_signal else {"state": "stopped", "exit_code": 143}
    folder.update_status(**ended, step=outcome.step)
    folder.close_attempt("SIGTERM" if outcome.stop_signal else "done")
    return ended["exit_code"]


@pytest.fixture(scope="module")
def config(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a run that was trained by `train` to its end, and is called `run`."""
    home = tmp_path_factory.mktemp("look place")
    changes = {"train__eval_steps": 2, "eval__after": True, "train__dataloader_pin_memory": True}
    path = written_config(home, inputs, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "follow", work)
        assert cli.main(["train", "--config", str(path)]) == 0
    return path


@pytest.fixture
def folder(config: Path) -> RunFolder:
    return RunFolder(config.parent / "outputs" / "run")


def page(folder: RunFolder) -> str:
    return (folder.path / "report.html").read_text(encoding="utf-8")


def test_a_finished_run_has_its_report_with_plan_notes_and_a_masked_row(folder: RunFolder, inputs: Inputs):
    text = page(folder)
    assert "done</span> at step 4 of 4" in text
    assert "train.dataloader_pin_memory has no effect without a GPU." in text
    (note,) = [n for n in folder.read_json("plan.json")["notes"] if "no effect" in n]
    assert note == "train.dataloader_pin_memory has no effect without a GPU"
    sample = folder.read_json("samples/masked.json")
    path, _, line = sample["source"].rpartition(":")
    assert path == str(inputs.train)
    row = next(row for source, row in read_rows(path) if source.line == int(line))
    question, answer = (turn["content"] for turn in row["messages"])
    assert "".join(token for token, is_learned in sample["tokens"] if is_learned) == answer + "<|im_end|>"
    assert question in "".join(token for token, is_learned in sample["tokens"] if not is_learned)


def test_held_out_losses_are_kept_a_file_a_step_and_are_those_measured_afterwards(folder: RunFolder):
    kept = {path.stem: json.loads(path.read_text()) for path in folder.eval.glob("step-*.json")}
    assert set(kept) == {"step-2", "step-4"}
    # `evaluate` sums the loss in its own way over the same rows.
    assert kept["step-4"]["loss"] == pytest.approx(folder.read_json("eval/after.json")["loss"], rel=1e-5)
    assert kept["step-2"]["step"] == 2


def test_report_writes_the_page_anew_and_prints_its_path(
    config: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]
):
    target = folder.path / "report.html"
    target.unlink()
    assert cli.main(["report", "--config", str(config)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    target.unlink()
    assert cli.main(["report", "--config", str(config), "--run", str(folder.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(target)}
    assert target.is_file()


def test_a_report_that_cannot_be_written_is_an_error_of_the_machine_and_leaves_no_half_page(
    config: Path, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert cli.main(["report", "--config", str(config)]) == 3
    assert "No space left on device" in capsys.readouterr().err
    assert not list(folder.path.glob(".report*"))


def test_eval_brings_the_report_up_to_date(config: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str]):
    (folder.path / "report.html").unlink()
    assert cli.main(["eval", "--config", str(config), "--json"]) == 0
    output = capsys.readouterr()
    assert f"[report] report: {folder.path / 'report.html'}" in output.err
    before = json.loads(output.out)["before"]
    assert f"{before['loss']:.4g}" in page(folder)


# The end of a run


def ended(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, *, code: int, state: str) -> int:
    """`run_workers` with a run that ends at once: its exit code."""

    def follow(launch: Launch, folder: RunFolder, *, check_nodes: Any) -> int:
        folder.update_status(state=state, exit_code=code, step=3)
        return code

    monkeypatch.setattr(start, "follow", follow)
    monkeypatch.setattr(start, "prepare_deepspeed", lambda *_, **__: None)
    args = Namespace(tb=False, json=False, verb="train", nnodes=1)
    cfg = load_config(Path(__file__).resolve().parents[2] / "configs/run_demo.yaml")
    return start.run_workers(Launch(("python",), {}), folder, cfg=cfg, args=args)


@pytest.mark.parametrize(("code", "state"), [(143, "stopped"), (5, "failed"), (1, "failed"), (0, "done")])
def test_a_run_has_its_report_however_it_ends_and_keeps_its_code(
    code: int, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = RunFolder(tmp_path / "run")
    assert ended(folder, monkeypatch, code=code, state=state) == code
    assert f"{state}</span> at step 3" in page(folder)


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ValueError("of the page"), RecursionError()])
def test_a_report_that_fails_changes_no_exit_code_and_is_said(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr("sftplay.report.report.render", fail)
    assert ended(RunFolder(tmp_path / "run"), monkeypatch, code=143, state="stopped") == 143
    output = capsys.readouterr().out
    assert "[report] note: no report (" in output
    assert (fault.strerror if isinstance(fault, OSError) else type(fault).__name__) in output
    log_file = tmp_path / "run" / "logs" / "report.log"
    assert f"{log_file} has the traceback" in output
    assert "in fail\n    raise fault\n" in log_file.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_that_comes_while_the_page_is_written_changes_neither_run_nor_page(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder.path / "report.html").write_text("the page of before")

    def stop(_file: int) -> None:
        if list(folder.path.glob(".report.html.*")):  # the new page lies there under its scratch name
            signal.raise_signal(number)

    monkeypatch.setattr(os, "fsync", stop)
    assert ended(folder, monkeypatch, code=0, state="done") == 0
    assert f"note: no report: stopped by {signal.Signals(number).name}" in capsys.readouterr().out
    assert folder.read_json("status.json")["state"] == "done"
    assert [path.name for path in folder.path.glob("*report.html*")] == ["report.html"]
    assert page(folder) == "the page of before"


# compare


def test_compare_finds_runs_by_name_and_by_folder(
    config: Path, folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(config.parent)  # names are looked for in outputs/
    assert cli.main(["compare", "--a", "run", "--b", str(folder.path), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["config"], output["same_held_out"]) == ([], True)
    assert cli.main(["compare", "--a", "run", "--b", "latest"]) == 0
    assert "figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--a", "", "--b", "run"], "--a: no run is named"),
        (["--a", "run"], "the following arguments are required: --b"),
        (["--a", "run", "--b", "nowhere"], "--b: no run 'nowhere'"),
        (["--a", "run", "--b", "run", "seed=3"], "compare has no config to set 'seed=3' in"),
    ],
)
def test_what_compare_cannot_do_is_refused(
    arguments: list[str], output: str, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(config.parent)
    assert cli.main(["compare", *arguments]) == 2
    assert output in capsys.readouterr().err

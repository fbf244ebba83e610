"""What may differ between a run and its continuation."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sftplay.atomic import write_text
from sftplay.cli import main
from sftplay.commands import train as train_command
from sftplay.config.data import DataConfig
from sftplay.config.load import load_config
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import ModelConfig, RunConfig
from sftplay.errors import DataError, MachineError
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe
from sftplay.plan.sizing import size_run
from sftplay.runs import start


def config(**data: object) -> RunConfig:
    return RunConfig(model=ModelConfig(name="a"), data=DataConfig(train_path="b", **data))  # type: ignore[arg-type]


@pytest.fixture
def finished(write_config: Callable[..., Path], tmp_path: Path) -> Path:
    """The config of a run that has ended well."""
    return end_well(write_config(), tmp_path)


def end_well(path: Path, tmp_path: Path) -> Path:
    """`path`, a config; its run gets the files of a run that trained on two processes and ended well."""
    folder = RunFolder(tmp_path / "outputs" / "run")
    sized = size_run(load_config(path), probe(), world_size=2, vocab_size=400).cfg
    write_text(folder.resolved, dump_resolved(sized))
    folder.write_json("status.json", {"state": "done", "exit_code": 0})
    return path


def test_finished_run_resumes_to_nothing(finished: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["resume", "--config", str(finished)]) == 0
    assert "is finished: nothing to do" in capsys.readouterr().out


def test_finished_run_that_is_asked_for_more_is_refused(finished: Path, capsys: pytest.CaptureFixture[str]):
    words = ["resume", "--config", str(finished), "train.max_steps=9", "seed=1"]
    assert main(words) == 2
    errors = capsys.readouterr().err
    assert "train.max_steps was 4 when the run began and is 9 now" in errors
    assert "seed was 42 when the run began and is 1 now" in errors


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """The same run, stopped behind a checkpoint of two processes."""
    return stop(finished, tmp_path)


def stop(path: Path, tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.write_json("status.json", {"state": "stopped"})
    marker = folder.checkpoints / "checkpoint-2" / "COMPLETE.json"
    write_text(marker, json.dumps({"step": 2, "world_size": 2, "files": {}}))
    return path


def test_another_number_of_processes_is_taken_and_said_unless_the_effective_batch_cannot_be_split_over_it(
    stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(start, "follow", lambda *_, **__: pytest.fail("it was started"))
    words = ["resume", "--config", str(stopped), "--dry-run", "--nproc"]
    assert main([*words, "1"]) == 0
    assert "began on 2 process(es) and continues on 1, each with" in capsys.readouterr().out
    assert main([*words, "3"]) == 2
    assert "effective batch 8 cannot be split exactly over 3 process(es)" in capsys.readouterr().err


LORA = {"tuning__mode": "lora", "tuning__lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


@pytest.mark.parametrize(
    ("keys", "in_config", "is_random"),
    [
        pytest.param({"tuning__mode": "full"}, {}, False, id="no random numbers"),
        pytest.param({"tuning__mode": "full"}, {"attention_dropout": 0.1}, True, id="the model's dropout"),
        pytest.param({"tuning__mode": "full", "train__neftune_alpha": 5}, {}, True, id="noise"),
        pytest.param(LORA, {}, True, id="the adapter's dropout"),
    ],
)
def test_a_move_says_where_dropout_and_noise_draw_other_numbers(
    keys: dict[str, Any], in_config: dict[str, float], is_random: bool, tiny_llama: Path, tmp_path: Path,
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    model = shutil.copytree(tiny_llama, tmp_path / "model")
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | in_config))
    config = stop(end_well(write_config(model__name=str(model), **keys), tmp_path), tmp_path)
    assert main(["resume", "--config", str(config), "--dry-run", "--nproc", "1"]) == 0
    said = capsys.readouterr().out
    assert "began on 2 process(es)" in said
    assert ("dropout and noise draw other numbers" in said) == is_random


def test_checkpoint_given_as_a_path_names_its_run(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    text = json.loads(stopped.read_text())
    del text["run_name"]
    stopped.write_text(json.dumps(text))
    at = tmp_path / "outputs" / "run" / "checkpoints" / "checkpoint-2"
    words = [f"train.resume={at}", "--nproc", "2", "--dry-run"]
    assert main(["train", "--config", str(stopped), *words]) == 0
    assert str(tmp_path / "outputs" / "run") in capsys.readouterr().out


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """In place of the workers: writes the first of these into status.json and ends with its exit code."""
    endings: list[dict[str, object]] = []

    def follow(_command: object, folder: RunFolder, **_: object) -> object:
        folder.update_status(**endings[0])
        return endings.pop(0)["exit_code"]

    monkeypatch.setattr(start, "follow", follow)
    return endings


def refused(code: int) -> dict[str, object]:
    return {"state": "failed", "exit_code": code, "error": DataError("row 40 is bad", fix="mend it").as_json()}


@pytest.mark.parametrize("code", [2, 3, 4])
def test_refusal_before_the_first_step_leaves_neither_a_run_nor_another_latest_and_its_name_is_free(
    code: int, write_config: Callable[..., Path], refusing: list[dict[str, object]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    output = tmp_path / "outputs"
    RunFolder(output / "before").create()
    RunFolder(output / "before").become_latest()
    refusing += [refused(code), {"state": "failed", "exit_code": 1}, {"state": "done", "exit_code": 0}]
    assert main(["train", "--config", str(write_config()), "--json"]) == code
    assert sorted(path.name for path in output.iterdir()) == [".set-aside", "before", "latest"]
    assert str((output / "latest").readlink()) == "before"
    (kept,) = (output / ".set-aside").iterdir()
    told = capsys.readouterr()
    assert f"failed before the first step; kept in {kept}, and the name run can be used again" in told.err
    assert json.loads(told.out)["run"] == str(kept)
    assert RunFolder(kept).read_json("status.json")["error"]["what"] == "row 40 is bad"
    assert "row 40 is bad" in (kept / "report.html").read_text()
    for code in (1, 0):  # a bug before the first step stays where it is until the next start
        assert main(["train", "--config", str(write_config(data__on_bad_row="skip"))]) == code
        assert (output / "run" / "config.resolved.yaml").is_file()
    assert len(list((output / ".set-aside").iterdir())) == 2


def test_refusal_of_the_command_or_behind_the_probe_leaves_nothing_that_takes_a_name(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise MachineError("no room")

    config = write_config(run_name=None)
    with monkeypatch.context() as patch:
        patch.setattr(train_command, "build_command", refuse)
        assert main(["train", "--config", str(config)]) == 3
    assert list((tmp_path / "outputs").iterdir()) == []
    monkeypatch.setattr(train_command, "say_sizing", refuse)  # behind the probe
    assert main(["train", "--config", str(config)]) == 3
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [".set-aside"]


def test_run_that_made_a_step_stays_where_it_is_when_a_resume_is_refused(
    write_config: Callable[..., Path], refusing: list[dict[str, object]], tmp_path: Path
):
    refusing += [{"state": "stopped", "exit_code": 143, "step": 2}, refused(4)]
    config = write_config()
    assert main(["train", "--config", str(config)]) == 143
    assert main(["resume", "--config", str(config)]) == 4
    assert (tmp_path / "outputs" / "run" / "config.resolved.yaml").is_file()
    assert main(["train", "--config", str(config)]) == 2


def test_run_without_a_step_is_begun_anew_by_train_with_resume_auto_even_after_the_config_has_changed(
    write_config: Callable[..., Path], refusing: list[dict[str, object]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    refusing += [{"state": "failed", "exit_code": 5}, {"state": "done", "exit_code": 0}]
    assert main(["train", "--config", str(write_config())]) == 5
    config = write_config(seed=7, train__resume="auto", train__neftune_alpha=5)
    capsys.readouterr()
    assert main(["resume", "--config", str(config)]) == 2
    said = capsys.readouterr().err
    assert "restore it, or `make train`: this start made no step" in said
    assert "train.neftune_alpha was null when the run began and is 5.0 now" in said  # as the file writes it
    assert main(["train", "--config", str(config)]) == 0
    assert load_config(tmp_path / "outputs" / "run" / "config.resolved.yaml").seed == 7


BROKEN = {
    "status.json": [
        (b"[]", "holds no JSON object", {}),
        (b'{"step": 1, "attempts": 5, "pid": "x"}', "has an odd 'attempts', 'pid'", {"step": 1}),
        (b'{"error": "no", "ranks": [1], "step": 2}', "has an odd 'error', 'ranks'", {"step": 2}),
    ],
    "plan.json": [
        (b"{", "is no JSON", {}),
        (b'{"shortages": [3], "resized": 1, "world_size": 2}', "has an odd 'resized', 'shortages'", {"world_size": 2}),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "said", "kept"), [(n, *case) for n, cases in BROKEN.items() for case in cases]
)
def test_small_file_that_is_broken_is_named_kept_and_passed_over_by_a_resume(
    name: str, content: bytes, said: str, kept: dict[str, object], stopped: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.write_json("plan.json", {"world_size": 2})
    (folder.path / name).write_bytes(content)
    (folder.path / "events.jsonl").write_bytes(b'[]\n{"event": 5}\n\xff\n{"event": "out_of_memory"}\n')
    found: list[dict[str, object]] = []
    monkeypatch.setattr(start, "follow", lambda *_, **__: found.append(folder.read_json(name)) or 0)
    assert main(["resume", "--config", str(stopped), "--nproc", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"{name} {said}: passed over, and kept as {name}.broken" in printed
    assert "events.jsonl: line 1, 3 cannot be read: passed over" in printed
    assert (folder.path / f"{name}.broken").read_bytes() == content
    assert kept.items() <= found[0].items()
    assert folder.read_json("plan.json")["world_size"] == 2


def test_a_demo_on_several_nodes_is_refused_with_the_command_that_takes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["demo", "--nnodes", "2", "--node-rank", "1", f"output_dir={tmp_path}"]) == 2
    assert "make train-distributed CONFIG=configs/run_demo.yaml NNODES=2" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words", ["--nnodes=2 --node-rank=2", "--node-rank=1", "--nnodes=0", "--nnodes=2 --node-rank=-1"]
)
def test_a_number_that_no_node_has_is_refused_before_anybody_is_waited_for(words, capsys):
    assert main(["train", "--config", "configs/run_demo.yaml", *words.split()]) == 2
    said = capsys.readouterr()
    assert "--node-rank: there is no node" in said.err
    assert "waiting" not in said.out + said.err


def test_a_port_that_is_taken_or_none_is_refused_before_a_launch(capsys):
    words = ["train", "--config", "configs/run_demo.yaml", "--nproc=2"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*words, f"--master-port={port}"]) == 3
    assert f"--master-port: something listens on port {port} already" in capsys.readouterr().err
    assert main([*words, "--master-port=99999"]) == 2
    assert "argument --master-port: not a port: '99999'" in capsys.readouterr().err

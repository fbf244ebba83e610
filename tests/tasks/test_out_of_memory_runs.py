"""Memory runs out inside a step of a really launched run: the same rows are run again in smaller micro-batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from out_of_memory import ROOT, hooked
from processes import HANG_S
from safetensors.torch import load_file
from small_run import Inputs, write_small_run

from sftplay.launch.run_folder import RunFolder

Sftplay = Callable[..., CompletedProcess[str]]
Write = Callable[..., Path]

ROWS = {
    "train__effective_batch_size": 32, "train__max_steps": 4, "model__max_seq_len": 64, "train__save_steps": 4,
    "train__learning_rate": 0.003,  # AdamW makes of a gradient's last bits a share of the rate
}  # fmt: skip


def own_place(folder: Path) -> dict[str, Any]:
    """Options with which a run finds the kit, though it is started in a folder of its own."""
    return {"env": {"PYTHONPATH": str(ROOT)}, "cwd": folder, "timeout": 120}


def weights(run: Path) -> dict[str, Any]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def plan(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return content


def events(run: Path) -> list[dict[str, Any]]:
    return RunFolder(run).read_events()


def check_same(run: Path, other: Path) -> None:
    assert [line["row_ids"] for line in lines(run)] == [line["row_ids"] for line in lines(other)]
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
    assert [line["label_tokens"] for line in lines(run)] == [line["label_tokens"] for line in lines(other)]
    rates = [line["learning_rate"] for line in lines(run)]
    assert rates == [line["learning_rate"] for line in lines(other)]
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys()
    moved = 0.0
    for name, tensor in ours.items():
        assert float((tensor - theirs[name]).abs().max()) <= 1e-6, name
        moved = max(moved, float(tensor.abs().max()) if "lora_B" in name else 0.0)
    assert moved > 1e-3  # it was trained at all: a B begins at zero


MEASURED = {"train__eval_steps": 2, "eval__after": True, "eval__batch_size": 4}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs, sftplay: Sftplay) -> Path:
    """The run on two processes that no memory fails, measured on its way; what is measured changes no weight."""
    home = tmp_path_factory.mktemp("undisturbed")
    changes = {**ROWS, "run_name": "undisturbed", "train__batch_size": 8, **MEASURED}
    done = sftplay("train", "--config", write_small_run(home, inputs, **changes), "--nproc", 2, **hooked(home, []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same rows again" not in done.stdout
    return home / "outputs" / "undisturbed"


@pytest.mark.slow
def test_memory_that_runs_out_anywhere_in_a_window_changes_neither_weights_nor_rows(
    write_config: Write, sftplay: Sftplay, tmp_path: Path, undisturbed: Path
) -> None:
    runs = tmp_path / "outputs"

    def run(name: str, failures: list[Any]) -> Path:
        config = write_config(f"{name}.yaml", run_name=name, train__batch_size=8, **ROWS)
        done = sftplay("train", "--config", config, "--nproc", 2, **hooked(tmp_path, failures), timeout=HANG_S)
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stdout.count("the same rows again") == len({step for _, step, _, _ in failures})
        return runs / name

    # A window's two micro-batches become twice as many each time: its first, then one in the middle, then its last.
    for name, rank, wheres in (
        ("all", None, ("forward", "backward", "forward")),
        ("one", 1, ("backward", "forward", "backward")),
    ):
        failures = [(rank, step, micro, where) for step, micro, where in zip((1, 2, 3), (1, 2, 8), wheres, strict=True)]
        check_same(run(name, failures), undisturbed)
        sizes = [(each["step"], each["batch_size_before"], each["batch_size"]) for each in events(runs / name)]
        assert sizes == [(1, 8, 4), (2, 4, 2), (3, 2, 1)]


@pytest.mark.contract
@pytest.mark.slow
def test_without_recovery_the_run_dies_of_it_with_a_reason(write_config: Write, sftplay: Sftplay, tmp_path: Path):
    config = write_config(train__batch_size=8, train__oom_recovery=False, **ROWS)
    options = hooked(tmp_path, [(0, 2, 2, "backward")])
    done = sftplay("train", "--config", config, "--nproc", 2, **options, timeout=HANG_S)
    assert done.returncode == 3
    assert "training: out of memory in backward of step 2" in done.stdout
    assert "`make plan` lists" in done.stdout
    assert "the same rows again" not in done.stdout
    status = json.loads((tmp_path / "outputs" / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["error"]["code"]) == ("failed", 3, "memory")


@pytest.mark.slow
def test_memory_that_runs_out_in_the_optimizer_restarts_the_run_from_its_last_checkpoint_with_smaller_micro_batches(
    write_config: Write, sftplay: Sftplay, tmp_path: Path
):
    """A step half taken cannot be run again."""
    changes = {**ROWS, "train__save_steps": 2}
    undisturbed = write_config("undisturbed.yaml", run_name="undisturbed", **changes)
    config = write_config("restarted.yaml", run_name="restarted", **changes)
    assert sftplay("train", "--config", undisturbed, **own_place(tmp_path)).returncode == 0
    planned = plan(tmp_path / "outputs" / "undisturbed")["batch_size"]
    options = hooked(tmp_path, [(0, 3, 0, "optimizer")])
    done = sftplay("train", "--config", config, **options, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "restarted"
    attempts = json.loads((run / "status.json").read_text())["attempts"]
    assert [each["from_step"] for each in attempts] == [0, 2]
    assert plan(run)["batch_size"] < planned
    check_same(run, tmp_path / "outputs" / "undisturbed")
    [event] = events(run)
    assert (event["event"], event["attempt"], event["batch_size_before"]) == ("resized", 1, planned)
    assert event["batch_size"] == plan(run)["batch_size"]


@pytest.mark.slow
def test_evaluation_that_runs_out_of_memory_shrinks_only_itself(
    write_config: Write, sftplay: Sftplay, tmp_path: Path, undisturbed: Path
):
    config = write_config("short.yaml", run_name="short", **ROWS, train__batch_size=8, **MEASURED)
    options = hooked(tmp_path, [], OUT_OF_MEMORY_EVAL_ROWS="2")
    done = sftplay("train", "--config", config, "--nproc", 2, **options, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, short = undisturbed, tmp_path / "outputs" / "short"
    for what in ("the evaluation", "the held-out loss", "answering"):
        assert f"out of memory in {what}: it goes on with" in done.stdout
    assert "the same rows again" not in done.stdout
    assert events(short) == []
    for measured in ("step-2.json", "step-4.json", "after.json"):
        figures, expected = (json.loads((run / "eval" / measured).read_text()) for run in (short, plain))
        assert figures["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    ours, theirs = weights(short), weights(plain)
    assert all((ours[name] == theirs[name]).all() for name in ours)
    answers = [(run / "eval" / "after.jsonl").read_text() for run in (short, plain)]
    assert answers[0] == answers[1]


@pytest.mark.contract
@pytest.mark.slow
def test_where_gradients_travel_within_the_last_micro_batch_the_run_restarts_with_smaller_micro_batches(
    write_config: Write, sftplay: Sftplay, tmp_path: Path, undisturbed: Path
):
    """As in full tuning on GPUs. The other rank waits for gradients that never come, and must not wait for ever."""
    config = write_config(
        "restarted.yaml", run_name="restarted", **{**ROWS, "train__save_steps": 2}, train__batch_size=8
    )
    options = hooked(tmp_path, [(1, 2, 1, "forward"), (1, 3, 4, "backward")], OUT_OF_MEMORY_OVERLAPS="1")
    done = sftplay("train", "--config", config, "--nproc", 2, **options, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "restarted"
    assert "step 2: out of memory in forward on rank 1" in done.stdout
    assert "continues from its last checkpoint with 2 rows at a time instead of 8" in done.stdout
    attempts = json.loads((run / "status.json").read_text())["attempts"]
    assert [each["from_step"] for each in attempts] == [0, 2]
    check_same(run, undisturbed)

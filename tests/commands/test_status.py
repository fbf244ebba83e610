"""`status`: how far the runs of an output folder are, from whatever lies there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HANG_S, is_alive, wait_until
from project import Project, open_project
from small_run import Inputs

from sftplay.cli import main
from sftplay.heartbeat import Heartbeat, heartbeat_path
from sftplay.launch.run_folder import RunFolder
from sftplay.runs.status import describe_runs, format_table

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def put(name: str, *lines: dict[str, Any], age_s: float = 0.0, **status: Any) -> RunFolder:
    """A run of 400 steps below outputs/, which was last written to `age_s` ago."""
    folder = RunFolder(Path("outputs") / name)
    folder.create()
    folder.write_json("status.json", status)
    folder.write_json("manifest.json", {"steps": 400})
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in folder.path.iterdir():
        os.utime(path, (time.time() - age_s,) * 2)
    return folder


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "attempt": 1, "loss": 2.5, "tokens_per_s": 12_345.6, "step_s": 36.0, **more}


def status(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["status", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["status", *words]) == 0
    return capsys.readouterr().out


def test_every_run_has_a_row_and_the_one_that_was_last_written_to_comes_first(capsys: pytest.CaptureFixture[str]):
    put(
        "old", line(400), state="done", step=400, age_s=7200.0, last_checkpoint="outputs/old/checkpoints/checkpoint-400"
    )
    put("new", line(30), line(32, loss=1.25), state="stopped", step=30, exit_code=143, age_s=5.0)
    put("bad", state="failed", step=0, exit_code=4, age_s=600.0, error={"what": "5 rows", "fix": "name the columns"})
    Path("outputs/latest").symlink_to("new")
    Path("outputs/notes").mkdir()
    head, *rows = text_of(capsys).splitlines()
    assert head.split() == ["run", "state", "step", "loss", "tokens/s", "last", "checkpoint", "changed"]
    assert [row.split()[:3] for row in rows] == [
        ["new", "stopped", "32/400"], ["bad", "failed", "(4)"], ["old", "done", "400/400"],
    ]  # fmt: skip
    assert rows[0].split()[3:] == ["1.2500", "12.3K", "5", "s", "ago"]
    assert rows[2].split()[3:] == ["2.5000", "12.3K", "checkpoint-400", "2", "h", "ago"]
    assert len({len(row) for row in (head, *rows)}) == 1  # aligned
    runs = status(capsys)
    assert [(run["run"], run["now"], run["run_state"], run["step"], run["steps"]) for run in runs] == [
        ("new", "stopped", "stopped", 32, 400), ("bad", "failed", "failed", 0, 400), ("old", "done", "done", 400, 400),
    ]  # fmt: skip
    assert runs[1]["error"]["fix"] == "name the columns"
    assert all(run["job_id"] is None and run["eta_s"] is None and run["problems"] == [] for run in runs)


def test_a_run_that_is_held_runs_with_its_eta_and_one_that_nobody_holds_has_died(capsys: pytest.CaptureFixture[str]):
    ranks = [{"peak_bytes": 5 * GIB}, {"peak_bytes": 7 * GIB}]
    lines = [line(298, step_s=10.0), line(299, attempt=2), line(300, attempt=2, step_s=44.0, ranks_memory=ranks)]
    folder = put("run", *lines, state="running", step=200, ranks=[{"pid": 7}])
    assert status(capsys)[0]["now"] == "died"
    assert text_of(capsys).splitlines()[1].split()[1] == "died"
    with folder.locked():
        (run,) = status(capsys)
        # 100 steps at the mean of this attempt's lines, 36 and 44 s.
        assert (run["now"], run["step"], run["eta_s"], run["peak_bytes"]) == ("running", 300, 4000.0, 7 * GIB)
        assert "1 h 06 min" in (text := text_of(capsys))
        assert "7.00 GiB" in text
        # Behind the last line of metrics the heartbeat goes on; one of an earlier attempt's process does not count.
        Heartbeat(heartbeat_path(folder.logs, 0), pid=7).enter("evaluation", step=311)
        Heartbeat(heartbeat_path(folder.logs, 1), pid=6).enter("forward", step=399)
        run = status(capsys, "--run", "run")
        assert (run["step"], run["phase"], run["eta_s"]) == (310, "evaluation", 3600.0)
        assert "now in      evaluation" in text_of(capsys, "--run", "run")


def test_before_there_is_a_state_a_run_is_starting_or_not_started(capsys: pytest.CaptureFixture[str]):
    folder = put("run")
    assert status(capsys, "--run", "run")["now"] == "not started"
    with folder.locked():
        assert status(capsys, "--run", "outputs/run")["now"] == "starting"
    folder.write_json("status.json", {"state": "odd"})
    assert status(capsys)[0]["now"] == "unknown"


def test_one_run_is_told_in_detail_and_a_name_that_is_none_gets_the_nearest(capsys: pytest.CaptureFixture[str]):
    attempts = [
        {"seconds": 3600.0, "gpus": 8, "price_per_hour": 2.5},
        {"seconds": 60.0, "gpus": 8, "price_per_hour": 0},
    ]
    put("run", line(30, reward=0.5), state="failed", step=30, exit_code=5, attempts=attempts,
        error={"what": "rank 1\x1b[2J died", "fix": "make resume"})  # fmt: skip
    text = text_of(capsys, "--run", "run")
    assert text.startswith("run: failed (5) at step 30 of 400, changed 0 s ago\n")
    facts = dict(row.strip().split("  ", 1) for row in text.splitlines()[1:] if "  " in row.strip())
    assert facts["loss"].strip() == "2.5000"
    assert facts["speed"].strip() == "12.3K tokens/s, 36 s a step"
    assert facts["time"].strip() == "1 h 01 min in 2 attempts"
    assert facts["cost"].strip() == "20.00 so far"
    assert facts["checkpoint"].strip() == "none"
    assert facts["error"].strip() == "rank 1?[2J died"  # nothing steers the terminal
    assert main(["status", "--run", "rum"]) == 2
    assert "did you mean 'run'?" in capsys.readouterr().err
    assert main(["status", "output_dir=elsewhere"]) == 2


def test_costs_so_far_and_in_all_are_those_of_hand_arithmetic(capsys: pytest.CaptureFixture[str]):
    earlier = {"seconds": 3600.0, "gpus": 8, "price_per_hour": 2.5}
    now = {"started": time.time() - 1800.0, "gpus": 4, "price_per_hour": 2.0, "cause": None}
    folder = put("run", line(300), state="running", step=300, attempts=[earlier, now])
    with folder.locked():
        (run,) = status(capsys)
    # 1 h x 8 x 2.5 + half an hour x 4 x 2, and 100 steps of 36 s are an hour more: 1 h x 4 x 2.
    assert run["cost"] == pytest.approx(24.0, abs=0.5)
    assert run["cost_total"] - run["cost"] == pytest.approx(8.0)
    assert run["seconds"] == pytest.approx(5400.0, abs=200.0)
    # It died: then it costs nothing from its last write on.
    for name in ("metrics.jsonl", "status.json"):
        os.utime(folder.path / name, (now["started"] + 900.0,) * 2)
    (run,) = status(capsys)
    assert (run["now"], run["cost_total"]) == ("died", None)
    assert run["cost"] == pytest.approx(22.0, abs=0.01)


BROKEN = {"empty": b"", "cut": b'{"state": "run', "list": b"[1, 2]", "binary": b"\xff\xfe\x00", "deep": b"[" * 5000}


@pytest.mark.parametrize("content", [*BROKEN.values(), None], ids=[*BROKEN, "folder"])
@pytest.mark.parametrize(
    "name", ["status.json", "manifest.json", "metrics.jsonl", "slurm.jsonl", "logs/rank0.heartbeat"]
)
def test_a_broken_file_is_named_in_the_row_and_never_a_traceback(
    name: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
):
    folder = put("run", line(30), state="running", step=30)
    (folder.path / name).unlink(missing_ok=True)
    if content is None:
        (folder.path / name).mkdir()
    else:
        (folder.path / name).write_bytes(content)
    with folder.locked():
        (run,) = status(capsys)
        lines = text_of(capsys).splitlines()
    assert run["run"] == "run"
    if not name.endswith("heartbeat") and not (name == "metrics.jsonl" and content == b""):
        assert any(problem.startswith(name) for problem in run["problems"]), run
        assert lines[2].strip() == run["problems"][0]
    if name != "status.json":
        assert run["now"] == "running"


def test_values_of_other_kinds_and_of_older_releases_leave_gaps(capsys: pytest.CaptureFixture[str]):
    odd = {"step": "30", "exit_code": [], "last_checkpoint": 7, "attempts": {"a": 1}, "ranks": 3, "error": "x"}
    put(
        "odd",
        {"step": 10**400, "loss": 1},
        {"step": 31, "loss": "2", "ranks_memory": [1], "step_s": None},
        state=5,
        **odd,
    )
    put("older", state="done", step=4, attempts=[{"from_step": 0, "cause": "done"}], train_seconds=12.5, age_s=60.0)
    first, second = status(capsys)
    assert (first["now"], first["step"], first["loss"], first["exit_code"]) == ("unknown", 31, None, None)
    assert "status.json has an odd 'step'" in first["problems"]
    assert (second["now"], second["seconds"], second["cost"]) == ("done", 12.5, None)
    assert "12.5 s" in text_of(capsys, "--run", "older")
    attempts = [{"from_step": 0, "cause": "done", "seconds": 20.0, "gpus": 0}]
    put(
        "older", state="done", step=4, attempts=attempts, train_seconds=12.5, last_checkpoint="checkpoints/checkpoint-4"
    )
    newer = status(capsys, "--run", "older")
    assert newer["seconds"] == 20.0  # with loading
    assert "checkpoint  checkpoints/checkpoint-4" in text_of(capsys, "--run", "older")


def test_of_two_hundred_runs_and_of_a_huge_file_only_the_ends_are_read(capsys: pytest.CaptureFixture[str]):
    for n in range(199):
        put(f"run-{n}", line(n), state="done", step=n, age_s=float(n))
    huge = put("huge", state="done", step=1, age_s=1e6)
    with huge.metrics.open("r+b") as file:
        file.truncate(2**40)  # a hole of a TiB, which would take minutes to read
        file.seek(2**40)
        file.write(b'\n{"step": 9, "row_ids": [' + b"1, " * 2**17 + b'1]}\n{"step": 10, "lo')
    os.utime(huge.metrics, (1000.0, 1000.0))
    runs = status(capsys)
    assert [run["run"] for run in runs] == [*(f"run-{n}" for n in range(199)), "huge"]
    assert (runs[-1]["step"], runs[-1]["problems"]) == (9, [])


def test_the_time_for_a_table_grows_with_the_runs_and_not_with_their_square():
    (facts,) = describe_runs([put("run", line(3), state="done", step=3).path])

    def seconds(n: int) -> float:
        began = time.process_time()
        assert len(format_table([facts] * n)) == n + 1
        return time.process_time() - began

    assert seconds(4000) < 40 * max(min(seconds(400) for _ in range(3)), 0.001)


def test_trials_of_a_sweep_are_listed_as_the_runs_they_are_and_its_folder_is_none(capsys: pytest.CaptureFixture[str]):
    put("s-trial-000", state="stopped", step=50)
    put("s-trial-001", state="done", step=400, age_s=9)
    (Path("outputs") / "sweeps" / "s" / "trials").mkdir(parents=True)
    (Path("outputs") / "sweeps" / "s" / "trials.jsonl").write_text("{}\n")
    (Path("outputs") / "latest").symlink_to("s-trial-001")
    (Path("outputs") / "gone").symlink_to("nowhere")
    (Path("outputs") / "status.json").write_text("{}")
    assert [(run["run"], run["now"]) for run in status(capsys)] == [("s-trial-000", "stopped"), ("s-trial-001", "done")]
    latest = status(capsys, "--run", "latest")
    assert (latest["run"], latest["step"]) == ("s-trial-001", 400)


def test_a_run_of_somebody_else_that_cannot_be_read_hides_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    put("mine", state="done", step=400)
    put("theirs", state="done", step=400)
    exists = Path.exists

    def refuse(path: Path, **options: Any) -> bool:
        if "theirs" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", refuse)  # as a folder of mode 0700 does
    assert [run["run"] for run in status(capsys)] == ["mine"]


def test_a_folder_without_runs_says_so(capsys: pytest.CaptureFixture[str]):
    assert text_of(capsys).strip() == "no run in outputs"
    assert status(capsys) == []


def test_watching_shows_all_again_until_ctrl_c_and_is_no_one_document(capsys: pytest.CaptureFixture[str]):
    put("mine", line(30), state="stopped", step=30)
    argv = [sys.executable, "-u", "-m", "sftplay", "status", "--watch"]
    with subprocess.Popen(
        argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        shown = (row for row in process.stdout if row.startswith("mine "))
        for _ in range(2):
            next(shown)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_S) == 0
    assert main(["status", "--watch", "--json"]) == 2
    assert "--watch and --json do not go together" in capsys.readouterr().out


@pytest.fixture
def project(inputs: Inputs, tmp_path: Path) -> Iterator[Project]:
    with open_project(tmp_path, inputs, cluster__price_per_hour=3.5) as opened:
        yield opened


@pytest.mark.slow
def test_a_real_run_is_seen_while_it_trains_when_it_is_killed_and_when_it_was_resumed(
    project: Project, capsys: pytest.CaptureFixture[str]
):
    """A run of four steps with a checkpoint at each, which is held behind its third one."""
    held = project.holding("run").after_step(3, project.hook)
    process = project.start("train", "run", "train.save_steps=1", **held)
    group = project.when_held("run", process)
    (run,) = status(capsys)
    assert (run["run"], run["now"], run["step"], run["steps"]) == ("run", "running", 2, 4)
    assert run["eta_s"] > 0
    assert run["peak_bytes"] > 100 * 2**20
    assert run["loss"] == project.metrics("run")[-1]["loss"]
    assert run["cost"] == pytest.approx(run["seconds"] / 3600 * 3.5)  # no GPU: the machine's price
    assert run["cost_total"] > run["cost"]
    os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_alive(member.pid) for member in group))
    died = status(capsys, "--run", "run")
    assert (died["now"], died["run_state"], died["last_checkpoint"]) == ("died", "running", run["last_checkpoint"])
    code, output = project.run("resume", "run", "train.save_steps=1", "cluster.price_per_hour=7")
    assert code == 0, output
    done = status(capsys, "--run", "run")
    first, second = project.status("run")["attempts"]
    assert (done["now"], done["step"], done["n_attempts"]) == ("done", 4, 2)
    assert first["seconds"] == pytest.approx(died["seconds"], abs=1.0)
    assert done["cost"] == pytest.approx((first["seconds"] * 3.5 + second["seconds"] * 7) / 3600)


def test_a_run_of_another_output_folder_is_found_by_what_its_refusal_advises(capsys: pytest.CaptureFixture[str]):
    put("run", state="done", step=8)
    Path("outputs").rename("elsewhere")
    Path("run.yaml").write_text("output_dir: elsewhere\nmodel: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n")
    assert main(["status", "--run", "run"]) == 2
    assert "fix: train one first, or give its folder or its --config=\n" in capsys.readouterr().err
    assert text_of(capsys, "--run", "elsewhere/run") == text_of(capsys, "--config=run.yaml", "--run=run")


def test_the_last_checkpoint_of_a_copied_run_is_the_one_in_the_copy(capsys: pytest.CaptureFixture[str]):
    checkpoint = Path("outputs/run/checkpoints/checkpoint-8")
    put("run", state="stopped", step=8, last_checkpoint=str(checkpoint.absolute()))
    checkpoint.mkdir(parents=True)
    shutil.copytree("outputs/run", "copy")
    for place in ("outputs/run", "copy"):
        its_own = str(Path(place, "checkpoints/checkpoint-8").absolute())
        assert status(capsys, "--run", place)["last_checkpoint"] == its_own
        assert f" {its_own}\n" in text_of(capsys, "--run", place)

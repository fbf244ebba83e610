"""A profile of chosen steps: a trace for viewers, a summary for people, and unchanged weights."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Finished, Inputs, StopAfter, new_run, train, train_in

from sftplay.config.run import ProfileConfig
from sftplay.heartbeat import Heartbeat
from sftplay.train.profiler import ProfileSteps, idle_share

START, STEPS = 2, 2


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The log lines of the profiled run."""
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs, printed: list[str]) -> Finished:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sftplay.log.say", lambda text, tag="train": printed.append(f"[{tag}] {text}"))
        return train(
            tmp_path_factory.mktemp("profiled"), inputs, train__profile={"start": START, "steps": STEPS},
            train__batch_size=4,
        )  # fmt: skip


def trace_of(run: Finished) -> dict[str, Any]:
    path = run.folder.path / "profile" / "rank0.trace.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))


def spans(trace: dict[str, Any], start: str) -> list[dict[str, Any]]:
    """Complete events (`"ph": "X"` in the Chrome trace format) whose name begins with `start`, in order."""
    events = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["name"].startswith(start)]
    return sorted(events, key=lambda each: each["ts"])


def test_phases_of_a_step_stand_in_the_trace_in_their_order(run: Finished):
    trace = trace_of(run)
    # Trace Event Format: every event has ph and name, a complete one (X) has ts and dur in microseconds, pid and tid.
    assert all({"ts", "dur", "pid", "tid"} <= each.keys() and each["dur"] >= 0 for each in spans(trace, ""))
    steps = spans(trace, "ProfilerStep#")
    assert [each["name"] for each in steps] == ["ProfilerStep#2", "ProfilerStep#3"]
    for step in steps:
        inside = [
            each["name"].removeprefix("phase: ")
            for each in spans(trace, "phase: ")
            if step["ts"] <= each["ts"] <= step["ts"] + step["dur"]
        ]
        # 8 rows in micro-batches of 4 are two passes.
        assert inside == ["data", "forward", "backward", "forward", "backward", "optimizer"]


def test_summary_is_at_most_ten_lines_and_names_time_memory_and_file(run: Finished, printed: list[str]):
    lines = "\n".join(text for text in printed if text.startswith("[profile]")).splitlines()
    assert 3 < len(lines) <= 10
    text = "\n".join(lines)
    assert lines[0] == "[profile] steps 2 to 3:"
    assert 50 < sum(map(int, re.findall(r"(\d+)%", lines[1]))) <= 102, lines[1]  # each share is rounded
    for part in ("forward", "backward", "aten::", "memory", str(run.folder.path / "profile" / "rank0.trace.json.gz")):
        assert part in text
    model = run.trainer.model
    # Adapters r 4 train by AdamW, which keeps two fp32 numbers and a step count (4 bytes) for each weight's tensor.
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer_bytes = sum(2 * 4 * p.numel() + 4 for p in trained)
    assert f"optimizer {optimizer_bytes / 1024:.1f} KiB" in text
    assert f"gradients reach {sum(4 * p.numel() for p in trained) / 1024:.1f} KiB" in text


def test_highest_memory_is_that_of_torchs_own_running_count(run: Finished, printed: list[str]):
    events = [each for each in trace_of(run)["traceEvents"] if each["name"] == "[memory]"]
    counts = [each["args"]["Total Allocated"] for each in sorted(events, key=lambda each: each["args"]["Ev Idx"])]
    first = min(events, key=lambda each: each["args"]["Ev Idx"])["args"]
    above = max(counts) - (first["Total Allocated"] - first["Bytes"])
    assert above > 2**20  # scores of 400 words alone
    assert f"activations and the rest {above / 2**20:.1f} MiB" in "\n".join(printed)


def test_weights_and_losses_are_the_same_with_and_without_a_profile(run: Finished, tmp_path: Path, inputs: Inputs):
    plain = train(tmp_path, inputs, train__batch_size=4)
    assert not (plain.folder.path / "profile").exists()
    assert [path.name for path in (run.folder.path / "profile").iterdir()] == ["rank0.trace.json.gz"]
    assert run.trainer.heartbeat.listener is plain.trainer.heartbeat.listener is None
    assert plain.losses == run.losses
    expected = plain.trainer.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in run.trainer.model.state_dict().items())


@pytest.mark.contract
@pytest.mark.slow
def test_every_process_writes_a_trace_with_its_communication(write_config: Any, sftplay: Any, tmp_path: Path):
    config = write_config(train__profile={"start": 2, "steps": 1}, train__batch_size=4)
    done = sftplay("train", "--config", config, "--nproc", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        path = tmp_path / "outputs" / "run" / "profile" / f"rank{rank}.trace.json.gz"
        trace = json.loads(gzip.decompress(path.read_bytes()))
        assert [each["name"] for each in spans(trace, "ProfilerStep#")] == ["ProfilerStep#2"]
        assert {each["name"] for each in spans(trace, "phase: ")} == {
            f"phase: {name}" for name in ("data", "forward", "backward", "communication", "optimizer")
        }
    assert done.stdout.count("[profile] steps 2 to 2:") == 1


def test_resumed_run_profiles_only_a_start_that_lies_ahead(tmp_path: Path, inputs: Inputs, capsys: Any):
    changes = {"train__profile": {"start": 2, "steps": 1}, "train__save_steps": 1, "train__save_total_limit": 4}
    cfg, folder = new_run(tmp_path, inputs, **changes)
    train_in(cfg, folder, StopAfter(1))
    assert not (folder.path / "profile").exists()
    resumed = cfg.with_values({"train.resume": "auto"}, "test")
    train_in(resumed, folder, StopAfter(3))
    trace = folder.path / "profile" / "rank0.trace.json.gz"
    assert [each["name"] for each in spans(json.loads(gzip.decompress(trace.read_bytes())), "ProfilerStep#")] == [
        "ProfilerStep#2"
    ]
    trace.unlink()
    capsys.readouterr()
    train_in(resumed, folder)
    assert not trace.exists()
    assert capsys.readouterr().out.count("nothing is profiled: the run continues after step 2") == 1


def test_evaluation_and_checkpoint_of_the_step_before_are_not_profiled(tmp_path: Path, inputs: Inputs):
    at_2 = {"train__eval_steps": 2, "train__save_steps": 2}
    trace = trace_of(train(tmp_path, inputs, train__profile={"start": 3, "steps": 1}, **at_2))
    assert spans(trace, "phase: forward")
    assert not spans(trace, "phase: evaluation")
    assert not spans(trace, "phase: save")


def test_profile_ends_before_an_evaluation_that_falls_between_its_steps(tmp_path: Path, inputs: Inputs):
    done = train(tmp_path, inputs, train__profile={"start": 1, "steps": 4}, train__eval_steps=2)
    trace = trace_of(done)
    assert [each["name"] for each in spans(trace, "ProfilerStep#")] == ["ProfilerStep#1", "ProfilerStep#2"]
    assert not spans(trace, "phase: evaluation")


def test_start_after_the_last_step_is_reported(capsys: Any):
    heartbeat = Heartbeat()
    profile = ProfileSteps(ProfileConfig(start=9, steps=1), Path("nowhere"), heartbeat=heartbeat)
    profile.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=4), None)
    assert "nothing is profiled: the run ends with step 4, before 9" in capsys.readouterr().out
    assert heartbeat.listener is None


def test_folder_that_cannot_be_made_costs_the_profile_and_not_the_run(tmp_path: Path, inputs: Inputs, capsys: Any):
    cfg, folder = new_run(tmp_path, inputs, train__profile={"start": 1, "steps": 1}, train__max_steps=2)
    (folder.path / "profile").write_text("a file is in the way")
    assert train_in(cfg, folder).outcome.step == 2
    assert "the profile could not be written, the run goes on" in capsys.readouterr().out


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB, less than the trace of a step takes."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs root and the right to mount a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "--lazy", str(mount)], check=True)


@pytest.mark.contract
def test_full_disk_costs_the_profile_and_not_the_run(tmp_path: Path, small_disk: Path, inputs: Inputs, capsys: Any):
    cfg, folder = new_run(tmp_path / "home", inputs, train__profile={"start": 1, "steps": 1}, train__max_steps=2)
    (folder.path / "profile").symlink_to(small_disk)
    assert train_in(cfg, folder).outcome.step == 2
    assert "the profile could not be written, the run goes on" in capsys.readouterr().out
    assert list(small_disk.iterdir()) == []


def test_idle_share_counts_overlapping_work_once():
    # Of 100 ns, 10 to 40 and 60 to 70 are busy; the span from -5 ends where the steps begin.
    work = [(20, 40), (10, 30), (60, 70), (25, 35), (-5, 0)]
    assert idle_share(work, (0, 100)) == pytest.approx(0.60)
    assert idle_share([], (0, 100)) == 1.0
    assert idle_share([(-10, 200)], (0, 100)) == 0.0


@pytest.mark.gpu
def test_profile_on_a_gpu_shows_kernels_idle_share_and_a_snapshot(tmp_path: Path, inputs: Inputs, capsys: Any):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    done = train(tmp_path, inputs, train__profile={"start": 2, "steps": 2})
    output = capsys.readouterr().out
    assert "the GPU was idle for" in output
    assert (done.folder.path / "profile" / "rank0.memory.pickle").stat().st_size > 1000
    assert {each.get("cat") for each in trace_of(done)["traceEvents"]} >= {"kernel", "cpu_op", "user_annotation"}
    lines = [line for line in output.splitlines() if line.startswith("[profile]")]
    assert 5 < len(lines) <= 10

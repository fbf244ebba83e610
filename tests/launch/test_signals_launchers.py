"""Real runs under each launcher: it starts the right ranks, and a stop signal to the command saves a checkpoint.
No process is left, even after a kill.

A hook on PYTHONPATH holds rank 0 between two steps, found by Python's own audit events, until it is let go. It also
tells when a signal has come to a rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from processes import HANG_S, is_alive, wait_until
from project import Project, open_project
from small_run import Inputs

ROOT = Path(__file__).resolve().parents[2]
CPU_FSDP = ROOT / "benchmarks" / "cpu_fsdp"
"""accelerate shards by FSDP on accelerators only; this lets it do so here."""

STEPS = 6

needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: only there a child is tied to its parent"
)
pytestmark = pytest.mark.slow

OPTIONS = {
    "python": [],
    "torchrun": ["--nproc", "2", "cluster.launcher=torchrun"],
    "accelerate": ["--nproc", "2", "cluster.launcher=accelerate"],
    "deepspeed": ["--nproc", "2", "cluster.launcher=deepspeed", "cluster.strategy=zero2"],
}

STARTED = {
    "python": [],
    "torchrun": ["torch.distributed.run"],
    "accelerate": ["accelerate.commands.launch"],
    "deepspeed": ["sftplay.launch.deepspeed_runner", "deepspeed.launcher.launch"],
}
"""Modules of the processes between the command and its ranks, from the outermost one."""


def hold(project: Project, name: str, launcher: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
    """Start a run and return when it is held after its second step, with all its processes."""
    process = project.start("train", name, *OPTIONS[launcher], **project.holding(name).after_step(2, project.hook))
    return process, project.when_held(name, process)


def show(project: Project, name: str) -> str:
    logs = [path.read_text(errors="replace")[-4000:] for path in project.folder(name).path.glob("logs/launch.log")]
    return "\n".join([project.output(name), *logs])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs) -> Iterator[Project]:
    changes = {
        "tuning__lora__dropout": 0.1, "train__max_steps": STEPS, "train__batch_size": 2, "train__save_steps": 100,
        "train__optim": "adamw_torch",
    }  # fmt: skip
    with open_project(tmp_path_factory.mktemp("all launchers"), inputs, **changes) as project:
        # The user's config for other runs must have no effect.
        (project.root / "hf" / "accelerate").mkdir(parents=True)
        user_config = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"
        (project.root / "hf" / "accelerate" / "default_config.yaml").write_text(user_config + "mixed_precision: bf16\n")
        yield project


def modules_of(processes: list[psutil.Process]) -> list[str]:
    lines = [each.cmdline() for each in processes]
    return [argv[argv.index("-m") + 1] for argv in lines if "-m" in argv]


PLAIN = [
    pytest.param("python", [], "NO", 1, marks=pytest.mark.long),
    ("torchrun", [], "MULTI_CPU", 2),  # started by make in test_board_launches, with new interpreters
    pytest.param("accelerate", [], "MULTI_CPU", 2, marks=pytest.mark.fresh_start),
    pytest.param("deepspeed", [], "DEEPSPEED", 2, marks=pytest.mark.fresh_start),
    pytest.param("accelerate", ["cluster.strategy=zero2"], "DEEPSPEED", 2, marks=pytest.mark.long),
    pytest.param("accelerate", ["cluster.strategy=fsdp"], "FSDP", 2, marks=pytest.mark.long),
]


@pytest.mark.contract
@pytest.mark.parametrize(("launcher", "options", "kind", "processes"), PLAIN)
def test_run_has_the_ranks_and_the_strategy_that_were_asked_for(
    project: Project, launcher: str, options: list[str], kind: str, processes: int
):
    name = f"plain-{launcher}-{kind}"
    # With the config in this folder accelerate would start a single process.
    env = {"HF_HOME": str(project.root / "hf")} | ({"PYTHONPATH": str(CPU_FSDP)} if kind == "FSDP" else {})
    assert project.start("train", name, *OPTIONS[launcher], *options, **env).wait(HANG_S) == 0, show(project, name)
    status = project.status(name)
    assert (status["state"], status["step"]) == ("done", STEPS)
    ranks = [(rank["distributed_type"], rank["world_size"], rank["is_main"]) for rank in status["ranks"]]
    assert ranks == [(kind, processes, place == 0) for place in range(processes)]
    if (launcher, kind) == ("accelerate", "MULTI_CPU"):
        assert project.adapter(name) == project.adapter("plain-torchrun-MULTI_CPU")


STOPS = [
    # A single process is stopped at more moments in test_signals.
    *[pytest.param("python", name, marks=pytest.mark.long) for name in ("SIGTERM", "SIGINT", "SIGUSR1")],
    *[("torchrun", name) for name in ("SIGTERM", "SIGINT", "SIGUSR1")],
    *[pytest.param("accelerate", name, marks=pytest.mark.long) for name in ("SIGTERM", "SIGINT")],
    ("accelerate", "SIGUSR1"),
    *[pytest.param("deepspeed", name, marks=pytest.mark.long) for name in ("SIGTERM", "SIGINT")],
    ("deepspeed", "SIGUSR1"),
]


@pytest.mark.contract
@pytest.mark.parametrize(("launcher", "name"), STOPS)
def test_stop_signal_to_the_command_saves_a_whole_checkpoint_and_leaves_nobody(
    project: Project, launcher: str, name: str
):
    run, number = f"{launcher}-{name}", getattr(signal, name)
    process, processes_of_run = hold(project, run, launcher)
    ranks = [rank["pid"] for rank in project.status(run)["ranks"]]
    assert len(ranks) == (1 if launcher == "python" else 2)
    assert modules_of(processes_of_run)[1 : len(STARTED[launcher]) + 1] == STARTED[launcher]
    assert {each.pid for each in processes_of_run} >= set(ranks)
    process.send_signal(number)
    project.holding(run).await_signal(process)
    project.holding(run).let_go()
    assert process.wait(HANG_S) == 128 + number, show(project, run)
    wait_until(lambda: not any(is_alive(each.pid) for each in processes_of_run))
    status = project.status(run)
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 128 + number, name)
    assert project.complete(run) == [status["step"]]
    assert status["last_checkpoint"] == str(project.folder(run).path / "checkpoints" / f"checkpoint-{status['step']}")
    assert 2 <= status["step"] < STEPS
    assert "Traceback" not in project.output(run)


@pytest.mark.contract
@needs_linux
@pytest.mark.parametrize("place", [0, 1], ids=["command", "runner"])
def test_a_process_killed_between_the_command_and_the_ranks_of_deepspeed_ends_all_others(project: Project, place: int):
    run = f"killed-{place}"
    process, processes_of_run = hold(project, run, "deepspeed")
    assert modules_of(processes_of_run)[:3] == ["sftplay", *STARTED["deepspeed"]]
    [each for each in processes_of_run if "-m" in each.cmdline()][place].kill()
    code = process.wait(HANG_S)
    assert code == (-signal.SIGKILL if place == 0 else 5), show(project, run)
    wait_until(lambda: not any(is_alive(each.pid) for each in processes_of_run))


@pytest.mark.contract
def test_rank_of_deepspeed_that_is_killed_is_a_death(project: Project):
    run = "dead"
    process, processes_of_run = hold(project, run, "deepspeed")
    pid = project.status(run)["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    project.holding(run).let_go()
    assert process.wait(HANG_S) == 5, show(project, run)
    wait_until(lambda: not any(is_alive(each.pid) for each in processes_of_run))
    status = project.status(run)
    assert (status["state"], status["error"]["code"]) == ("failed", "death")
    # DeepSpeed checks once a second which rank has ended: the killed one, or the other one that noticed it first.
    assert status["error"]["what"] in ("a rank was killed by SIGKILL", f"rank 1 (pid {pid}) died")

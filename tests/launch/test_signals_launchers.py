"""Real runs under each launcher: it starts the right ranks, and a stop signal to the command saves a checkpoint.
No process is left, even after a kill.

A hook on PYTHONPATH holds rank 0 between two steps, found by Python's own audit events, until it is let go. It also
tells when a signal has come to a rank.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from holding import Hold, write_hook
from processes import is_alive, wait_until
from run_outputs import Outputs

ROOT = Path(__file__).resolve().parents[2]
CPU_FSDP = ROOT / "benchmarks" / "cpu_fsdp"
"""accelerate shards by FSDP on accelerators only; this lets it do so here."""

STEPS, LIMIT_S = 6, 400

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed builds for the CPU: needs g++")
needs_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: only there a child is tied to its parent"
)
pytestmark = [pytest.mark.slow, needs_compiler, pytest.mark.usefixtures("deepspeed_operators")]

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


@dataclass
class Project(Outputs):
    """A folder with a config, in which the tests start runs like a user, and the files of these runs."""

    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def output(self, name: str) -> str:
        logs = [path.read_text(errors="replace")[-4000:] for path in self.folder(name).path.glob("logs/launch.log")]
        return "\n".join([(self.root / f"{name}.txt").read_text(), *logs])

    def adapter(self, name: str) -> bytes:
        return (self.folder(name).path / "adapter" / "adapter_model.safetensors").read_bytes()

    def start(self, name: str, *options: str, **environment: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "sftplay", "train", "--config", str(self.root / "run.yaml"), f"run_name={name}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        env.pop("MAKELEVEL", None)
        with (self.root / f"{name}.txt").open("ab") as out:
            process = subprocess.Popen(
                [*argv, *options], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def hold(self, name: str, launcher: str) -> tuple[subprocess.Popen[bytes], list[psutil.Process]]:
        """Start a run and return when it is held after its second step, with all its processes."""
        process = self.start(name, *OPTIONS[launcher], **self.holding(name).after_step(2, self.root / "hook"))
        assert self.holding(name).wait(process, LIMIT_S), self.output(name)
        command = psutil.Process(process.pid)
        return process, [command, *command.children(recursive=True)]

    def holding(self, name: str) -> Hold:
        return Hold(self.root / name)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, chat_rows: Path) -> Iterator[Project]:
    root = tmp_path_factory.mktemp("all launchers")
    write_hook(root / "hook")
    # The user's config for other runs must have no effect.
    (root / "hf" / "accelerate").mkdir(parents=True)
    user_config = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n"
    (root / "hf" / "accelerate" / "default_config.yaml").write_text(user_config + "mixed_precision: bf16\n")
    values = {
        "output_dir": str(root / "outputs"),
        "model": {"name": str(tiny_llama), "max_seq_len": 64},
        "tuning": {"mode": "lora", "lora": {"r": 4, "dropout": 0.1}},
        "train": {
            "max_steps": STEPS, "effective_batch_size": 8, "batch_size": 2, "learning_rate": 0.01,
            "gradient_checkpointing": False, "save_steps": 100, "optim": "adamw_torch",
        },
        "data": {"train_path": str(chat_rows), "split": 0, "processed_dir": str(root / "processed")},
        "logging": {"steps": 1, "backend": "none"},
    }  # fmt: skip
    (root / "run.yaml").write_text(json.dumps(values))
    place = Project(root)
    yield place
    for process in place.started:  # a failed test must not leave a run that goes on
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


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
    assert project.start(name, *OPTIONS[launcher], *options, **env).wait(LIMIT_S) == 0, project.output(name)
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
    process, processes_of_run = project.hold(run, launcher)
    ranks = [rank["pid"] for rank in project.status(run)["ranks"]]
    assert len(ranks) == (1 if launcher == "python" else 2)
    assert modules_of(processes_of_run)[1 : len(STARTED[launcher]) + 1] == STARTED[launcher]
    assert {each.pid for each in processes_of_run} >= set(ranks)
    process.send_signal(number)
    project.holding(run).await_signal(process)
    project.holding(run).let_go()
    assert process.wait(LIMIT_S) == 128 + number, project.output(run)
    wait_until(lambda: not any(is_alive(each.pid) for each in processes_of_run))
    status = project.status(run)
    assert (status["state"], status["exit_code"], status["signal"]) == ("stopped", 128 + number, name)
    assert project.complete(run) == [status["step"]]
    assert status["last_checkpoint"] == str(project.folder(run).path / "checkpoints" / f"checkpoint-{status['step']}")
    assert 2 <= status["step"] < STEPS
    assert "Traceback" not in (project.root / f"{run}.txt").read_text()


@pytest.mark.contract
@needs_linux
@pytest.mark.parametrize("place", [0, 1], ids=["command", "runner"])
def test_a_process_killed_between_the_command_and_the_ranks_of_deepspeed_ends_all_others(project: Project, place: int):
    run = f"killed-{place}"
    process, processes_of_run = project.hold(run, "deepspeed")
    assert modules_of(processes_of_run)[:3] == ["sftplay", *STARTED["deepspeed"]]
    [each for each in processes_of_run if "-m" in each.cmdline()][place].kill()
    code = process.wait(LIMIT_S)
    assert code == (-signal.SIGKILL if place == 0 else 5), project.output(run)
    wait_until(lambda: not any(is_alive(each.pid) for each in processes_of_run))


@pytest.mark.contract
def test_rank_of_deepspeed_that_is_killed_is_a_death(project: Project):
    run = "dead"
    process, processes_of_run = project.hold(run, "deepspeed")
    pid = project.status(run)["ranks"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    project.holding(run).let_go()
    assert process.wait(LIMIT_S) == 5, project.output(run)
    wait_until(lambda: not any(is_alive(each.pid) for each in processes_of_run))
    status = project.status(run)
    assert (status["state"], status["error"]["code"]) == ("failed", "death")
    # DeepSpeed checks once a second which rank has ended: the killed one, or the other one that noticed it first.
    assert status["error"]["what"] in ("a rank was killed by SIGKILL", f"rank 1 (pid {pid}) died")

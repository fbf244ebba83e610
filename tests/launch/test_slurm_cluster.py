"""Runs as jobs of a real SLURM cluster of two nodes, started by make and by sbatch, stopped and continued by SLURM."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from grpo_run import grpo_inputs, grpo_options
from processes import HANG_S, is_alive, wait_until
from run_outputs import Outputs
from slurm_cluster import SlurmCluster, slurm_cluster, why_not
from small_run import Inputs, write_small_run

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "workflows" / "slurm" / "train.sbatch"
STEPS = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(why_not()), reason=f"a SLURM cluster {why_not()}"),
]

HOOK = """
import json, os, sys, time
words, wanted = " ".join(sys.orig_argv), os.environ.get("HOLD_AT")
lines = [int(os.environ.get("HOLD_LINES", "2"))]
def listen(event, args):
    if event == "open" and args[1] == "a" and str(args[0]).endswith("/metrics.jsonl") and lines[0]:
        lines[0] -= 1
        if not lines[0]:
            open(wanted, "w").close()
            while not os.path.exists(wanted + ".go"):
                time.sleep(0.02)
if wanted and "sftplay.tasks.worker" in words:
    sys.addaudithook(listen)
if "TRAINER_ENDS_WITH" in os.environ and "-m sftplay train " in words:
    print("GPUs", os.environ.get("CUDA_VISIBLE_DEVICES"), words.partition("--nproc ")[2], flush=True)
    os._exit(int(os.environ["TRAINER_ENDS_WITH"]))
"""
"""A sitecustomize.py. It holds rank 0 after its second step, or ends the trainer with a code before it begins."""


@dataclass
class Project(Outputs):
    """A user's folder with a config, and the cluster that its jobs go to."""

    cluster: SlurmCluster

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    def environment(self, **more: str) -> dict[str, str]:
        hook = {"PYTHONPATH": str(self.root / "hook"), "OMP_NUM_THREADS": "1"}
        known = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "TYPED_"))}
        return {**known, **hook, **self.cluster.environment, **more}

    def make(self, target: str, *settings: str, **more: str) -> subprocess.CompletedProcess[str]:
        ready = ["READY=", f"PY={sys.executable}", f"CONFIG={self.config}"]
        argv = ["make", "-s", "--no-print-directory", target, *ready, *settings]
        return subprocess.run(
            argv, cwd=ROOT, env=self.environment(**more), capture_output=True, text=True, check=False, timeout=HANG_S
        )

    def submit(self, name: str, *settings: str, args: str = "", **more: str) -> int:
        """The job's number."""
        done = self.make("submit", "JSON=1", f"ARGS=run_name={name} {args}", *settings, **more)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return int(answer["job_id"])

    def sbatch(self, *words: str, **more: str) -> int:
        argv = ["sbatch", "--parsable", f"--chdir={self.root}", *words]
        done = subprocess.run(
            argv, cwd=self.root, env=self.environment(PY=sys.executable, SFTPLAY_KIT=str(ROOT), **more),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout)

    def said(self, job: int) -> str:
        """What a job has written."""
        places = [*self.root.glob(f"slurm-{job}.out"), *self.root.glob(f"outputs/*/slurm-{job}.out")]
        places += self.root.glob(f"outputs/*/slurm-{job}/training_output.log")
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in places)

    def summary(self, job: int) -> dict[str, str]:
        found = self.root.glob(f"outputs/*/slurm-{job}/job_summary.txt")
        (path,) = (path for path in found if path.parts[-3] != "latest")
        return dict(re.findall(r"^([^:\n]+): +(.*)$", path.read_text(), re.M))

    def lives(self, job: int) -> list[dict[str, Any]]:
        found = list(self.root.glob(f"outputs/*/slurm-{job}/lives.jsonl"))
        return [json.loads(line) for line in found[0].read_text().splitlines()] if found else []

    def until(self, job: int, *states: str) -> None:
        """Wait until the job is in one of these states."""
        last = [""]

        def is_there() -> bool:
            last[0] = self.look(job)
            return last[0] in states

        try:
            wait_until(is_there, 240)
        except AssertionError:
            raise AssertionError(f"the job is {last[0]}\n{self.said(job)}") from None

    def look(self, job: int) -> str:
        """The state of a job, asked a few times a second: each question starts a process."""
        time.sleep(0.3)
        return self.cluster.state(job)

    def step(self, name: str) -> int:
        return int((self.metrics(name) or [{"step": 0}])[-1]["step"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    yield from slurm_cluster()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, inputs: Inputs, cluster: SlurmCluster) -> Project:
    root = tmp_path_factory.mktemp("some user")
    (root / "hook").mkdir()
    (root / "hook" / "sitecustomize.py").write_text(HOOK)
    write_small_run(
        root, inputs, tuning__lora__dropout=0.1, train__max_steps=STEPS, train__batch_size=2, data__val_path=None,
        data__split=0, train__save_steps=100,
    )  # fmt: skip
    return Project(root, cluster)


def train_undisturbed(project: Project, name: str, *words: str, config: Path | None = None) -> bytes:
    """The weights of a run of two processes that no cluster knows."""
    argv = [sys.executable, "-m", "sftplay", "train", "--config", str(config or project.config), "--nproc", "2"]
    done = subprocess.run(
        [*argv, f"run_name={name}", *words], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(project, name)


def weights(project: Project, name: str) -> bytes:
    result = project.folder(name).result
    assert result is not None
    (path,) = result.glob("*.safetensors")
    return path.read_bytes()


@pytest.mark.contract
def test_two_nodes_that_are_told_of_their_end_come_back_and_end_as_an_undisturbed_run(project: Project):
    held = project.root / "held"
    job = project.submit("nodes", "NODES=2", "TIME=1:00:00", HOLD_AT=str(held))
    expected = train_undisturbed(project, "alone")
    wait_until(lambda: held.exists() or project.look(job) == "FAILED")
    assert held.exists(), project.said(job)
    project.cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    time.sleep(1)  # the notice reaches both nodes; nothing shows that while rank 0 is held
    (project.root / "held.go").touch()
    wait_until(lambda: len(project.lives(job)) == 1)
    assert project.lives(job)[0]["exit_code"] == 138, project.said(job)
    project.until(job, "COMPLETED", "FAILED")
    assert (project.cluster.state(job), project.cluster.field(job, "Restarts")) == ("COMPLETED", "1"), project.said(job)
    assert weights(project, "nodes") == expected
    assert [line["step"] for line in project.metrics("nodes")] == [*range(1, STEPS + 1)]
    (_, stopped), (continued, _) = [(life["from_step"], life["to_step"]) for life in project.lives(job)]
    assert stopped == continued < STEPS
    assert [(rank["world_size"], rank["is_main"]) for rank in project.status("nodes")["ranks"]] == [
        (2, True),
        (2, False),
    ]
    summary = project.summary(job)
    assert (summary["job id"], summary["nodes"], summary["exit code"]) == (str(job), "2 (n[1-2])", "0")
    assert (summary["steps"], summary["state"]) == (str(STEPS), "done")
    assert f"checkpoint-{STEPS}" in summary["checkpoints"]
    assert "trained to step 6" in project.folder("nodes").path.joinpath(f"slurm-{job}/training_output.log").read_text()


def test_cancel_saves_a_checkpoint_and_leaves_no_process(project: Project):
    job = project.submit("long", args="train.max_steps=100000")
    waiting = project.submit("waiting", "SBATCH=--hold")
    second = project.make("submit", "ARGS=run_name=waiting")
    assert f"the run 'waiting' has the job {waiting}, which is PENDING" in second.stderr
    assert project.make("cancel", "RUN=waiting").returncode == 0
    assert project.cluster.state(waiting) == "CANCELLED"
    wait_until(lambda: project.step("long") >= 2 or project.look(job) == "FAILED")
    pids = project.cluster.processes_of(job)
    assert len(pids) >= 3, project.said(job)  # the job, the trainer, its worker
    done = project.make("cancel", "RUN=long", "JSON=1")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["cancelled"], facts["job_id"]) == (True, job)
    assert project.complete("long") == [facts["step"]]
    wait_until(lambda: not any(is_alive(pid) for pid in pids) and not project.cluster.processes_of(job), 20)
    assert project.status("long")["signal"] == "SIGTERM"
    assert "had ended before" in project.make("cancel", "RUN=long").stdout


@pytest.mark.contract
def test_sbatch_of_the_shipped_file_trains_with_the_values_that_were_typed(project: Project):
    words = ["--training_args.max_steps=3", "--training_args.learning_rate=0.0001"]
    job = project.sbatch("--gres=gpu:volta:2", str(SCRIPT), "run.yaml", "run_name=null", *words)
    wrong = project.sbatch(str(SCRIPT), "run.yaml", "--training_args.max_step=3")
    project.until(wrong, "FAILED")
    assert project.cluster.field(wrong, "ExitCode") == "2:0"
    assert "did you mean training_args.max_steps?" in project.said(wrong)
    # Called without sbatch, it refuses before the job is queued.
    before = project.cluster.call("squeue", "--noheader", "--states=all", "--format=%i").split()
    env = project.environment(PY=sys.executable)
    typed = [str(SCRIPT), "run.yaml", "--training_args.max_step=3"]
    done = subprocess.run(typed, cwd=project.root, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "did you mean training_args.max_steps?" in done.stderr) == (2, True)
    assert project.cluster.call("squeue", "--noheader", "--states=all", "--format=%i").split() == before
    project.until(job, "COMPLETED", "FAILED")
    assert project.cluster.state(job) == "COMPLETED", project.said(job)
    name = f"run-job{job}"
    assert [line["step"] for line in project.metrics(name)] == [1, 2, 3]
    resolved = project.folder(name).resolved.read_text()
    assert "max_steps: 3 " in resolved
    assert "learning_rate: 0.0001 " in resolved
    assert len(project.status(name)["ranks"]) == 2


@pytest.mark.contract
@pytest.mark.long
def test_run_that_learns_from_rewards_comes_back_inside_a_drawing(project: Project, tiny_llama: Path):
    inputs = grpo_inputs(tiny_llama, project.root / "prompts")
    window = {"grpo__num_iterations": 2, "grpo__steps_per_generation": 2, "train__batch_size": 4}
    options = {**grpo_options(inputs, train__max_steps=9, train__save_steps=100, **window), "run_name": None}
    expect_return_inside_a_drawing(project, write_small_run(project.root, inputs, "grpo.yaml", **options))


@pytest.mark.contract
@pytest.mark.long
@pytest.mark.usefixtures("builtin_tiny")
def test_shipped_toy_of_programs_in_a_sandbox_comes_back_inside_a_drawing(project: Project):
    def toy(name: str, text: str) -> Path:
        rows = ROOT / "data" / "one_liners"
        path = project.root / f"{name}.yaml"
        path.write_text(f"include: {ROOT}/configs/run_grpo_{name}.yaml\noutput_dir: {project.root}/outputs\n{text}")
        path.write_text(path.read_text().replace("ROWS", str(rows)))
        return path

    train_undisturbed(project, "warm", config=toy("toy_sft", "data: {train_path: ROWS/noisy.jsonl}\n"))
    text = f"""model: {{name: {project.folder("warm").result}}}
data: {{train_path: ROWS/train.jsonl, val_path: ROWS/held_out.jsonl}}
grpo: {{num_iterations: 2, steps_per_generation: 2}}
train: {{max_steps: 9, save_steps: 100}}
"""
    expect_return_inside_a_drawing(project, toy("toy", text))


def expect_return_inside_a_drawing(project: Project, config: Path) -> None:
    """A run of nine steps on two nodes, whose second drawing feeds steps 5 to 8, loses nothing by a requeue in it."""
    expected = train_undisturbed(project, "rewards-alone", config=config)
    held = project.root / "held-rewards"
    job = project.submit("rewards", "NODES=2", f"CONFIG={config}", HOLD_AT=str(held), HOLD_LINES="6")
    wait_until(lambda: held.exists() or project.look(job) == "FAILED")
    project.cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    time.sleep(1)
    (project.root / "held-rewards.go").touch()
    project.until(job, "COMPLETED", "FAILED")
    assert (project.cluster.state(job), project.cluster.field(job, "Restarts")) == ("COMPLETED", "1"), project.said(job)
    assert 4 < project.lives(job)[0]["to_step"] < 8
    assert [line["step"] for line in project.metrics("rewards")] == [*range(1, 10)]
    assert [line["reward"] for line in project.metrics("rewards")] == [
        line["reward"] for line in project.metrics("rewards-alone")
    ]
    assert weights(project, "rewards") == expected


@pytest.mark.long
def test_job_of_higher_priority_costs_the_other_one_no_step(project: Project):
    job = project.submit("low", "PARTITION=low", "SBATCH=--exclusive --nodelist=n1", args="train.max_steps=100000")
    wait_until(lambda: project.step("low") >= 3)
    high = project.submit("high", "PARTITION=high", "SBATCH=--exclusive --nodelist=n1", TRAINER_ENDS_WITH="0")
    project.until(high, "COMPLETED")
    wait_until(lambda: len(project.lives(job)) == 1)
    stopped = project.lives(job)[0]
    assert stopped["exit_code"] in (138, 143), project.said(job)
    wait_until(lambda: project.step("low") > stopped["to_step"], 240)
    project.make("cancel", "RUN=low")
    assert project.lives(job)[1]["from_step"] == stopped["to_step"]
    assert [line["step"] for line in project.metrics("low")] == [*range(1, project.step("low") + 1)]


@pytest.mark.long
def test_node_that_goes_down_is_survived(project: Project):
    job = project.submit("lost", args="train.max_steps=100000 train.save_steps=5")
    wait_until(lambda: project.step("lost") >= 7)
    node = project.cluster.field(job, "NodeList")
    project.cluster.lose_node(node, job)
    before = project.step("lost")
    try:
        wait_until(lambda: project.step("lost") > before + 1, 240)
        assert project.cluster.field(job, "NodeList") != node
        project.make("cancel", "RUN=lost")
        assert [line["step"] for line in project.metrics("lost")] == [*range(1, project.step("lost") + 1)]
    finally:
        project.cluster.start_node(node)


@pytest.mark.contract
@pytest.mark.long
@pytest.mark.parametrize("nodes", [1, 2])
def test_twenty_requeues_at_random_moments_lose_and_double_no_step(project: Project, nodes: int):
    """A step takes some milliseconds. The hook makes it a tenth of a second, so that moments differ."""
    steps, rng, name = 600, random.Random(20), f"wild-{nodes}"
    words = f"train.max_steps={steps} train.save_steps=7"
    expected = train_undisturbed(project, f"calm-{nodes}", "--nproc", str(nodes), *words.split())
    (project.root / "slow").mkdir(exist_ok=True)
    slow = (
        HOOK + "\nif 'tasks.worker' in words: sys.addaudithook(lambda event, args: time.sleep(0.1) if event == 'open'"
    )
    slow += " and args[1] == 'a' and str(args[0]).endswith('metrics.jsonl') else None)\n"
    (project.root / "slow" / "sitecustomize.py").write_text(HOOK + slow)
    job = project.submit(name, f"NODES={nodes}", args=words, PYTHONPATH=str(project.root / "slow"))
    for number in range(20):
        project.until(job, "RUNNING")
        begun, is_told = project.step(name), number % 4 > 0
        if is_told:
            wait_until(lambda begun=begun: project.step(name) > begun or project.look(job) != "RUNNING", 120)
        time.sleep(rng.uniform(0, 2 if is_told else 14))
        assert project.cluster.state(job) == "RUNNING", f"ended after {number} requeues\n{project.said(job)}"
        if is_told:
            project.cluster.call("scancel", "--batch", "--signal=USR1", str(job))
        else:  # at any moment, that of the start too, and without notice: SIGTERM, and SIGKILL ten seconds later
            project.cluster.call("scontrol", "requeue", str(job))
        wait_until(lambda: project.look(job) != "RUNNING", 120)
    project.until(job, "COMPLETED", "FAILED")
    assert project.cluster.state(job) == "COMPLETED", project.said(job)
    assert int(project.cluster.field(job, "Restarts")) == 20
    assert [line["step"] for line in project.metrics(name)] == [*range(1, steps + 1)]
    assert weights(project, name) == expected


RECOMMENDED = {
    "fast": ["max_steps=4", "evaluation.eval_interval_steps=2", "per_device_train_batch_size=2"],
    "production": ["max_steps=4", "evaluation.eval_interval_steps=4", "learning_rate=0.00005"],
    "memory": [
        "max_steps=2",
        "per_device_train_batch_size=1",
        "gradient_accumulation_steps=4",
        "gradient_checkpointing=true",
    ],
}
"""The three recommended commands of the guide on distributed GRPO, with fewer steps."""


@pytest.mark.long
@pytest.mark.parametrize("use", RECOMMENDED)
def test_recommended_commands_of_the_guide_run_on_the_builtin_model(project: Project, builtin_tiny: Path, use: str):
    words = [word if "." in word.split("=")[0] else f"training_args.{word}" for word in RECOMMENDED[use]]
    given = [f"--{word}" for word in words]
    given += ["model.name=builtin:tiny", "train.batch_size=auto", "data.split=0.2", f"run_name={use}"]
    given.sort(key=lambda word: word != "train.batch_size=auto")  # the guide's own value comes later and counts
    job = project.sbatch("--gres=gpu:volta:2", str(SCRIPT), "run.yaml", *given, SFTPLAY_CACHE=str(ROOT / ".cache"))
    project.until(job, "COMPLETED", "FAILED")
    assert project.cluster.state(job) == "COMPLETED", project.said(job)


@pytest.mark.long
def test_real_time_limit_is_survived(project: Project):
    """SLURM counts minutes and looks every 30 s, so this takes two of them."""
    job = project.submit("limit", "TIME=1", args="train.max_steps=400 train.save_steps=1000")
    wait_until(lambda: len(project.lives(job)) == 1, 150)
    assert project.lives(job)[0]["signals"] == ["SIGUSR1"], project.said(job)
    wait_until(lambda: project.step("limit") > project.lives(job)[0]["to_step"], 120)
    project.make("cancel", "RUN=limit")
    assert [line["step"] for line in project.metrics("limit")] == [*range(1, project.step("limit") + 1)]

"""Trainer and generation server, a real vLLM, on two nodes of a real SLURM cluster."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from grpo_run import grpo_inputs, grpo_options
from processes import HANG_S, wait_until
from slurm_cluster import SlurmCluster, slurm_cluster, why_not
from small_run import write_small_run
from test_slurm_cluster import HOOK, Project

from sftplay.places import find_vllm_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.slurm,
    pytest.mark.skipif(bool(why_not()), reason=f"a SLURM cluster {why_not()}"),
    pytest.mark.skipif(find_vllm_python() is None, reason="needs .venv-vllm: make install-vllm"),
]

STEPS = 4
ROOT = Path(__file__).resolve().parents[2]

WAITS = """
if "TRAINER_WAITS" in os.environ and "-m sftplay train " in words:
    import signal
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    open(os.environ["TRAINER_WAITS"], "w").close()
    while True:
        time.sleep(0.05)
"""
"""The end of a sitecustomize.py: a trainer that does nothing until it is stopped."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    yield from slurm_cluster()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, cluster: SlurmCluster) -> Project:
    root = tmp_path_factory.mktemp("served")
    (root / "hook").mkdir()
    (root / "hook" / "sitecustomize.py").write_text(HOOK + WAITS)
    # Heads of the other tests' tiny model are too narrow for vLLM on a CPU.
    inputs = grpo_inputs(ROOT / "data/base/tiny", root / "prompts")
    served = {"grpo__generation": "vllm_server", "grpo__vllm__timeout": int(HANG_S), "grpo__logprob_check_steps": 1}
    options = {**grpo_options(inputs, train__max_steps=STEPS, train__save_steps=100, **served), "run_name": None}
    write_small_run(root, inputs, "run.yaml", **options)
    return Project(root, cluster)


def lines_of_server(project: Project, name: str, job: int) -> str:
    path = project.folder(name).path / f"slurm-{job}" / "generation_server.log"
    return path.read_text() if path.exists() else ""


def server_pids(project: Project, job: int) -> list[int]:
    """The servers of a job."""
    found = []
    for pid in project.cluster.processes_of(job):
        with suppress(OSError):  # a process that has ended since
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            found += [pid] if "--logprobs-mode" in words else []
    return found


def test_run_with_its_server_on_another_node_comes_back_with_it(project: Project):
    held = project.root / "held"
    job = project.submit("served", "TIME=1:00:00", HOLD_AT=str(held))
    wait_until(lambda: held.exists() or project.look(job) == "FAILED")
    assert held.exists(), project.said(job) + lines_of_server(project, "served", job)
    nodes = project.cluster.call("squeue", "-h", "-o", "%i %N", f"--jobs={job}").splitlines()
    assert {line.split()[1] for line in nodes} == {"n1", "n2"}
    (first,) = server_pids(project, job)
    project.cluster.call("scancel", "--batch", "--signal=USR1", str(job))
    (project.root / "held.go").touch()
    project.until(job, "COMPLETED", "FAILED")
    assert (project.cluster.state(job), project.cluster.field(job, "Restarts")) == ("COMPLETED", "1"), project.said(job)
    assert [(life["exit_code"], life["signals"]) for life in project.lives(job)] == [(138, ["SIGUSR1"]), (0, [])]
    assert [line["step"] for line in project.metrics("served")] == [*range(1, STEPS + 1)]
    wait_until(lambda: not project.cluster.processes_of(job), 30)
    said = lines_of_server(project, "served", job)
    assert len(re.findall("ready at", said)) == 2
    assert str(first) not in map(str, server_pids(project, job))
    # Before each rollout batch the server has got the weights that learn, over the network between the nodes.
    assert max(line["sampler_gap"] for line in project.metrics("served")) <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("node", ["n1", "n2"])
def test_a_lost_node_of_either_kind_brings_both_back(project: Project, node: str):
    waits = project.root / f"lost-{node}"
    job = project.submit(f"lost-{node}", TRAINER_WAITS=str(waits))
    wait_until(lambda: waits.exists() or project.look(job) == "FAILED")
    nodes = project.cluster.call("squeue", "-h", "-o", "%i %N", f"--jobs={job}")
    assert re.search(r"\+0 n1\b.*\+1 n2\b|\+1 n2\b.*\+0 n1\b", nodes, re.S)
    waits.unlink()
    project.cluster.lose_node(node, job)
    try:
        wait_until(lambda: project.look(job) != "RUNNING", 120)
    finally:
        project.cluster.start_node(node)
    wait_until(lambda: waits.exists() or project.look(job) == "FAILED")
    assert project.cluster.field(job, "Restarts") == "1", project.said(job)
    assert project.make("cancel", f"RUN=lost-{node}").returncode == 0
    wait_until(lambda: not project.cluster.processes_of(job), 30)

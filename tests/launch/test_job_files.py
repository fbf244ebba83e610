"""Job files for other schedulers: whole, quoted, planned for their GPUs, and read by the tools' own parsers."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import HANG_S, wait_until

from sftplay.cli import main
from sftplay.errors import ConfigError
from sftplay.launch.job_files import KINDS, ClusterJob, job_text

JOB = ClusterJob(
    name="my-run", config="a run.yaml", overrides=("seed=3", "run.x=$(touch pwned)"), nodes=2, gpus=8, gpu="A100-80GB",
    gpu_bytes=80 * 2**30, output_dir="outputs", image="registry/kit:1",
)  # fmt: skip

NODE = {
    "skypilot": {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    "dstack": {"DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
    "k8s": {"JOB_COMPLETION_INDEX": "1"},
}
"""What each tool sets on the second node."""


def documents(kind: str, job: ClusterJob = JOB) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(job_text(kind, job)))


def script(kind: str, job: ClusterJob = JOB) -> str:
    last = documents(kind, job)[-1]
    if kind == "k8s":
        (container,) = last["spec"]["template"]["spec"]["containers"]
        return str(container["command"][-1])
    return str(last["run"] if kind == "skypilot" else last["commands"][-1])


@pytest.mark.parametrize("kind", KINDS)
def test_command_starts_the_kit_on_each_node_with_its_number_and_every_word_as_typed(kind: str, tmp_path: Path):
    for python in (tmp_path / ".venv/bin/python", tmp_path / "python"):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **NODE[kind]}
    done = subprocess.run(
        ["bash", "-c", script(kind)], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    assert words[:7] == ["-m", "sftplay", "train", "--config", "a run.yaml", "run_name=my-run", "train.resume=auto"]
    assert {"seed=3", "run.x=$(touch pwned)"} <= set(words)
    flags = dict(itertools.pairwise(words))
    assert (flags["--nproc"], flags["--nnodes"], flags["--node-rank"]) == ("8", "2", "1")
    assert flags["--master-addr"] == ("my-run-0.my-run" if kind == "k8s" else "10.0.0.1")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_needs_no_meeting(kind: str):
    assert "--nnodes" not in script(kind, replace(JOB, nodes=1))


def test_gpus_are_named_as_each_tool_names_them():
    assert documents("skypilot")[0]["resources"]["accelerators"] == "A100-80GB:8"
    assert documents("dstack")[0]["resources"]["gpu"] == {"name": "A100", "count": 8, "memory": "72GB.."}
    pod = documents("k8s")[-1]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (rule,) = term["matchExpressions"]
    assert (rule["key"], rule["operator"]) == ("nvidia.com/gpu.memory", "Gt")
    assert 40_960 < int(rule["values"][0]) < 81_251  # as an A100 of 80 GB with ECC reports
    # As SkyPilot's catalogue and dstack's gpuhunt spell them (November 2026).
    others = {
        "RTX-4090": ("RTX4090:8", "RTX4090"), "RTX-A6000": ("RTXA6000:8", "A6000"), "A100-40GB": ("A100:8", "A100"),
        "RTX-6000-Ada": ("RTX6000-Ada:8", "RTX6000Ada"), "RTX-PRO-6000": ("RTXPRO6000:8", "RTXPRO6000"),
        "H100-NVL": ("H100-NVL:8", "H100NVL"), "V100-32GB": ("V100-32GB:8", "V100"),
    }  # fmt: skip
    for card, names in others.items():
        sky, dstack = (documents(kind, replace(JOB, gpu=card))[0]["resources"] for kind in ("skypilot", "dstack"))
        assert (sky["accelerators"], dstack["gpu"]["name"]) == names


def test_pods_find_the_first_one_and_share_their_outputs():
    service, claim, job = documents("k8s")
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    volumes = job["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert "output_dir=/outputs" in script("k8s")
    with pytest.raises(ConfigError, match="made of an image"):
        job_text("k8s", replace(JOB, image=""))


def test_exit_code_138_starts_again_and_codes_that_would_come_again_end_the_job():
    (sky,) = documents("skypilot")
    assert sky["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [138]}
    for nodes, most in ((1, 0), (3, 10)):
        spec = documents("k8s", replace(JOB, nodes=nodes))[-1]["spec"]
        rules = [rule for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        actions = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in rules}
        assert actions == {(138, 143): "Ignore", (1, 2, 3, 4): "FailJob"}
        assert spec["backoffLimit"] == most


TRAINER = """\
#!/bin/sh
echo "$@" >> calls
[ -e late ] && { trap '' TERM; kill -TERM "$PPID"; exit 138; }
trap 'echo told >> calls; exit 143' TERM
[ "$(wc -l < calls)" -lt 3 ] && exit 138
[ -e endless ] && { touch ready; while :; do sleep 0.1; done; }
exit 4
"""


@pytest.fixture
def dstack_shell(tmp_path: Path) -> Callable[[], subprocess.Popen[bytes]]:
    """Starts dstack's last command with a trainer that ends with 138, 138, then 4, or never where `endless` lies."""
    trainer = tmp_path / ".venv/bin/python"
    trainer.parent.mkdir(parents=True)
    trainer.write_text(TRAINER)
    trainer.chmod(0o755)
    return lambda: subprocess.Popen(["sh", "-c", script("dstack")], cwd=tmp_path, env={**os.environ, **NODE["dstack"]})


def test_shell_of_dstack_starts_the_run_again_after_138_and_ends_with_any_other_code(
    dstack_shell: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
):
    assert dstack_shell().wait(HANG_S) == 4
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3
    assert len(set(calls)) == 1


def test_shell_of_dstack_tells_the_run_of_its_end_and_waits_for_it(
    dstack_shell: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
):
    (tmp_path / "endless").touch()
    process = dstack_shell()
    wait_until(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 143
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "told"


def test_shell_of_dstack_that_is_told_its_end_after_that_of_a_run_starts_no_other(
    dstack_shell: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
):
    (tmp_path / "late").touch()
    assert dstack_shell().wait(HANG_S) == 143
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


@pytest.mark.contract
def test_what_does_not_fit_or_divide_gives_no_file(
    write_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "job.yaml"
    words = ["job-file", "--kind", "skypilot", "--config", str(write_config()), "--out", str(out)]
    large = ["model.name=Qwen/Qwen2.5-72B-Instruct", "tuning.mode=full", "train.batch_size=1"]
    assert main([*words, "--gpus", "2xA100", *large, "data.train_path=org/rows", "data.val_path=null"]) == 3
    assert "on each A100-80GB" in capsys.readouterr().err
    assert main([*words, "--gpus", "3xA100"]) == 2
    assert main(words) == 2
    assert "no GPU here" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--gpus", "2xA100"]) == 0
    assert yaml.safe_load(out.read_text())["resources"]["accelerators"] == "A100-80GB:2"


def test_kubernetes_own_schema_takes_the_file():
    validate = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate")
    for document in documents("k8s"):
        validate.validate(document, validate.latest_version(), strict=True)
        with pytest.raises(validate.ValidationError, match="unknown"):
            validate.validate({**document, "unknown": 1}, validate.latest_version(), strict=True)


def test_dstack_takes_the_file():
    configurations = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="needs the package dstack"
    )
    (task,) = documents("dstack")
    parsed = configurations.parse_apply_configuration(task)
    assert (parsed.type, parsed.nodes) == ("task", 2)
    with pytest.raises(Exception, match="num_nodes"):
        configurations.parse_apply_configuration({**task, "num_nodes": 2})


@pytest.mark.filterwarnings("ignore")
def test_skypilot_takes_the_file(tmp_path: Path):
    sky = pytest.importorskip("sky", reason="needs the package skypilot")
    path = tmp_path / "task.yaml"
    path.write_text(job_text("skypilot", JOB))
    task = sky.Task.from_yaml(str(path))
    assert task.num_nodes == 2
    assert [one.accelerators for one in task.resources] == [{"A100-80GB": 8}]

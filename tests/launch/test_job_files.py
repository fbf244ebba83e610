"""The job files in workflows/ for SkyPilot, dstack and Kubernetes: what their shells start, and how a job ends."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import HANG_S, wait_until

from sftplay.cli import main, parse

ROOT = Path(__file__).resolve().parents[2]
FILES = {"skypilot": "skypilot.yaml", "dstack": "dstack.yml", "k8s": "kubernetes.yaml"}

NODE = {
    "skypilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
    "dstack": {"DSTACK_NODES_NUM": "2", "DSTACK_NODE_RANK": "1", "DSTACK_MASTER_NODE_IP": "10.0.0.1"},
    "k8s": {"NODES": "2", "JOB_COMPLETION_INDEX": "1"},
}
"""What each tool, or the file itself, sets on the second node."""


def documents(kind: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "workflows" / FILES[kind]).read_text()))


def script(kind: str) -> str:
    last = documents(kind)[-1]
    if kind == "k8s":
        (container,) = last["spec"]["template"]["spec"]["containers"]
        return str(container["command"][-1])
    return str(last["run"] if kind == "skypilot" else last["commands"][-1])


@pytest.mark.contract
@pytest.mark.parametrize("kind", FILES)
def test_job_starts_the_kit_on_each_node_with_its_number_and_goes_on_with_the_run(kind: str, tmp_path: Path):
    for python in (tmp_path / ".venv/bin/python", tmp_path / "python"):
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        python.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONFIG": "a run.yaml", **NODE[kind]}
    done = subprocess.run(
        ["bash", "-c", script(kind)], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    words = done.stdout.splitlines()
    assert words[:6] == ["-m", "sftplay", "train", "--config", "a run.yaml", "train.resume=auto"]
    flags = dict(itertools.pairwise(words))
    assert (flags["--nproc"], flags["--nnodes"], flags["--node-rank"]) == ("gpu", "2", "1")
    assert flags["--master-addr"] == ("my-run-0.my-run" if kind == "k8s" else "10.0.0.1")
    assert "run_name=my-run" in parse(words[2:]).overrides


def test_pods_find_the_first_one_share_their_outputs_and_agree_on_the_number_of_nodes():
    service, claim, job = documents("k8s")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["volumeMounts"][0]["mountPath"] == "/outputs"
    assert "output_dir=/outputs" in script("k8s")
    nodes = int({variable["name"]: variable["value"] for variable in container["env"]}["NODES"])
    assert (spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (nodes, nodes, 5 * (nodes - 1))


def test_exit_code_138_starts_again_and_codes_that_would_come_again_end_the_job():
    (sky,) = documents("skypilot")
    assert sky["resources"]["job_recovery"] == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [138]}
    rules = documents("k8s")[-1]["spec"]["podFailurePolicy"]["rules"]
    codes = [rule for rule in rules if "onExitCodes" in rule]
    assert {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in codes} == {
        (138, 143): "Ignore",
        (1, 2, 3, 4): "FailJob",
    }


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
    env = {**os.environ, "CONFIG": "run.yaml", **NODE["dstack"]}
    return lambda: subprocess.Popen(["sh", "-c", script("dstack")], cwd=tmp_path, env=env)


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
def test_the_verb_that_wrote_such_files_points_at_them(capsys: pytest.CaptureFixture[str]):
    assert main(["job-file", "--kind", "k8s"]) == 2
    assert "workflows/skypilot.yaml, dstack.yml or kubernetes.yaml" in capsys.readouterr().err
    made = subprocess.run(["make", "READY=", "job-file"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "workflows/skypilot.yaml" in made.stderr


@pytest.mark.filterwarnings("ignore")
def test_the_tools_own_parsers_take_the_files():
    checked = 0
    if validate := _find("kubernetes_validate"):
        for document in documents("k8s"):
            validate.validate(document, validate.latest_version(), strict=True)
        checked += 1
    if configurations := _find("dstack._internal.core.models.configurations"):
        parsed = configurations.parse_apply_configuration(documents("dstack")[0])
        assert (parsed.type, parsed.nodes) == ("task", 2)
        checked += 1
    if sky := _find("sky"):
        task = sky.Task.from_yaml(str(ROOT / "workflows" / FILES["skypilot"]))
        assert [one.accelerators for one in task.resources] == [{"H100": 8}]
        checked += 1
    if not checked:
        pytest.skip("needs one of the packages kubernetes-validate, dstack, skypilot")


def _find(name: str) -> Any:
    try:
        return __import__(name, fromlist=["_"])
    except ImportError:
        return None

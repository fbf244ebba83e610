"""Output that nobody reads or that cannot be written, a folder that is gone, a shell with limits: no traceback."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sftplay.errors import MachineError, out_of_ram

ROOT = Path(__file__).resolve().parents[1]
HANG_S = 300


@pytest.fixture
def shell(tmp_path: Path):
    """Runs a command line with `sftplay` in it, in a folder with a config and rows."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "run.yaml").write_text("model: {name: builtin:tiny}\ndata: {train_path: rows.jsonl}\n")

    def run(line: str, **more: str) -> subprocess.CompletedProcess[str]:
        line = line.replace("sftplay", f"{shlex.quote(sys.executable)} -m sftplay", 1)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}
        return subprocess.run(
            ["bash", "-o", "pipefail", "-c", line],
            cwd=tmp_path, env=env, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip

    return run


@pytest.mark.parametrize(
    ("streams", "code"),
    [
        (">&-", 0),
        (">&- 2>&- <&-", 0),
        ("--json >&-", 0),
        (">/dev/full", 5),
        ("--json >/dev/full", 5),
        (">/dev/full 2>/dev/full", 5),
        ("| head -1", 0),
    ],
)
def test_output_that_goes_nowhere_is_no_bug(shell, streams: str, code: int):
    done = shell(f"sftplay validate --config run.yaml {streams}")
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    if streams == ">/dev/full":
        assert done.stderr.startswith("the output: writing failed (No space left on device)\n  fix: ")


def test_a_refusal_keeps_its_code_where_it_cannot_be_said(shell):
    assert shell("sftplay validate --config run.yaml seed=x >/dev/full 2>/dev/full").returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["| head -1", ">&-", ">/dev/full"])
def test_a_training_whose_output_nobody_reads_goes_on(write_config, streams: str):
    config = write_config(run_name="unread", train__max_steps=1)
    line = f"{shlex.quote(sys.executable)} -m sftplay train --config {config} {streams}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=config.parent, env=env, timeout=HANG_S, check=False
    )
    assert done.returncode == 0
    (status,) = config.parent.glob("outputs/unread/status.json")
    assert json.loads(status.read_text())["state"] == "done"


def test_watching_ends_when_nobody_watches(shell):
    assert shell("sftplay memory-check --watch | head -1").returncode == 0


def test_a_folder_that_was_deleted_is_said(shell, tmp_path: Path):
    done = shell("mkdir gone; cd gone; rmdir ../gone; sftplay plan --config ../run.yaml")
    assert done.returncode == 3
    assert done.stderr.startswith("the working folder: does not exist any more\n  fix: ")


@pytest.mark.parametrize(
    "more", [{"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, {"PYTHONOPTIMIZE": "2"}]
)
def test_a_narrow_locale_and_a_python_without_assertions_change_nothing(shell, more: dict[str, str]):
    done = shell("sftplay plan --config run.yaml --json", **more)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "fits"


@pytest.mark.slow
def test_memory_that_a_limit_keeps_from_this_process_is_a_lack_of_the_machine(shell):
    # So little that torch cannot be mapped. With some more, a C++ library may crash by itself, here and there.
    done = shell("ulimit -v 400000; sftplay inspect --config run.yaml")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False), done.stderr
    assert "ulimit -v" in done.stderr


@pytest.mark.parametrize(
    "said", ["error return without exception set", "<f> returned NULL without setting an exception"]
)
def test_a_silent_failure_of_a_c_module_is_a_lack_of_memory_where_the_shell_limits_it(
    said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("resource.getrlimit", lambda _: (700_000 * 1024, resource.RLIM_INFINITY))
    assert isinstance(out_of_ram(SystemError(said)), MachineError)
    monkeypatch.setattr("resource.getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert out_of_ram(SystemError(said)) is None

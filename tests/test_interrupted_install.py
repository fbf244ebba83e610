"""Installs that are really run, interrupted and killed: by a tool that stands still on demand, by pip and by uv."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import HANG_S, wait_until

from sftplay import install

ROOT = Path(__file__).resolve().parents[1]

STAND_IN = """\
#!{python}
import json, os, signal, sys, time, venv
from pathlib import Path
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("uv 0.9.1"))
step = "venv" if words[0] == "venv" else "lock" if "-r" in words else "pip" if "--no-deps" in words else "torch"
seen, wait = Path("seen.jsonl"), Path("hold").read_text() if Path("hold").exists() else ""
def note(word):
    with seen.open("a") as file:
        file.write(json.dumps([step, word, os.getpid()]) + "\\n")
signal.signal(signal.SIGINT, lambda *_: (note("interrupted"), sys.exit(130)))
note("begins")
if step == "venv":
    venv.create(words[-1], with_pip=False)
while wait == step and Path("hold").exists():
    time.sleep(0.01)
note("ends")
"""
"""Stands in for uv: it notes what it does, and stands still in the step that the file `hold` names."""


class Clone:
    """A folder with the Makefile and the kit, in which installs are started as make starts them."""

    def __init__(self, root: Path, **env: str):
        self.root = root
        root.mkdir()
        for name in ("Makefile", "docs", "sftplay", "pyproject.toml"):
            (root / name).symlink_to(ROOT / name)
        (root / "requirements.lock").write_text("alpha==1.0\n")
        known = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PIP_", "UV_"))}
        self.started: list[subprocess.Popen[str]] = []
        self.env = {**known, "TORCH_INDEX": "", "EXTRAS": "", "PIP_CONFIG_FILE": os.devnull, **env}

    def start(self, *argv: str) -> subprocess.Popen[str]:
        argv = argv or (sys.executable, "-m", "sftplay.install")
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            argv, cwd=self.root, env=self.env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        self.started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=HANG_S)
        return process.returncode, out, err

    def is_fresh(self) -> bool:
        return (self.root / ".venv/.stamp").read_text().splitlines()[0] == str(self.root)

    def seen(self, word: str = "begins") -> list[str]:
        path = self.root / "seen.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [step for step, what, _ in map(json.loads, lines) if what == word]

    def hold(self, step: str) -> None:
        (self.root / "hold").write_text(step)

    def release(self) -> None:
        (self.root / "hold").unlink(missing_ok=True)

    def close(self) -> None:
        """Let nothing go on behind a test that failed."""
        self.release()
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Clone]:
    tool = tmp_path / "bin" / "uv"
    tool.parent.mkdir()
    tool.write_text(STAND_IN.format(python=sys.executable))
    tool.chmod(0o755)
    made = Clone(tmp_path / "a clone", PATH=f"{tool.parent}:{os.environ['PATH']}", PIP_NO_INDEX="1")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("step", "number"),
    [("venv", signal.SIGINT), ("torch", signal.SIGINT), ("lock", signal.SIGINT), ("torch", signal.SIGTERM)],
    ids=["ctrl-c venv", "ctrl-c torch", "ctrl-c lock", "sigterm torch"],
)
def test_a_stop_signal_ends_the_step_too_and_says_one_line(clone: Clone, step: str, number: signal.Signals) -> None:
    clone.hold(step)
    process = clone.start()
    wait_until(lambda: step in clone.seen())
    process.send_signal(number)
    exit_code, _, err = clone.finish(process)
    assert exit_code == 128 + number
    assert err == "install: interrupted; run the command again, and it goes on from here\n"
    assert clone.seen("interrupted") == [step]
    assert not clone.is_fresh()
    clone.release()
    exit_code, out, err = clone.finish(clone.start())
    assert (exit_code, err) == (0, "")
    assert out.splitlines()[-1] == "[install] ready"
    assert clone.is_fresh()
    made_again = clone.seen().count("venv") == 2
    assert made_again == (step == "venv")


@pytest.mark.parametrize("step", ["venv", "lock"])
def test_after_a_kill_the_next_start_waits_for_what_was_left_and_goes_on(clone: Clone, step: str) -> None:
    clone.hold(step)
    process = clone.start()
    wait_until(lambda: step in clone.seen())
    process.kill()
    clone.finish(process)
    second = clone.start()
    assert second.stdout is not None
    assert second.stdout.readline() == "[install] another install is at work in this folder; waiting for its end\n"
    assert clone.seen("ends").count(step) == 0
    clone.release()
    exit_code, _, err = clone.finish(second)
    assert (exit_code, err, clone.is_fresh()) == (0, "", True)


def test_a_second_make_in_the_same_clone_waits_and_installs_nothing_again(clone: Clone) -> None:
    clone.hold("lock")
    first = clone.start()
    wait_until(lambda: "lock" in clone.seen())
    second = clone.start()
    assert second.stdout is not None
    assert "waiting" in second.stdout.readline()
    clone.release()
    assert clone.finish(first)[0] == clone.finish(second)[0] == 0
    assert clone.seen().count("lock") == 1


def test_ctrl_c_at_make_leaves_the_stamp_by_which_the_kit_knows_its_folder(clone: Clone) -> None:
    """make deletes the target of a recipe that a signal ends, if it has changed."""
    assert clone.finish(clone.start())[0] == 0
    later = time.time() + 5
    os.utime(clone.root / "requirements.lock", (later, later))
    clone.hold("torch")
    process = clone.start("make", f"PYTHON={sys.executable}", ".venv/.stamp")
    wait_until(lambda: clone.seen().count("torch") == 2)
    os.killpg(process.pid, signal.SIGINT)
    _, _, err = clone.finish(process)
    assert "install: interrupted" in err
    assert "Traceback" not in err
    assert (clone.root / ".venv/.stamp").exists()
    clone.release()
    exit_code, _, err = clone.finish(clone.start())
    assert (exit_code, err, clone.is_fresh()) == (0, "", True)


def test_an_older_or_broken_uv_is_named_and_pip_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "uv"
    monkeypatch.setenv("PATH", str(tmp_path))
    for does, usable in (("echo uv 0.4.9", False), ("exit 1", False), ("echo uv 0.9.1", True), ("echo uv 1.0", True)):
        tool.write_text(f"#!/bin/sh\n{does}\n")
        tool.chmod(0o755)
        assert bool(install.find_uv()) == usable
        assert ("pip installs" in capsys.readouterr().out) != usable


# From here on the real tools install small packages of a local folder, without a network.


def write_wheel(folder: Path, name: str, version: str, *, metadata_first: bool = False) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"version = {version!r}\n",
        f"{name}/data.bin": "x" * 100_000,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    order = sorted(files, key=lambda path: (path.startswith(info) != metadata_first, path))
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path in order:
            archive.writestr(path, files[path])
        archive.writestr(
            f"{info}/RECORD", "".join(f"{path},,{len(files[path])}\n" for path in files) + f"{info}/RECORD,,\n"
        )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "torch", install.TORCH.partition("==")[2])
    for version in ("1.0", "2.0"):
        write_wheel(folder, "alpha", version, metadata_first=True)
    return folder


UV = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
TOOLS = ["pip", pytest.param("uv", marks=pytest.mark.skipif(not UV, reason="needs uv on PATH"))]


def offline(tmp_path: Path, wheels: Path, tool: str) -> Clone:
    """A clone whose only places are those of pip's own file, for either tool."""
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nno-index = true\nuser = true\n[install]\nfind-links = {wheels}\n")
    path = f"{Path(UV).parent}:{os.environ['PATH']}" if UV else os.environ["PATH"]
    return Clone(tmp_path / "clone", INSTALLER=tool, PATH=path, PIP_CONFIG_FILE=str(settings))


def freeze(clone: Clone) -> list[str]:
    asked = [".venv/bin/python", "-m", "pip", "--disable-pip-version-check", "freeze"]
    done = subprocess.run(
        asked, cwd=clone.root, env={**clone.env, "PIP_USER": "0"}, capture_output=True, text=True, check=True
    )
    return [line.partition(" ")[0] for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_both_tools_keep_to_pips_settings_and_to_the_lock_and_take_over_from_each_other(
    tmp_path: Path, wheels: Path, tool: str
) -> None:
    clone = offline(tmp_path, wheels, tool)
    exit_code, out, err = clone.finish(clone.start())
    assert (exit_code, err) == (0, ""), out
    assert f"by {tool}" in out
    assert freeze(clone) == ["alpha==1.0", install.TORCH]
    (clone.root / "requirements.lock").write_text("alpha==2.0\n")
    later = time.time() + 5
    os.utime(clone.root / "requirements.lock", (later, later))
    clone.env["INSTALLER"] = "uv" if tool == "pip" and UV else "pip"
    assert clone.finish(clone.start())[0] == 0
    assert freeze(clone) == ["alpha==2.0", install.TORCH]


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_a_package_whose_files_are_not_all_there_is_installed_again(tmp_path: Path, wheels: Path, tool: str) -> None:
    clone = offline(tmp_path, wheels, tool)
    assert clone.finish(clone.start())[0] == 0
    (folder,) = (clone.root / ".venv").glob("lib/python*/site-packages")
    # As a kill leaves it: of alpha the metadata, which its archive has first; of torch a file that was being written.
    shutil.rmtree(folder / "alpha")
    (folder / "alpha-1.0.dist-info" / "RECORD").unlink()
    data = folder / "torch" / "data.bin"
    data.unlink()  # uv's cache may share it
    data.write_text("x" * 10)
    (clone.root / ".venv/.stamp").write_text("begun")
    exit_code, out, _ = clone.finish(clone.start())
    assert exit_code == 0, out
    assert out.count("was half installed; it is installed again") == 2
    assert (folder / "alpha" / "__init__.py").exists()
    assert data.stat().st_size == 100_000


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
def test_kills_and_interrupts_at_any_moment_lose_nothing(tmp_path: Path, wheels: Path, tool: str) -> None:
    clone = offline(tmp_path, wheels, tool)
    for n, delay_s in enumerate((0.2, 0.6, 1.0, 1.5, 2.2, 3.0, 4.0)):
        process = clone.start()
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT if n % 2 else signal.SIGKILL)
        assert "Traceback" not in clone.finish(process)[2]
    assert clone.finish(clone.start())[0] == 0
    assert freeze(clone) == ["alpha==1.0", install.TORCH]
    (folder,) = (clone.root / ".venv").glob("lib/python*/site-packages")
    assert (folder / "alpha" / "data.bin").stat().st_size == (folder / "torch" / "data.bin").stat().st_size == 100_000

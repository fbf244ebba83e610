"""Caches of a checkout lie in it, those of an installed kit in the user's cache folder; what is shipped is found."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from sftplay.places import CACHE, cache_root

ROOT = Path(__file__).resolve().parents[1]


def test_caches_lie_in_a_checkout_else_with_the_user_else_in_the_current_folder(monkeypatch, tmp_path):
    for name in (CACHE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    assert cache_root() == Path(".cache")
    monkeypatch.chdir(tmp_path)
    assert cache_root() == tmp_path / ".cache/sftplay"
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    assert cache_root() == Path(".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg/sftplay"
    monkeypatch.setenv(CACHE, "mine")
    assert cache_root() == Path("mine")


FIND = """
import sys; sys.path.insert(0, sys.argv[1])
from sftplay.model.builtin import TEXT_DIR
from argparse import Namespace
from sftplay.commands.demo import load_demo
import sftplay
cfg = load_demo(Namespace(config="", overrides=[]))
print(len(list(TEXT_DIR.glob("*.txt"))), cfg.data.train_path, cfg.data.processed_dir, sftplay.__file__, sep="\\n")
"""


@pytest.mark.slow
def test_installed_by_pip_the_kit_works_from_any_folder_and_leaves_nothing_there(tmp_path):
    source, home, work = (tmp_path / name for name in ("source", "home", "work"))
    for folder in (source, home, work):
        folder.mkdir()
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, tracked)):
        if name.startswith(("sftplay/", "configs/", "data/", "pyproject", "README", "LICENSE")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    for name in ("data/demo/train.jsonl", "data/base/tiny/model.safetensors"):
        assert any(each.endswith(name) for each in zipfile.ZipFile(wheel).namelist())
    prefix = tmp_path / "prefix"
    subprocess.run([*pip, "install", *options, "--prefix", str(prefix), str(wheel)], check=True, capture_output=True)
    (site,) = prefix.glob("lib/python*/site-packages")
    env = {key: value for key, value in os.environ.items() if key not in (CACHE, "XDG_CACHE_HOME")}
    env |= {"HF_HUB_OFFLINE": "1", "HOME": str(home), "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def call(*words: str) -> str:
        done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    texts, rows, cache, own = call(sys.executable, "-c", FIND, str(site)).splitlines()
    assert own.startswith(str(site))
    assert int(texts) > 1
    assert rows == str(prefix / "share/sftplay/data/demo/train.jsonl")
    assert cache == str(home / ".cache/sftplay/processed")
    kit = str(prefix / "bin/sftplay")
    assert "run.yaml is written" in call(
        kit, "init", rows, "run.yaml", "model.name=HuggingFaceTB/SmolLM2-135M-Instruct"
    )
    assert "is valid" in call(kit, "validate", "--config", "run.yaml")
    call(kit, "plan", "--config", "run.yaml")
    assert [path.name for path in work.iterdir()] == ["run.yaml"]

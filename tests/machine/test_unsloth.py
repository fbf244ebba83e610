"""Whether unsloth can be used is read from metadata, without importing it. The reason names what prevents it."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sftplay.machine import probe as unsloth
from sftplay.machine.probe import find_unsloth_problem

ROOT = Path(__file__).resolve().parents[2]

REQUIRES = {
    "unsloth": [
        "unsloth_zoo>=2026.10.9",
        "torch<2.15.0,>=2.4.0",
        "torchvision",
        'xformers>=0.0.27.post2; ("linux" in sys_platform or sys_platform == "win32") and platform_machine == "x86_64"',
        "bitsandbytes!=0.46.0,!=0.48.0,>=0.45.5",
        'triton>=3.0.0; "linux" in sys_platform',
        "datasets!=4.0.*,!=4.1.0,!=4.4.*,!=4.5.0,<5.0.0,>=3.4.1",
        "accelerate>=0.34.1",
        "peft!=0.11.0,>=0.18.0",
        "diffusers",
        "transformers!=4.53.0,!=4.57.0,!=5.0.0,!=5.1.0,<=5.17.0,>=4.52.4",
        "trl!=0.19.0,<=1.15.0,>=0.18.2",
        'torch<2.4; extra == "kaggle"',
    ],
    "unsloth_zoo": [
        'torch<2.15.0,>=2.4.0; sys_platform != "darwin" or platform_machine != "arm64"',
        "transformers!=5.0.0,!=5.1.0,<=5.17.0,>=4.52.4",
        'mlx==0.32.4; sys_platform == "darwin" and platform_machine == "arm64"',
    ],
}
"""From the metadata of the release 2026.10.9, with a few of its exclusions."""

LOCK = {
    "unsloth": "2026.10.9",
    "unsloth_zoo": "2026.10.9",
    "torch": "2.13.0+cpu",
    "transformers": "5.17.0",
    "trl": "1.14.0",
    "datasets": "4.8.5",
    "peft": "0.21.2",
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
}


@pytest.fixture
def installed(monkeypatch):
    """Versions by package, as in the metadata. A test may change or remove some."""
    versions = dict(LOCK)

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", REQUIRES.get)
    monkeypatch.setattr(unsloth, "find_spec", lambda name: object() if "unsloth" in versions else None)
    monkeypatch.delenv("UNSLOTH_DISABLE_CPU_FALLBACK", raising=False)
    return versions


@pytest.mark.parametrize("has_gpu", [True, False])
def test_unsloth_works_with_the_versions_of_the_lock(installed, has_gpu):
    assert find_unsloth_problem(has_gpu=has_gpu) == ""


@pytest.mark.parametrize(
    ("package", "version", "problem"),
    [
        ("transformers", "5.23.0", "unsloth 2026.10.9 wants transformers <=5.17.0, and 5.23.0 is installed"),
        ("datasets", "4.4.2", "unsloth 2026.10.9 wants datasets !=4.4.*, and 4.4.2 is installed"),
        ("torch", "2.15.0+cu130", "unsloth 2026.10.9 wants torch <2.15.0, and 2.15.0+cu130 is installed"),
        ("bitsandbytes", None, "unsloth 2026.10.9 needs bitsandbytes, which is not installed"),
        ("unsloth_zoo", None, "the package unsloth_zoo is not installed"),
        ("unsloth", "2025.7.2", "unsloth 2025.7.2 is too old, 2026.10.9 is the first that is known to work"),
    ],
)
def test_a_version_outside_the_bounds_of_the_package_is_named_with_the_bound(installed, package, version, problem):
    if version is None:
        del installed[package]
    else:
        installed[package] = version
    assert find_unsloth_problem(has_gpu=True) == problem


def test_the_check_imports_neither_unsloth_nor_the_libraries_it_changes(tmp_path):
    package = tmp_path / "unsloth"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('unsloth was imported')\n")
    code = (
        "import sys; from sftplay.machine.probe import probe; print(probe().unsloth_problem);"
        "print({'torch', 'transformers', 'unsloth', 'trl'} & set(sys.modules))"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": ""}
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    problem, imported = process.stdout.splitlines()
    assert imported == "set()"
    assert "unsloth" in problem or problem == ""

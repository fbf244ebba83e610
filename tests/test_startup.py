"""Imports of a process of the kit: when Python looks for circles of objects, and which libraries it leaves out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import HANG_S

ROOT = Path(__file__).resolve().parents[1]


COUNT = """
import atexit, json, os, sys
def count():
    ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "sftplay"]
    own = [module.__file__ for module in ours if getattr(module, "__file__", None)]
    libraries = sorted({name.split(".")[0] for name in sys.modules})
    found = [len(own), sum(len(open(file, encoding="utf-8").readlines()) for file in own), libraries]
    kind = "worker" if "sftplay.tasks.worker" in " ".join(sys.orig_argv) else "parent"
    with open(os.path.join(os.environ["COUNTS"], kind), "w") as out:
        json.dump(found, out)
if "sftplay" in " ".join(sys.orig_argv):
    atexit.register(count)
"""
"""The text of a sitecustomize.py. At its end a process writes how much of the kit it imported, and which libraries."""


def imported_by(place: Path, *words: str) -> dict[str, tuple[int, int, set[str]]]:
    """`parent` and `worker` -> modules and lines of the kit, and libraries, of a command that ends with 0."""
    (place / "sitecustomize.py").write_text(COUNT)
    environment = {**os.environ, "PYTHONPATH": str(place), "COUNTS": str(place)}
    done = subprocess.run(
        [sys.executable, "-m", "sftplay", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {kind: json.loads((place / kind).read_text()) for kind in ("parent", "worker") if (place / kind).exists()}
    return {kind: (modules, lines, set(libraries)) for kind, (modules, lines, libraries) in counts.items()}


@pytest.mark.parametrize(
    ("words", "most", "most_lines"),
    [
        (["gpu-info"], 12, 1_730),
        (["status"], 14, 1_900),
        (["validate", "--config", "configs/run_lora.yaml"], 40, 6_300),
        (["plan", "--config", "configs/run_lora.yaml", "--gpus", "2xH200", "data.processed_dir=nothing"], 52, 9_400),
    ],
    ids=["gpu-info", "status", "validate", "plan"],
)
def test_a_look_a_check_and_a_plan_import_little(words: list[str], most: int, most_lines: int, tmp_path: Path):
    """A check and a plan took a second on a plain machine: numpy, the manual and the planner of puzzles were imported.

    The counts are those of the day when they were written: they may fall.
    """
    modules, lines, libraries = imported_by(tmp_path, *words)["parent"]
    assert (modules <= most, lines <= most_lines) == (True, True), (modules, lines)
    assert not {"numpy", "torch", "transformers", "datasets", "pyarrow", "lxml", "psutil"} & libraries


@pytest.mark.slow
@pytest.mark.fresh_start
def test_a_run_of_sft_imports_no_more_than_before_in_the_parent_and_in_the_worker(tmp_path: Path, builtin_tiny: Path):
    words = [
        "train",
        "--config",
        "configs/run_demo.yaml",
        f"output_dir={tmp_path}",
        f"data.processed_dir={tmp_path / 'processed'}",  # rows that another test has prepared bring their lengths
        "train.max_steps=1",
        "eval.limit=2",
    ]
    counts = imported_by(tmp_path, *words)
    parent, worker = counts["parent"], counts["worker"]
    assert (parent[0] <= 78, parent[1] <= 14_150) == (True, True), parent[:2]
    assert (worker[0] <= 92, worker[1] <= 17_000) == (True, True), worker[:2]
    assert "torch" not in parent[2]


def test_a_config_of_another_kit_is_imported_without_a_heavy_library(tmp_path: Path):
    source = tmp_path / "axolotl.yaml"
    source.write_text("base_model: builtin:tiny\nmicro_batch_size: 2\ndatasets: [{path: org/rows, type: alpaca}]\n")
    words = ["import-config", "--in", str(source), "--out", str(tmp_path / "run.yaml")]
    libraries = imported_by(tmp_path, *words)["parent"][2]
    assert not {"numpy", "torch", "transformers", "datasets", "pyarrow"} & libraries

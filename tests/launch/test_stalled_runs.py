"""Real runs in which one rank falls asleep: each ends by itself and names the rank and the place in the code.

A hook on PYTHONPATH lays the sleep into a function of the worker, all runs side by side.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import HANG_S
from project import open_project

from sftplay.launch.checkpoints import newest_complete

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S, SAVE_STEPS = 8, 2

pytestmark = pytest.mark.slow

HOOK = """
import functools, importlib, json, os, sys, time

def nobody_knows_why():
    time.sleep(600)

def lay_sleep(owner, name, call):
    whole, calls = getattr(owner, name), []
    @functools.wraps(whole)
    def counted(*args, **more):
        calls.append(1)
        if len(calls) == call:
            nobody_knows_why()
        return whole(*args, **more)
    setattr(owner, name, counted)
    for module in list(sys.modules.values()):  # modules that have imported the function by its name
        for key in [key for key, value in getattr(module, "__dict__", {}).items() if value is whole]:
            setattr(module, key, counted)

sleep = json.loads(os.environ.get("SLEEP", "null"))
in_worker = "sftplay.tasks.worker" in " ".join(sys.orig_argv)
if sleep and in_worker and os.environ.get("RANK", "alone") == sleep["rank"]:
    *owner, name = sleep["function"].split(".")
    target = importlib.import_module(sleep["module"])
    for each in owner:
        target = getattr(target, each)
    lay_sleep(target, name, sleep["call"])
elif sleep and not in_worker:  # a busy machine answers later
    importlib.import_module("sftplay.launch.processes").ANSWER_S = 60.0
"""


@dataclass(frozen=True)
class Sleep:
    """Where a rank falls asleep, and the error that is expected then."""

    rank: str
    module: str
    function: str
    call: int
    output: str


SLEEPS = {
    # The loader fetches two windows before the first step and one after each: the fourth after the second. The
    # other rank already has its window and waits to add up the labels of all ranks.
    "data": Sleep(
        "1", "sftplay.train.micro_batches", "Collator.__call__", 4,
        r"rank 1 has been in data for \d+ s at step 3; rank 0 waits for it \(data\)",
    ),
    # Three passes try the label head, then each step has two micro-batches: the eighth pass is the third step's first.
    "forward": Sleep(
        "0", "transformers.models.llama.modeling_llama", "LlamaForCausalLM.forward", 8,
        r"rank 0 has been in forward for \d+ s at step 3; rank 1 waits for it \(communication\)",
    ),
}  # fmt: skip


def read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.fixture(scope="module")
def project(tmp_path_factory, inputs):
    sizes = {"train__max_steps": 6, "train__batch_size": 2, "train__save_steps": SAVE_STEPS}
    keys = {"train__optim": "adamw_torch", "train__stall_timeout": TIMEOUT_S, **sizes}
    with open_project(tmp_path_factory.mktemp("stalled"), inputs, **keys) as project:
        (project.hook / "sitecustomize.py").write_text(HOOK)
        yield project


@pytest.fixture(scope="module")
def ended(project):
    """Name -> the exit code of the run in which a rank fell asleep there."""
    running = {}
    for name, sleep in SLEEPS.items():
        env = {"MARK": f"{project.root}/{name}:", "SLEEP": json.dumps(vars(sleep))}
        env["PYTHONPATH"] = f"{project.hook}{os.pathsep}{ROOT}"
        running[name] = project.start("train", name, "--nproc", 2, **env)
    return {name: process.wait(HANG_S) for name, process in running.items()}


@pytest.mark.parametrize("name", SLEEPS)
def test_a_run_with_a_rank_asleep_ends_with_5_names_rank_phase_and_code_and_leaves_its_checkpoint(project, ended, name):
    folder, output, sleep = project.folder(name), project.output(name), SLEEPS[name]
    assert ended[name] == 5, output
    match = re.search(rf"^{re.escape(str(folder.path))}: ({sleep.output})\n  fix: look at ", output, re.M)
    assert match, output
    assert " in nobody_knows_why\n" in output
    assert "Traceback" not in output
    status = folder.read_json("status.json")
    assert (status["state"], status["exit_code"], status["error"]["what"]) == ("failed", 5, match[1])
    assert [attempt["cause"] for attempt in status["attempts"]] == [match[1]]
    logs, asleep = folder.logs, sleep.rank
    files = {path.name: path.read_text() for path in logs.glob("*.stacks")}
    assert set(files) == {"rank0.stacks", "rank1.stacks"}
    for file, text in files.items():
        assert "Current thread" in text
        assert ("in nobody_knows_why" in text) == (file == f"rank{asleep}.stacks")
    mark = f"{project.root}/{name}:".encode()
    assert [path for path in Path("/proc").glob("[0-9]*/environ") if mark in read(path)] == []
    checkpoint, _ = newest_complete(folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == f"checkpoint-{SAVE_STEPS}"

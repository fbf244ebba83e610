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
from sftplay.launch.run_folder import RunFolder

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
    # Two passes try the label head, then each step has two micro-batches: the seventh pass is the third step's first.
    "forward": Sleep(
        "0", "transformers.models.llama.modeling_llama", "LlamaForCausalLM.forward", 7,
        r"rank 0 has been in forward for \d+ s at step 3; rank 1 waits for it \(communication\)",
    ),
    "save": Sleep(
        "0", "safetensors.torch", "save_file", 2,
        r"rank 0 has been in save for \d+ s at step 4; rank 1 waits for it \(\w+\)",
    ),
    "alone": Sleep(
        "alone", "torch.optim", "AdamW.step", 3,
        r"rank 0 has been in optimizer for \d+ s at step 3",
    ),
}  # fmt: skip


@dataclass
class Ended:
    """A run that has ended, and its files."""

    code: int
    output: str
    folder: RunFolder
    mark: str

    def processes(self):
        """The command lines of its processes that are still alive."""
        return [
            _read(path.with_name("cmdline"))
            for path in Path("/proc").glob("[0-9]*/environ")
            if self.mark.encode() in _read(path)
        ]


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def start(project, name, sleep):
    env = {"MARK": mark_of(project, name), "SLEEP": json.dumps(vars(sleep))}
    env["PYTHONPATH"] = f"{project.hook}{os.pathsep}{ROOT}"
    return project.start("train", name, "--nproc", 1 if name == "alone" else 2, **env)


def mark_of(project, name):
    return f"{project.root}/{name}:"


@pytest.fixture(scope="module")
def project(tmp_path_factory, inputs):
    sizes = {"train__max_steps": 6, "train__batch_size": 2, "train__save_steps": SAVE_STEPS}
    keys = {"train__optim": "adamw_torch", "train__stall_timeout": TIMEOUT_S, **sizes}
    with open_project(tmp_path_factory.mktemp("stalled"), inputs, **keys) as project:
        (project.hook / "sitecustomize.py").write_text(HOOK)
        yield project


@pytest.fixture(scope="module")
def ended(project):
    """Name -> the run in which a rank fell asleep there."""
    running = {name: start(project, name, sleep) for name, sleep in SLEEPS.items()}
    codes = {name: process.wait(HANG_S) for name, process in running.items()}
    return {
        name: Ended(code, project.output(name), project.folder(name), mark_of(project, name))
        for name, code in codes.items()
    }


@pytest.mark.parametrize("name", SLEEPS)
def test_a_run_with_a_rank_asleep_ends_with_5_and_names_rank_phase_and_code(ended, name):
    run, sleep = ended[name], SLEEPS[name]
    assert run.code == 5, run.output
    match = re.search(rf"^{re.escape(str(run.folder.path))}: ({sleep.output})\n  fix: look at ", run.output, re.M)
    assert match, run.output
    assert " in nobody_knows_why\n" in run.output
    assert "Traceback" not in run.output
    status = run.folder.read_json("status.json")
    assert (status["state"], status["exit_code"], status["error"]["what"]) == ("failed", 5, match[1])
    assert [attempt["cause"] for attempt in status["attempts"]] == [match[1]]


@pytest.mark.parametrize("name", SLEEPS)
def test_it_leaves_the_stacks_of_all_ranks_and_its_last_checkpoint_and_no_process(ended, name):
    logs, asleep = ended[name].folder.logs, SLEEPS[name].rank.replace("alone", "0")
    files = {path.name: path.read_text() for path in logs.glob("*.stacks")}
    assert set(files) == {f"rank{rank}.stacks" for rank in range(1 if name == "alone" else 2)}
    for file, text in files.items():
        assert "Current thread" in text
        assert ("in nobody_knows_why" in text) == (file == f"rank{asleep}.stacks")
    assert ended[name].processes() == []
    checkpoint, _ = newest_complete(ended[name].folder.checkpoints)
    assert checkpoint is not None
    assert checkpoint.name == f"checkpoint-{SAVE_STEPS}"

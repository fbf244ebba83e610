"""One rank prepares while no process group exists, the others wait for it, and an error is said once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from forking import START, prepare_two_ranks, run_script
from in_process import Inputs
from processes import HANG_S

from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import free_port

TIMEOUT_S = 77

# Libraries are imported once, by the parent; forked in front of any work, none of them has started a thread. The
# parent does as torchrun does: when a rank fails it asks the others to stop.
FORK_RUNS = (
    START
    + """
import json, os, signal, sys, time
import torch
import sftplay.tasks.sft.task as sft
from sftplay.train import run_task
from sftplay.data.tokenize import Preparation
from sftplay.train.train_run import TrainRun

def note(what):
    line = f"{os.environ['RANK']} {what} {torch.distributed.is_initialized()}\\n"
    with open(NOTES, "a") as file:
        file.write(line)

def noted(name, real, delay_s=0.0):
    def call(*args, **options):
        note(name)
        if os.environ["RANK"] == "0":
            time.sleep(delay_s)  # long enough for a rank that does not wait to be faster
        return real(*args, **options)
    return call

def train_and_tell(self, trainer):
    outcome = train(self, trainer)
    for group in torch.distributed.distributed_c10d._world.pg_map:
        limit = group._get_backend(torch.device("cpu")).options._timeout
        note(f"limit={limit.total_seconds():g}")
    return outcome

train, TrainRun.train = TrainRun.train, train_and_tell
run_task.load_tokenizer = noted("prepares", run_task.load_tokenizer, 1.0)
Preparation.run = noted("tokenises", Preparation.run)
sft.evaluate = noted("measures", sft.evaluate, 1.0)
run_task.make_trainable = noted("goes-on", run_task.make_trainable)

def stop(rank, grace_s):
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.02)
    os.kill(rank, signal.SIGTERM)

for folder, port, grace_s in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    NOTES = f"{folder}/notes.txt"
    ranks = {start(folder, port, rank): rank for rank in (1, 0)}
    codes = {}
    while len(codes) < 2:
        pid, status = os.wait()
        codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
        if codes[ranks[pid]] and len(codes) == 1:
            for other in ranks.keys() - {pid}:
                stop(other, float(grace_s))
    with open(f"{folder}/codes.json", "w") as file:
        json.dump(codes, file)
    print(f"END {folder}", flush=True)
"""
)

SCALED = {"train__lr_scaling": "sqrt", "train__lr_batch_size": 2, "train__lr_scheduler": "constant"}
VARIANTS: dict[str, dict[str, Any]] = {
    "good": {"cluster__timeout": TIMEOUT_S, "eval__before": True, "train__max_steps": 2, **SCALED},
    "bad-rows": {},
    "bad-adapter": {"tuning__lora__target_modules": ["nothing_of_this_name"]},
}
GRACE_S = {"good": 0.0, "bad-rows": 2.0, "bad-adapter": HANG_S}
"""How long the rank that has not failed may take to end by itself: one that only waits for the other never does, one
that fails for the same reason prepares first."""


@dataclass(frozen=True)
class Ran:
    """What two ranks left: notes `rank what is-there-a-group` in their order, exit codes, the user's screen."""

    folder: RunFolder
    notes: list[list[str]]
    codes: dict[str, int]
    screen: str


@pytest.fixture(scope="module")
def runs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    home = tmp_path_factory.mktemp("waiting")
    bad = home / "bad.jsonl"
    bad.write_text(inputs.train.read_text() + '{"messages": "no list of turns"}\n')
    folders = {}
    for name, changes in VARIANTS.items():
        rows = replace(inputs, train=bad) if name == "bad-rows" else inputs
        folders[name] = prepare_two_ranks(home / name, rows, train__batch_size=2, **changes)
    words = [word for name, folder in folders.items() for word in (folder.path, free_port(0), GRACE_S[name])]
    screens = run_script(FORK_RUNS, *words, ACCELERATE_USE_CPU="true").split("END ")
    ran = {}
    for (name, folder), screen in zip(folders.items(), screens):
        notes = [line.split() for line in (folder.path / "notes.txt").read_text().splitlines()]
        ran[name] = Ran(folder, notes, json.loads((folder.path / "codes.json").read_text()), screen)
    return ran


@pytest.mark.slow
def test_rows_are_tokenised_once_by_the_first_rank_before_there_is_a_process_group(runs: dict[str, Ran]):
    run = runs["good"]
    assert run.codes == {"0": 0, "1": 0}, run.screen
    is_there = {(what, group) for _, what, group in run.notes if "limit" not in what}
    assert is_there == {(what, "False") for what in ("prepares", "tokenises", "measures", "goes-on")}
    order = [(rank, what) for rank, what, _ in run.notes if what in ("prepares", "tokenises")]
    assert order == [("0", "prepares"), ("0", "tokenises"), ("1", "prepares")]
    measured = [(rank, what) for rank, what, _ in run.notes if what in ("measures", "goes-on")]
    assert [rank for rank, what in measured if what == "measures"] == ["0"]
    assert measured.index(("0", "measures")) < measured.index(("1", "goes-on"))
    limits = {(rank, what) for rank, what, group in run.notes if group == "True"}
    assert limits == {(rank, f"limit={TIMEOUT_S}") for rank in ("0", "1")}
    assert not list(run.folder.logs.glob(".prepared*"))
    # 8 rows a step, found with 2: by the root, twice 0.01.
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [0.02, 0.02]


@pytest.mark.slow
def test_an_error_in_preparing_is_the_first_ranks_and_the_other_ends_without_a_word(runs: dict[str, Ran]):
    run = runs["bad-rows"]
    assert run.codes == {"0": 4, "1": 0}
    status = run.folder.read_json("status.json")
    assert (status["state"], status["exit_code"], status["error"]["code"]) == ("failed", 4, "data")
    assert run.screen.count(status["error"]["what"].splitlines()[0]) == 1
    assert run.screen.count("fix:") == 1
    assert [rank for rank, what, _ in run.notes if what == "prepares"] == ["0"]


@pytest.mark.slow
def test_an_error_that_every_rank_meets_is_shown_once(runs: dict[str, Ran]):
    run = runs["bad-adapter"]
    assert set(run.codes.values()) == {2}
    status = run.folder.read_json("status.json")
    assert "nothing_of_this_name" in status["error"]["what"]
    assert run.screen.count(status["error"]["what"]) == 1
    assert run.screen.count("fix:") == 1
    for rank in (0, 1):
        assert status["error"]["what"] in (run.folder.logs / f"rank{rank}.log").read_text()

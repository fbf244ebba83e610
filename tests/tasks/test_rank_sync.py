"""One rank prepares while no process group exists, the others wait for it, and an error is said once."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forking import START, prepare_two_ranks, run_script
from in_process import Inputs
from processes import HANG_S

from sftplay.launch.run_folder import PARENT, RunFolder
from sftplay.log import LINE
from sftplay.machine.ports import free_port
from sftplay.tasks import worker
from sftplay.train.preflight import first_of_node, marker_path, wait_for_main

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

BAD = '{"messages": "no list of turns"}\n'
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
def runs(
    tiny_llama: Path, chat_rows: Path, held_out_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ran]:
    home = tmp_path_factory.mktemp("waiting")
    bad = home / "bad.jsonl"
    bad.write_text(chat_rows.read_text() + BAD)
    files = {"bad-rows": bad}
    folders = {}
    for name, changes in VARIANTS.items():
        inputs = Inputs(tiny_llama, files.get(name, chat_rows), held_out_rows)
        folders[name] = prepare_two_ranks(home / name, inputs, train__batch_size=2, **changes)
    words = [word for name, folder in folders.items() for word in (folder.path, free_port(0), GRACE_S[name])]
    screens = run_script(FORK_RUNS, *words, ACCELERATE_USE_CPU="true").split("END ")
    return {name: _read(folder, screens[n]) for n, (name, folder) in enumerate(folders.items())}


def _read(folder: RunFolder, screen: str) -> Ran:
    notes = [line.split() for line in (folder.path / "notes.txt").read_text().splitlines()]
    return Ran(folder, notes, json.loads((folder.path / "codes.json").read_text()), screen)


@pytest.mark.slow
def test_rows_are_tokenised_once_and_by_the_first_rank_while_the_other_waits(runs: dict[str, Ran]):
    run = runs["good"]
    assert run.codes == {"0": 0, "1": 0}, run.screen
    order = [(rank, what) for rank, what, _ in run.notes if what in ("prepares", "tokenises")]
    assert order == [("0", "prepares"), ("0", "tokenises"), ("1", "prepares")]
    assert not list(run.folder.logs.glob(".prepared*"))
    # 8 rows a step, found with 2: by the root, twice 0.01.
    lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
    assert [line["learning_rate"] for line in lines] == [0.02, 0.02]


@pytest.mark.slow
def test_there_is_no_process_group_while_anything_is_prepared_or_measured_beforehand(runs: dict[str, Ran]):
    notes = runs["good"].notes
    assert {(what, is_there) for _, what, is_there in notes if "limit" not in what} == {
        ("prepares", "False"),
        ("tokenises", "False"),
        ("measures", "False"),
        ("goes-on", "False"),
    }
    assert [rank for rank, what, _ in notes if what == "measures"] == ["0"]
    went = [(rank, what) for rank, what, _ in notes if what in ("measures", "goes-on")]
    assert went.index(("0", "measures")) < went.index(("1", "goes-on"))
    limits = {(rank, what) for rank, what, is_there in notes if is_there == "True"}
    assert limits == {(rank, f"limit={TIMEOUT_S}") for rank in ("0", "1")}


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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The folder of a run of two nodes, seen by the second rank of the second one."""
    run_folder = RunFolder(tmp_path / "run")
    run_folder.logs.mkdir(parents=True)
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    return run_folder


def test_each_node_has_a_first_rank_of_its_own(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PARENT, "4711")
    ours = marker_path(folder.logs)
    assert ours.name == ".prepared-2-4711"
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert marker_path(folder.logs) == ours
    with first_of_node(folder) as is_first:
        assert is_first
        assert not ours.exists()
    assert ours.exists()


def test_a_rank_that_waits_for_the_main_one_ends_with_its_code_when_that_has_ended(folder: RunFolder):
    folder.write_json("status.json", {"state": "failed", "exit_code": 4})
    with pytest.raises(SystemExit) as caught:
        wait_for_main(folder.eval / "before.json", folder)
    assert caught.value.code == 4
    folder.eval.mkdir()
    (folder.eval / "before.json").touch()
    wait_for_main(folder.eval / "before.json", folder)


@pytest.mark.parametrize(("rank", "code"), [("0", 4), ("1", 0)])
def test_a_rank_that_is_stopped_because_another_has_failed_leaves_the_reason_as_it_is(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, rank: str, code: int
):
    monkeypatch.setenv("RANK", rank)
    written = {"state": "failed", "exit_code": 4, "error": {"code": "data", "what": "row 7 is bad"}}
    folder.write_json("status.json", written)
    assert worker._stop(folder, signal.SIGTERM) == code
    assert folder.read_json("status.json") == written


@pytest.mark.parametrize("is_bug", [False, True])
def test_two_ranks_that_fail_alike_are_told_of_once_and_others_each(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_bug: bool
):
    monkeypatch.setenv("SFTPLAY_FOLLOWED", "1")
    folder.write_json("status.json", {"exit_code": None, "error": None})
    error = None if is_bug else {"code": "data", "what": "row 7 is bad"}
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        text = "row 7 is bad\n  fix: mend it"
        assert worker._fail(folder, 4, cause="row 7 is bad", text=text, error=error) == 4
    output = capsys.readouterr()
    assert output.out == f"{LINE}row 7 is bad\n{LINE}  fix: mend it\n"
    assert output.err.count("row 7 is bad") == 2  # the log of each rank
    worker._fail(folder, 5, cause="disk full", text="disk full", error={"code": "run", "what": "disk full"})
    assert f"{LINE}disk full" in capsys.readouterr().out
    assert folder.read_json("status.json")["exit_code"] == 5

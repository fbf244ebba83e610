"""Runs of task hrm through the real launcher: two processes learn as one does, and a killed run ends as a whole one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from hrm_run import write_hrm_run, write_puzzles
from killed_worker import killed_in
from safetensors import safe_open
from safetensors.torch import load_file
from untimed_metrics import lines_of

from sftplay.tasks.hrm.network import load_model

Verb = Callable[..., CompletedProcess[str]]

pytestmark = pytest.mark.slow

GIVEN = {
    "one": ("--nproc", 1),
    "two": ("--nproc", 2, "hrm.puzzle_emb_placement=replicated"),
    "sharded": ("--nproc", 2, "hrm.puzzle_emb_placement=sharded"),
}
"""Runs of the same config by name: how many processes, and where the puzzle embeddings are."""


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_puzzles(tmp_path_factory.mktemp("puzzles"))


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found, at = {}, folder / "checkpoints" / f"checkpoint-{step}"
    for path in sorted(at.glob("*.safetensors")):
        found |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    state = torch.load(at / "optimizer.pt", weights_only=True)["state"]
    return found | {f"optimizer/{n}/{k}": torch.as_tensor(v) for n, each in state.items() for k, v in each.items()}


def places(folder: Path, step: int) -> dict[str, dict[str, str]]:
    """Where each rank's rows of a checkpoint go on."""
    at = folder / "checkpoints" / f"checkpoint-{step}"
    return {path.name: safe_open(path, framework="pt").metadata() for path in at.glob("carry-*.safetensors")}


@pytest.fixture(scope="module")
def two(puzzles: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A home, and the YAML in it of a run that takes two processes."""
    home = tmp_path_factory.mktemp("two")
    return home, write_hrm_run(home, puzzles, hrm__ema=0.9, train__save_steps=2, train__save_total_limit=4)


@pytest.fixture(scope="module")
def learned(two: tuple[Path, Path], sftplay: Verb) -> dict[str, Path]:
    """The folders of the same run on one process, on two, and on two that share the puzzle embeddings out."""
    home, config = two
    found = {}
    for name, given in GIVEN.items():
        done = sftplay("train", "--config", config, *given, f"run_name={name}")
        assert done.returncode == 0, done.stderr
        found[name] = home / "outputs" / name
    return found


def result(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


@pytest.mark.contract
def test_two_processes_learn_as_one_does(learned: dict[str, Path]):
    one, other = learned["one"], learned["two"]
    for mine, its in zip(lines_of(other), lines_of(one), strict=True):
        assert mine["row_ids"][0] + mine["row_ids"][1] == its["row_ids"][0]
        for name in ("loss", "lm_loss", "q_halt_loss", "q_continue_loss", "accuracy", "count", "steps", "rows_touched"):
            assert mine[name] == pytest.approx(its[name], abs=1e-6), name
    weights = result(other)
    for name, tensor in result(one).items():
        if name == "puzzles.rows":
            assert torch.equal(weights[name], tensor)
        else:
            assert (weights[name] - tensor).abs().max() < 1e-5, name
    last = [json.loads((each / "eval" / "step-8.json").read_text()) for each in (one, other)]
    assert last[0]["segments"] == last[1]["segments"]


def test_processes_that_share_the_puzzle_embeddings_out_learn_and_save_the_same_bit_for_bit(learned: dict[str, Path]):
    whole, sharded = learned["two"], learned["sharded"]
    for before, after in zip(lines_of(whole), lines_of(sharded), strict=True):
        assert after.pop("w_norm") == pytest.approx(before.pop("w_norm"))
        assert after == before
    for step in (4, 8):
        its = checkpoint_tensors(whole, step)
        assert its["model.safetensors/puzzles.rows"].abs().sum() > 0
        found = checkpoint_tensors(sharded, step)
        assert found.keys() == its.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in its.items())
    assert all(torch.equal(result(sharded)[name], tensor) for name, tensor in result(whole).items())
    its, found = (json.loads((each / "eval" / "step-8.json").read_text()) for each in (whole, sharded))
    assert {**found, "seconds": its["seconds"]} == its
    table = load_model(sharded / "model").puzzles
    assert table is not None
    assert torch.equal(table(torch.arange(8)), result(whole)["puzzles.rows"])


@pytest.mark.contract
def test_a_run_with_sharded_puzzle_embeddings_goes_on_in_one_process(
    learned: dict[str, Path], two: tuple[Path, Path], sftplay: Verb
):
    onward = learned["sharded"].with_name("onward")
    shutil.copytree(learned["sharded"], onward, symlinks=True)
    for step in (6, 8):
        shutil.rmtree(onward / "checkpoints" / f"checkpoint-{step}")
    shutil.rmtree(onward / "model")
    (onward / "status.json").write_text('{"state": "stopped"}')
    done = sftplay("resume", "--config", two[1], "run_name=onward", "--nproc", 1)
    assert done.returncode == 0, done.stderr
    assert torch.equal(result(onward)["puzzles.rows"], result(learned["one"])["puzzles.rows"])


@pytest.mark.contract
@pytest.mark.parametrize(("name", "processes"), [("one", 1), ("two", 2), ("sharded", 2)])
def test_a_killed_run_ends_as_a_whole_one_bit_for_bit(
    name: str, processes: int, learned: dict[str, Path], two: tuple[Path, Path], tmp_path: Path, sftplay: Verb
):
    whole = learned[name]
    killed = whole.with_name(f"{name}-killed")
    given = ("--config", two[1], *GIVEN[name], f"run_name={killed.name}")
    verb = "train"
    for phase, step in (("backward", 4), ("save", 6)):
        env = killed_in(tmp_path, phase, step, rank=processes - 1)
        done = sftplay(verb, *given, env=env)
        assert done.returncode == 5, done.stderr
        verb = "resume"
    done = sftplay("resume", *given)
    assert done.returncode == 0, done.stderr
    assert lines_of(killed) == lines_of(whole)
    its = checkpoint_tensors(whole, 8)
    assert {name.partition("/")[0] for name in its} >= {f"carry-{rank}.safetensors" for rank in range(processes)}
    assert len(places(whole, 8)) == processes
    assert places(killed, 8) == places(whole, 8)
    again = checkpoint_tensors(killed, 8)
    assert again.keys() == its.keys()
    for name, tensor in again.items():
        assert torch.equal(tensor, its[name]), name

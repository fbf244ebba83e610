"""Runs of task hrm in this process: a resumed run is the same bit for bit, and what a run leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hrm_run import GROUPS, new_hrm_run, write_puzzles
from in_process import Finished, StopAfter, train_in
from safetensors.torch import load_file
from untimed_metrics import untimed

from sftplay.errors import ConfigError, DataError
from sftplay.tasks.hrm.network import PuzzleTable, load_model
from sftplay.tasks.hrm.task import make_rows, open_puzzles
from sftplay.train.train_run import make_setup

KINDS: dict[str, dict[str, Any]] = {
    "hrm": {"hrm__ema": 0.9},
    "trm": {
        "hrm__arch": "single", "hrm__grad": "full_last_cycle", "hrm__q_continue": False, "hrm__optim": "adam_atan2",
        "hrm__positions": "rope", "hrm__loss": "softmax", "train__batch_size": 4, "hrm__puzzle_emb_dim": 9,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_puzzles(tmp_path_factory.mktemp("puzzles"))


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, puzzles: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cfg, folder = new_hrm_run(tmp_path_factory.mktemp("whole"), puzzles, **KINDS[request.param])
    return train_in(cfg, folder)


def course(run: Finished) -> list[dict[str, Any]]:
    return untimed(run.metrics)


def tensors_in(run: Finished, step: int) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds: weights, table, average, puzzles under way, optimizer."""
    folder, found = run.folder.checkpoints / f"checkpoint-{step}", {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name}/{name}": tensor for name, tensor in load_file(path).items()}
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    return found | {f"optimizer/{n}/{k}": torch.as_tensor(v) for n, each in state.items() for k, v in each.items()}


def test_a_resumed_run_is_the_same_bit_for_bit(whole: Finished, puzzles: Path, tmp_path: Path):
    changes = next(each for each in KINDS.values() if each.get("hrm__ema") == whole.cfg.hrm.ema)
    cfg, folder = new_hrm_run(tmp_path, puzzles, **changes)
    assert train_in(cfg, folder, StopAfter(5)).outcome.stop_signal == signal.SIGTERM
    resumed = train_in(cfg.with_values({"train.resume": "auto"}, "test"), folder)
    assert course(resumed) == course(whole)
    its = tensors_in(whole, 8)
    assert {name.split("/")[0] for name in its} >= {"model.safetensors", "carry-0.safetensors", "optimizer"}
    for name, tensor in tensors_in(resumed, 8).items():
        assert torch.equal(tensor, its[name]), name
    assert resumed.trainer.train_rows.state() == whole.trainer.train_rows.state()


def test_the_result_is_the_model_that_was_measured(whole: Finished):
    model = load_model(whole.folder.path / "model")
    saved = model.state_dict()
    with whole.trainer.averaged():
        for name, tensor in whole.trainer.model.state_dict().items():
            assert torch.equal(tensor, saved[name]), name
    last = json.loads((whole.folder.eval / "step-8.json").read_text())
    assert last["n"] == 2 * GROUPS
    assert len(last["segments"]) == whole.cfg.hrm.n_supervision
    assert last["exact_accuracy"] == last["segments"][-1]["exact_accuracy"]
    assert 1 <= last["halting_q"]["segments"] <= whole.cfg.hrm.n_supervision
    assert whole.metrics[-1]["eval_exact_accuracy"] == last["exact_accuracy"]


def test_the_warm_up_begins_with_its_first_share_as_the_published_schedule_does(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rates: list[float] = []
    real = PuzzleTable.update
    monkeypatch.setattr(
        PuzzleTable,
        "update",
        lambda self, touched, **named: (rates.append(named["rate"]), real(self, touched, **named))[1],
    )
    warm_up = {"train__lr_scheduler": "constant_with_warmup", "train__warmup_ratio": 0.5}
    run = train_in(*new_hrm_run(tmp_path, puzzles, **warm_up))
    # compute_lr of HRM's pretrain.py: the step is counted up first, so step 1 of 4 has a quarter of the peak.
    shares = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    assert rates == pytest.approx([0.05 * share for share in shares])
    assert [line["learning_rate"] for line in run.metrics] == pytest.approx([0.01 * share for share in shares])


def test_a_run_that_has_learned_its_puzzles_ends_with_a_checkpoint_a_measurement_and_a_result(
    puzzles: Path, tmp_path: Path
):
    cfg, folder = new_hrm_run(tmp_path, puzzles, hrm__stop_at_exact=1e-9, train__max_steps=40, hrm__n_supervision=1)
    run = train_in(cfg, folder)
    ended = run.outcome.step
    first = next(line for line in run.metrics if line["exact_accuracy"] > 0)
    assert ended == first["step"] < 40
    assert (folder.checkpoints / f"checkpoint-{ended}" / "COMPLETE.json").is_file()
    assert (folder.eval / f"step-{ended}.json").is_file()
    assert load_model(folder.path / "model")


@pytest.mark.parametrize(("steps", "between"), [(200, 20), (20, 5)])
def test_a_run_is_measured_and_saved_ten_times_where_nothing_is_said_but_not_within_a_visit_to_all_puzzles(
    puzzles: Path, tmp_path: Path, steps: int, between: int
):
    never = {"train__eval_steps": None, "train__save_steps": None, "train__max_steps": steps}
    cfg, folder = new_hrm_run(tmp_path, puzzles, **never)
    train, held_out = open_puzzles(cfg)
    rows = make_rows(cfg, train, held_out=held_out)  # 40 groups, 8 rows a step: 5 steps for a visit
    assert rows.order is not None
    assert rows.order.steps_per_epoch == between
    assert make_setup(cfg, folder, n_rows=0, known=rows.order).arguments(has_held_out=False)["save_steps"] == between


@pytest.mark.long
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",  # torch's compiler itself calls it
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the compiler reads inner gradients
)
def test_a_compiled_model_learns_what_it_learns_otherwise(puzzles: Path, tmp_path: Path):
    losses = []
    for compiles in (False, True):
        cfg, folder = new_hrm_run(tmp_path / str(compiles), puzzles, train__max_steps=3, hrm__compile=compiles)
        losses.append(train_in(cfg, folder).losses)
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_state_has_the_precision_of_the_run_and_the_weights_are_fp32(precision: str, puzzles: Path, tmp_path: Path):
    cfg, folder = new_hrm_run(tmp_path, puzzles, train__max_steps=2, train__precision=precision)
    train_in(cfg, folder)
    held = load_file(folder.checkpoints / "checkpoint-2" / "carry-0.safetensors")
    assert str(held["high"].dtype) == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
    weights = load_file(folder.path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_a_checkpoint_of_other_puzzles_is_refused(whole: Finished, tmp_path: Path):
    cfg, folder = new_hrm_run(tmp_path, write_puzzles(tmp_path / "other", seed=1))
    checkpoint = whole.folder.checkpoints / "checkpoint-4"
    changed = whole.cfg.with_values({"train.resume": str(checkpoint), "data.train_path": cfg.data.train_path}, "test")
    with pytest.raises((DataError, ConfigError), match="changed"):
        train_in(changed, folder)

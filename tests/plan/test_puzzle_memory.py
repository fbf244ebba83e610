"""Memory, size and time of runs of puzzles: against a fake-tensor trace, the model itself, and by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle.puzzle_trace import trace_puzzles
from torch.utils.flop_counter import FlopCounterMode

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.tasks.hrm.act import all_halted, run_segment
from sftplay.tasks.hrm.network import Grid, PuzzleModel
from sftplay.tasks.hrm.plan import (
    GridSize,
    PuzzleModelShape,
    PuzzleShape,
    flops_per_row,
    puzzle_footprint,
)
from sftplay.tasks.hrm.section import HrmConfig

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.03
SUDOKU = GridSize(cells=81, words=11, identifiers=1)
SMALL = {"hidden_size": 64, "num_heads": 4, "h_layers": 1, "l_layers": 1, "positions": "learned", "q_continue": False}
MIDDLE = {"hidden_size": 256, "num_heads": 4, "h_layers": 2, "l_layers": 2}
TRM = {"arch": "single", "grad": "full_last_cycle", "l_layers": 2, "l_cycles": 3, "q_continue": False}
CASES = {
    "small": (SMALL, 64, 64, 4),
    "accumulates": (MIDDLE | {"h_layers": 1, "l_layers": 1}, 48, 24, 4),
    "16 bits": (MIDDLE | {"h_layers": 1}, 96, 96, 2),
}
LARGE_CASES = {
    "published": ({}, 96, 96, 2),
    "smaller later model": (TRM | {"puzzle_emb_len": 16}, 32, 8, 4),
}


def built(hrm: HrmConfig, grid: GridSize, **more: Any) -> PuzzleModel:
    return PuzzleModel(hrm, Grid(vocab_size=grid.words, cells=grid.cells, identifiers=grid.identifiers), **more)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE_CASES)])
def test_the_closed_form_is_within_three_percent_of_the_trace_in_every_phase(name: str):
    given, rows, micro_batch, compute_bytes = (CASES | LARGE_CASES)[name]
    hrm = HrmConfig(**given)
    planned = puzzle_footprint(
        PuzzleShape(hrm, SUDOKU),
        rows=rows,
        micro_batch=micro_batch,
        compute_bytes=compute_bytes,
        workspace=0,
    ).phases
    dtype = {2: torch.bfloat16, 4: torch.float32}[compute_bytes]
    grid = Grid(vocab_size=SUDOKU.words, cells=SUDOKU.cells, identifiers=1)
    traced = trace_puzzles(hrm, grid, rows=rows, micro_batch=micro_batch, dtype=dtype)
    errors = {phase: sum(planned[phase].values()) / size - 1 for phase, size in traced.items()}
    assert errors == pytest.approx(dict.fromkeys(errors, 0), abs=TOLERANCE)


def test_memory_does_not_grow_with_the_cycles_unless_the_gradient_goes_back_through_them():
    def peak(**more: Any) -> int:
        shape = PuzzleShape(HrmConfig(**{**MIDDLE, **more}), SUDOKU)
        return puzzle_footprint(shape, rows=8, micro_batch=8, compute_bytes=4).peak_bytes

    assert peak(h_cycles=8, l_cycles=8) == peak()
    assert peak(grad="full_last_cycle", l_cycles=8) > 2 * peak()


@pytest.mark.parametrize(
    "given",
    [SMALL, MIDDLE, TRM | {"hidden_size": 128}, SMALL | {"puzzle_emb_dim": 0}, SMALL | {"puzzle_emb_len": 16}],
)
def test_weights_and_table_are_those_of_the_model(given: dict[str, Any]):
    grid = GridSize(cells=16, words=6, identifiers=7)
    shape, model = PuzzleShape(HrmConfig(**given), grid), built(HrmConfig(**given), grid)
    assert shape.weights == sum(weight.numel() for weight in model.parameters())
    assert shape.table == (model.puzzles.rows.numel() if model.puzzles is not None else 0)


def test_the_published_model_has_27_million_weights():
    assert PuzzleShape(HrmConfig(), SUDOKU).weights == pytest.approx(27.3e6, rel=0.002)


@pytest.mark.parametrize(
    "given", [SMALL, SMALL | {"q_continue": True}, MIDDLE | {"h_cycles": 3}, TRM | {"hidden_size": 64, "num_heads": 2}]
)
def test_operations_of_a_step_are_those_that_torch_counts_up_to_attention(given: dict[str, Any]):
    hrm, grid, rows = HrmConfig(**given), GridSize(cells=16, words=6, identifiers=1), 2
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = built(hrm, grid)
        carry = all_halted(model, rows, device="meta")
        run_segment(model, carry, at_least=torch.zeros(rows, dtype=torch.int64)).losses.sum().backward()
    of_products = sum(
        flops
        for name, flops in counter.get_flop_counts()["Global"].items()
        if "mm" in str(name) and "bmm" not in str(name)
    )
    shape = PuzzleModelShape.from_puzzles(PuzzleShape(hrm, grid), rows=None)
    assert rows * flops_per_row(shape) == pytest.approx(of_products, rel=0.01)


MILLION = GridSize(cells=900, words=12, identifiers=1_000_000)


def sized(gib: float, processes: int, **changes: Any) -> SizedRun:
    """The published ARC run with a million identifiers, on so many cards of this size."""
    values = {f"hrm.{name}": value for name, value in changes.items()}
    cfg = load_config(ROOT / "configs/run_hrm_arc1.yaml").with_values(values, "test")
    size = int(gib * 2**30)
    machine = Machine(tuple(Gpu(n, "a card", size, size, (9, 0)) for n in range(processes)), "", 2**36, 8, "", "", {})
    return size_run(
        cfg,
        machine,
        world_size=processes,
        shape=PuzzleModelShape.from_puzzles(PuzzleShape(cfg.hrm, MILLION), rows=None),
    )


def test_a_process_holds_the_whole_table_or_its_share_and_the_main_host_collects_it():
    # 1,000,000 rows of 512 numbers of 4 bytes; an eighth of the rows on each of eight processes
    held = {}
    for placement in ("replicated", "sharded"):
        seen = sized(80, 8, puzzle_emb_placement=placement).forecast
        assert seen is not None
        held[placement] = (seen.components["table"], seen.host_bytes)
    assert held == {"replicated": (2_048_000_000, 0), "sharded": (256_000_000, 2_048_000_000)}
    alone = sized(80, 1, puzzle_emb_placement="sharded")
    assert alone.forecast is not None
    assert alone.forecast.components["table"] == 2_048_000_000
    assert any("no effect with one process" in note for note in alone.notes)


@pytest.mark.parametrize(("gib", "placement"), [(80, "replicated"), (6.5, "sharded"), (2, "replicated")])
def test_the_table_is_shared_out_where_only_that_makes_the_run_fit(gib: float, placement: str):
    """On 6.5 GiB the whole table leaves no room for a row; on 2 GiB its eighth leaves none either."""
    run = sized(gib, 8)
    assert run.cfg.hrm.puzzle_emb_placement == placement
    assert run.decisions["hrm.puzzle_emb_placement"].value == placement
    assert run.forecast is not None
    assert (run.forecast.verdict == "fits") == (gib > 2)
    whole = sized(gib, 8, puzzle_emb_placement="replicated").forecast
    assert whole is not None
    assert (whole.verdict == "fits") == (gib == 80)


@pytest.mark.contract
def test_the_plan_of_arc_tells_the_table_and_what_sharding_saves(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["plan", "--config", "configs/run_hrm_arc2.yaml", "--gpus", "8xH100", "data.train_path=no/arc"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    # 1120 tasks with 1000 copies each and the blank row: 1,121,121 x 2048 bytes; an eighth is 140,141 rows
    assert "1,121,121 puzzle embeddings of 512 numbers" in shown
    assert "on each process 2.14 GiB whole, 273.7 MiB sharded: 1.87 GiB less (whole here)" in shown


@pytest.mark.contract
def test_a_plan_needs_no_puzzles_and_says_what_it_assumes(capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [
        "plan",
        "--config",
        "configs/run_hrm_sudoku.yaml",
        "--gpus",
        "8xH100",
        "--json",
        "data.train_path=no/sudoku",
    ]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan["phases"]) == ["segment", "layer", "step", "evaluation"]
    assert (plan["batch_size"], plan["grad_accum"], plan["effective_batch_size"]) == (96, 1, 768)
    assert any("not there yet" in note for note in plan["notes"])


@pytest.mark.contract
def test_a_comparison_of_ways_to_train_is_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["plan", "--config", "configs/run_hrm_sudoku4.yaml", "--compare"]) == 2
    assert "nothing to compare" in capsys.readouterr().err


@pytest.mark.contract
def test_a_folder_of_puzzles_that_is_broken_is_refused_by_the_plan(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    shutil.copytree(ROOT / "configs", tmp_path / "sudoku")
    assert main(["plan", "--config", "configs/run_hrm_sudoku.yaml", f"data.train_path={tmp_path / 'sudoku'}"]) == 4
    assert "dataset.json" in capsys.readouterr().err

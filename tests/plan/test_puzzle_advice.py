"""What a plan advises where a run of puzzles does not fit: each change, typed behind the same command, makes it fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.cli import main

ROOT = Path(__file__).parents[2]
ARC, TRM = "configs/run_hrm_arc2.yaml", "configs/run_trm_sudoku.yaml"
NO_FILES = "data.train_path=no/arc"

CASES = {
    "a small card": (ARC, ["--vram", "8GiB"], ["train.effective_batch_size", "hrm.hidden_size"]),
    "several changes together": (ARC, ["--vram", "3GiB"], ["train.effective_batch_size"]),
    "a whole table on each": (
        ARC,
        ["--gpus", "8xT4", "hrm.puzzle_emb_dim=4096", "hrm.puzzle_emb_placement=replicated"],
        ["hrm.puzzle_emb_placement", "hrm.puzzle_emb_dim"],
    ),
    "a micro-batch that was given": (TRM, ["--vram", "4GiB", "train.batch_size=384"], ["train.batch_size"]),
    "fp32 that was given": (
        ARC,
        ["--vram", "12GiB", "train.precision=fp32"],
        ["train.precision", "train.effective_batch_size", "hrm.hidden_size"],
    ),
}


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `plan --json` from the repository's root; its exit code and document."""
    monkeypatch.chdir(ROOT)

    def call(config: str, *words: str) -> tuple[int, dict[str, Any]]:
        puzzles = "data.train_path=no/sudoku" if config == TRM else NO_FILES
        code = main(["plan", "--config", config, "--json", puzzles, *words])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.mark.contract
@pytest.mark.parametrize("name", CASES)
def test_each_advice_makes_the_run_fit_with_the_peak_that_it_names(name: str, plan):
    config, words, first_keys = CASES[name]
    code, found = plan(config, *words)
    assert code == 3
    assert [each["change"].partition("=")[0] for each in found["suggestions"]] == first_keys
    for each in found["suggestions"]:
        assert each["fits"]
        changes = each["change"].split(", ")
        keys = {change.partition("=")[0] for change in changes}
        kept = [word for word in words if word.partition("=")[0] not in keys]
        code, again = plan(config, *kept, *changes)
        assert (code, again["verdict"]) == (0, "fits")
        assert (again["peak_bytes"], again["batch_size"]) == (each["peak_bytes"], each["batch_size"])


@pytest.mark.contract
def test_changes_that_only_fit_together_are_each_needed_and_as_small_as_they_can_be(plan):
    words = ["--vram", "3GiB"]
    (advice,) = plan(ARC, *words)[1]["suggestions"]
    changes = [change.split("=") for change in advice["change"].split(", ")]
    assert len(changes) > 1
    for key, value in changes:
        others = [f"{name}={n}" for name, n in changes if name != key]
        for milder in ([], [f"{key}={2 * int(value)}"]):
            assert plan(ARC, *words, *others, *milder)[1]["verdict"] != "fits"


@pytest.mark.contract
def test_where_nothing_fits_the_plan_says_what_comes_nearest_and_a_run_that_fits_gets_no_advice(plan):
    (nearest,) = plan(TRM, "--vram", "1GiB")[1]["suggestions"]
    assert not nearest["fits"]
    assert plan(ARC, "--gpus", "8xH100")[1]["suggestions"] == []

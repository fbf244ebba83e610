"""The sizes in plan.json are those the running trainer has, and those of the micro-batches that really run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from grpo_run import grpo_inputs, grpo_options
from in_process import Inputs, new_run, train_in
from transformers import GenerationMixin

from sftplay.errors import RunError
from sftplay.train.exact_batch import ExactBatchMixin
from sftplay.train.micro_batches import MicroBatcher
from sftplay.train.preflight import find_other_sizes

SIZES = {"batch_size": 2, "grad_accum": 4, "effective_batch_size": 8, "world_size": 1}


def planned_run(home: Path, inputs: Inputs, **altered: int) -> Any:
    """A run of 2 x 4 rows on one process, and plan.json as `train` writes it but for what is altered."""
    cfg, folder = new_run(home, inputs, train__batch_size=2, train__max_steps=2)
    folder.write_json("plan.json", {**SIZES, **altered})
    return cfg, folder


def test_micro_batches_that_run_have_the_rows_and_the_number_that_the_plan_says(
    tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
):
    ran: list[int] = []
    compute = ExactBatchMixin.compute_loss

    def count(self: ExactBatchMixin, model: Any, micro_batch: Any, *more: Any, **named: Any) -> Any:
        if model.training:
            ran.append(len(micro_batch["input_ids"]))
        return compute(self, model, micro_batch, *more, **named)

    monkeypatch.setattr(ExactBatchMixin, "compute_loss", count)
    cfg, folder = planned_run(tmp_path, inputs)
    done = train_in(cfg, folder)
    assert ran == [SIZES["batch_size"]] * SIZES["grad_accum"] * 2
    assert [len(line["row_ids"][0]) for line in done.metrics] == [SIZES["effective_batch_size"]] * 2
    sizes = json.loads((folder.path / "status.json").read_text())["ranks"][0]["sizes"]
    assert sizes == SIZES


DRAWN = {"num_generations": 4, "generation_batch_size": 16, "steps_per_generation": 8, "generation_rows": 6}


@pytest.mark.parametrize("key", [None, "generation_rows"])
def test_the_drawings_of_grpo_are_those_that_the_plan_says(key: str | None, tiny_llama: Path, tmp_path: Path):
    """Two steps of 2 x 4 completions learn from 16, which are drawn in 3 parts."""
    inputs = grpo_inputs(tiny_llama, tmp_path / "data")
    options = grpo_options(inputs, train__max_steps=2, train__batch_size=2, grpo__steps_per_generation=2)
    cfg, folder = new_run(tmp_path, inputs, **options, grpo__generation_rows=6)
    plan = {**SIZES, **DRAWN}
    folder.write_json("plan.json", plan | ({key: plan[key] + 1} if key else {}))
    if key is not None:
        with pytest.raises(RunError, match=f"{key} is {plan[key]} where plan.json says {plan[key] + 1}"):
            train_in(cfg, folder)
        return
    drawn: list[int] = []
    generate = GenerationMixin.generate

    def count(self: Any, input_ids: Any, **named: Any) -> Any:
        drawn.append(len(input_ids))
        return generate(self, input_ids, **named)

    with patch.object(GenerationMixin, "generate", count):
        train_in(cfg, folder)
    assert drawn[:4] == [4, 6, 6, 4]  # first the held-out prompts
    assert json.loads((folder.path / "status.json").read_text())["ranks"][0]["sizes"] == plan


@pytest.mark.parametrize("key", ["grad_accum", "world_size"])
def test_a_plan_that_says_another_size_stops_the_run_before_its_first_step(key: str, tmp_path: Path, inputs: Inputs):
    cfg, folder = planned_run(tmp_path, inputs, **{key: SIZES[key] + 1})
    with pytest.raises(RunError, match=f"{key} is {SIZES[key]} where plan.json says {SIZES[key] + 1}") as caught:
        train_in(cfg, folder)
    assert caught.value.exit_code == 5
    assert not folder.metrics.exists() or folder.metrics.read_text() == ""


def test_a_micro_batch_that_is_not_the_plans_is_noticed(
    tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sftplay.train.setup.RunSetup.micro_batcher", lambda self: MicroBatcher(4))
    cfg, folder = planned_run(tmp_path, inputs)
    with pytest.raises(RunError, match=r"batch_size is 4 where plan.json says 2; rank 0: grad_accum is 2"):
        train_in(cfg, folder)


def test_sizes_that_an_older_plan_does_not_name_are_not_compared():
    assert find_other_sizes({"batch_size": 2}, SIZES) == []
    assert find_other_sizes({}, SIZES) == []

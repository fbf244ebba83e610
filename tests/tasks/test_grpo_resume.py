"""A GRPO run that was stopped anywhere and resumed learns from the same completions as one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grpo_run import grpo_options
from in_process import Finished, Inputs, assert_same_course, stop_and_resume, train

WINDOW = {"grpo__num_iterations": 2, "grpo__steps_per_generation": 2, "train__batch_size": 4}
"""Four optimizer steps learn from one drawing, each of two micro-batches."""

QLORA = {"tuning__mode": "qlora", "train__gradient_checkpointing": True, "grpo__beta": 0.05}


def samples(run: Finished) -> dict[str, list[dict[str, Any]]]:
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((run.folder.path / "samples").glob("*.jsonl"))
    }


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_:FutureWarning")  # TRL 1.16 calls it by its old name
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (3, WINDOW | {"tuning__mode": "lora", "tuning__lora__dropout": 0.2}),
        pytest.param(2, WINDOW | QLORA, marks=pytest.mark.slow),
    ],
    ids=["in a second iteration, with an adapter", "inside a drawing, in 4 bits"],
)
def test_a_resumed_run_draws_pays_and_learns_the_same_bit_for_bit(
    step: int, options: dict[str, Any], prompts: Inputs, tmp_path: Path
):
    options = grpo_options(prompts, **options)
    whole = train(tmp_path / "whole", prompts, **options)
    resumed = stop_and_resume(tmp_path / "stopped", prompts, step, **options)
    assert any(line["reward_std"] for line in whole.metrics)
    assert samples(whole) == samples(resumed)
    assert_same_course(whole, resumed)

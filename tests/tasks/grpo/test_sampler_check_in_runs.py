"""The check in whole runs: a setting of the sampler is named in the first step, and looking for it changes no bit."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from grpo_run import grpo_options
from in_process import Finished, Inputs, train

from sftplay.model.recomputation import is_recomputing
from sftplay.report.remarks import find_remarks
from sftplay.report.run_files import RunFiles
from sftplay.tasks.grpo.sampler_check import SamplerCheck

SHORT = {"train__max_steps": 2, "grpo__max_completion_length": 12, "tuning__mode": "lora"}


def run_with(home: Path, inputs: Inputs, **changes: Any) -> Finished:
    return train(home, inputs, **grpo_options(inputs, **SHORT, **changes))


@pytest.mark.slow
def test_a_setting_is_named_in_the_first_step_and_the_search_changes_no_bit(
    prompts: Inputs, tmp_path: Path, capsys: Any
):
    bent = {"grpo__top_p": 0.8, "tuning__lora__dropout": 0.1}
    checked = run_with(tmp_path / "checked", prompts, grpo__logprob_check_steps=1, **bent)
    said = capsys.readouterr().out
    assert said.count("warning: sampler and learner are not one model in step 1") == 1
    assert "cause: top_p: the sampler left out all but the likeliest 0.8" in said
    assert "fix: set grpo.top_p=1" in said
    unchecked = run_with(tmp_path / "unchecked", prompts, grpo__logprob_check_steps=0, **bent)
    assert "warning: sampler" not in capsys.readouterr().out
    for name, tensor in checked.weights.items():
        assert torch.equal(tensor, unchecked.weights[name]), name
    assert [line["loss"] for line in checked.metrics] == [line["loss"] for line in unchecked.metrics]
    assert {line["sampler_cause"] for line in checked.metrics} == {"top_p"}
    assert all(line["sampler_gap_max"] > line["sampler_gap"] > line["sampler_gap_bound"] for line in checked.metrics)
    assert {line["sampler_gap_bound"] for line in unchecked.metrics} == {None}
    texts = [remark[1] for remark in find_remarks(RunFiles(checked.folder))]
    assert any("top_p: the sampler left out" in text and "step 1" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["transformers", "continuous"])
def test_a_model_that_samples_itself_is_within_the_bound_whatever_dropout_learning_has(
    generation: str, prompts: Inputs, tmp_path: Path, capsys: Any
):
    changes = {"grpo__generation": generation, "tuning__lora__dropout": 0.3, "grpo__logprob_check_steps": 1}
    run = run_with(tmp_path, prompts, train__learning_rate=0.05, **changes)
    assert "warning: sampler" not in capsys.readouterr().out
    for line in run.metrics:
        assert 0 < line["sampler_gap"] <= line["sampler_gap_max"] < 1e-5 == line["sampler_gap_bound"]
        assert line["sampler_cause"] is None
    assert run.metrics[-1]["sampler_kl"] > 1e-6  # the dropout


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_a_run_computes_its_layers_anew_also_after_its_sampler_has_been_tried(prompts: Inputs, tmp_path: Path):
    # The trial ends by an error, as memory does that runs out: TRL's own context then leaves recomputation off.
    run = run_with(tmp_path, prompts, train__gradient_checkpointing=True)
    assert run.trainer.prompt_sampler.usable
    assert is_recomputing(run.trainer.model)


def test_a_step_that_is_not_due_costs_microseconds():
    check, batches = SamplerCheck(10), [{"completion_mask": torch.ones(8, 512)} for _ in range(16)]
    began = time.process_time()
    for _ in range(1000):
        check.judge(None, batches)
    assert time.process_time() - began < 1.0  # 1000 of them

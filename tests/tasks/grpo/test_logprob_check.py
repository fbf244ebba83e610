"""The sampler's own log-probabilities, and how they are compared with those of the model that learns."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gloo_ranks import on_ranks
from grpo_run import grpo_options
from grpo_toy import letter_tokenizer, tiny_llama
from in_process import Inputs, train
from peft import LoraConfig, get_peft_model

from sftplay.heartbeat import Heartbeat
from sftplay.tasks.grpo.sampler_check import MODEL_LOGPS, SAMPLER_LOGPS, SamplerCheck, record_logprobs

PROMPTS = [[0, 0, 5, 6], [7, 8, 9, 10]]


def draw(model: Any, **named: Any) -> tuple[torch.Tensor, list[list[float]]]:
    ids = torch.tensor(PROMPTS)
    with record_logprobs(model) as rows, torch.no_grad():
        drawn = model.generate(
            input_ids=ids, attention_mask=(ids > 0).long(), do_sample=True, max_new_tokens=9, top_k=0, **named
        )
    return drawn, rows


@pytest.mark.parametrize(("has_adapter", "temperature"), [(False, 1.0), (True, 0.5)])
def test_what_is_noted_is_what_plain_transformers_gives_for_the_whole_text(has_adapter: bool, temperature: float):
    model: Any = tiny_llama(letter_tokenizer())
    if has_adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    torch.manual_seed(0)
    drawn, rows = draw(model, temperature=temperature, eos_token_id=None)
    for row, (text, prompt) in zip(rows, zip(drawn, PROMPTS, strict=True), strict=True):
        whole = torch.tensor([[token for token in prompt if token] + text[4:].tolist()])
        with torch.no_grad():
            scores = (model(input_ids=whole).logits[0, -10:-1] / temperature).log_softmax(-1)
        expected = scores.gather(1, text[4:, None])[:, 0]
        assert row == pytest.approx(expected.tolist(), abs=1e-4)
    assert "generate" not in vars(model)


def test_a_generate_of_the_models_own_is_there_again_afterwards():
    model: Any = tiny_llama(letter_tokenizer())
    plain = model.generate
    own = model.generate = lambda *given, **named: plain(*given, **named)
    drawn, rows = draw(model)
    assert [len(row) for row in rows] == [drawn.size(1) - 4] * 2
    assert vars(model)["generate"] is own
    assert "generate_batch" not in vars(model)


def test_a_rank_that_sampled_nothing_judges_with_the_others(tmp_path: Path):
    def work() -> Any:  # grpo.skip_zero_variance may leave a rank without a group
        mask = torch.ones(2, 20)
        batch = {"completion_mask": mask, MODEL_LOGPS: -2 * mask - 5e-6}
        if os.environ["RANK"] == "0":
            batch |= {SAMPLER_LOGPS: -2 * mask}
        check = SamplerCheck(1)
        check.judge(SimpleNamespace(state=SimpleNamespace(global_step=0), heartbeat=Heartbeat()), [batch])
        assert check.reading is not None
        return check.reading.counts, check.take(Heartbeat())["sampler_gap_max"]

    first, second = on_ranks(2, work, tmp_path / "ranks")
    assert first == second == ((32, 8, 0, 0), pytest.approx(5e-6, rel=0.1))


def test_the_figures_by_hand():
    check = SamplerCheck(1)
    check.trained_logps = torch.tensor([[-1.0, -2.0, -3.0, -9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    check.compare(sampled=torch.tensor([[-1.5, -2.0, torch.nan, 0.0]]), before=None, mask=mask)  # vLLM may not know one
    check.compare(sampled=None, before=torch.tensor([[-1.5, -2.0, -3.0, 0.0]]), mask=mask)
    # |0.5| and |0| over two tokens; e^0.5 - 1 - 0.5 over three
    unjudged = {"sampler_gap_max": None, "sampler_gap_bound": None, "sampler_cause": None}
    means = {"sampler_gap": 0.25, "sampler_kl": pytest.approx(0.14872127 / 3, rel=1e-5)}
    assert check.take(Heartbeat()) == means | unjudged
    assert check.take(Heartbeat()) == {"sampler_gap": None, "sampler_kl": None} | unjudged


DROPOUT = {"tuning__mode": "lora", "tuning__lora__dropout": 0.3, "train__learning_rate": 0.05}
"""The adapter is 0 in the first step and far from it in the second one."""


@pytest.mark.slow
def test_the_tokens_of_a_drawing_have_the_probabilities_with_which_they_were_drawn(
    prompts: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gaps, dropped = list[float](), list[float]()
    compare = SamplerCheck.compare

    def noted(self: SamplerCheck, *, sampled: Any, before: Any, mask: torch.Tensor) -> None:
        if sampled is not None and before is not None and self.trained_logps is not None:
            kept = mask.bool()
            gaps.append(float((sampled - before)[kept].abs().max()))
            dropped.append(float((self.trained_logps - before)[kept].abs().max()))
        compare(self, sampled=sampled, before=before, mask=mask)

    monkeypatch.setattr(SamplerCheck, "compare", noted)
    window = {"grpo__num_iterations": 2, "grpo__beta": 0.1}
    steps = {"train__max_steps": 4, "grpo__logprob_check_steps": 1}
    run = train(tmp_path, prompts, **grpo_options(prompts, **DROPOUT, **steps, **window))
    assert max(gaps) < 1e-4  # rounding
    assert max(dropped) > 1e-2  # it still learns with dropout
    assert run.trainer.model.training

"""A run of task grpo does what TRL does, on the kit's prompts and rewards, and says what it paid for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from datasets import Dataset
from grpo_run import grpo_inputs, grpo_options, variety_of
from in_process import Finished, Inputs, built, train
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOTrainer

from sftplay.data.pipeline import training_order
from sftplay.errors import RunError

REWARDS = """
def variety(completions, **_):
    return [min(len(set(each)), 20) / 40 for each in completions]

def level(completions, level, answer, **_):
    assert all(isinstance(each, str) for each in answer)
    return [float(each) for each in level]

def mute(completions, **_):
    return [None] * len(completions)
"""


def samples_of(run: Finished, step: int) -> list[dict[str, Any]]:
    lines = (run.folder.path / "samples" / f"step-{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def weights(folder: Path | None) -> dict[str, torch.Tensor]:
    assert folder is not None
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def rewards(path: Path, *names: str, **more: Any) -> list[dict[str, Any]]:
    return [{"name": name, "use": f"{path}:{name}", **more} for name in names]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(REWARDS)
    return path


def test_a_run_draws_and_learns_what_plain_trl_draws_and_learns_from_the_same_prompts(prompts: Inputs, tmp_path: Path):
    options = grpo_options(prompts, train__max_steps=3, train__batch_size=4, train__warmup_ratio=0.0)
    run = train(tmp_path / "kit", prompts, **options)

    def variety(completions: list[str], **_: Any) -> list[float]:
        return [variety_of(each) for each in completions]

    tokenizer = AutoTokenizer.from_pretrained(prompts.model)
    rows = [json.loads(line) for line in prompts.train.read_text().splitlines()]
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": rows[n]["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for n in training_order(12, 6, seed=42)
    ]
    args = built(tmp_path / "arguments", prompts, **options).trainer.args
    args.output_dir = str(tmp_path / "trl")
    set_seed(42)
    model = AutoModelForCausalLM.from_pretrained(prompts.model, dtype=torch.float32)
    model.generation_config.eos_token_id = run.trainer.eos_token_ids
    plain = GRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": asked}),
        processing_class=tokenizer,
    )
    plain.train()
    assert [each["completion"] for each in samples_of(run, 3)] == list(plain._logs["completion"])
    assert any(line["reward_std"] for line in run.metrics)
    expected = plain.model.state_dict()
    for name, weight in weights(run.folder.result).items():
        # The kit sorts the rows of a step by length, so that sums are rounded in another order.
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-5)


def test_samples_say_what_each_completion_was_paid_and_the_line_of_metrics_sums_it_up(
    prompts: Inputs, functions: Path, tmp_path: Path
):
    paid = rewards(functions, "variety") + rewards(functions, "level", weight=0.0)
    options = grpo_options(prompts, rewards=paid, train__max_steps=2, grpo__samples=6)
    run = train(tmp_path, prompts, **options)
    order = training_order(12, 4, seed=42)
    for step, line in enumerate(run.metrics, 1):
        lines = samples_of(run, step)
        assert [each["prompt_id"] for each in lines] == [order[2 * step - 2]] * 4 + [order[2 * step - 1]] * 2
        for each in lines:
            level, variety = each["rewards"]["level"], each["rewards"]["variety"]
            assert level == each["prompt_id"]
            assert variety == pytest.approx(variety_of(each["completion"]))
            assert each["verdict"] is None
        group = [each["rewards"]["variety"] for each in lines[:4]]
        for each, reward in zip(lines[:4], group, strict=True):
            # TRL: (reward - mean of the group) / (its standard deviation + 1e-4); what has weight 0 is not paid
            assert each["advantage"] == pytest.approx((reward - fmean(group)) / (stdev(group) + 1e-4), rel=1e-3)
        assert line["reward"] == pytest.approx(line["reward/variety"])
        assert line["reward/level"] == pytest.approx(fmean([order[2 * step - 2], order[2 * step - 1]]))
        assert line["zero_variance_share"] == 0.0
        assert line["abstained"] == 0.0
        assert line["clipped_ratio"] <= 1.0
        assert 0 < line["completion_tokens"] <= 12
        assert line["label_tokens"] == pytest.approx(8 * line["completion_tokens"])
        assert line["entropy"] > 0
        assert line["policy_clip_share"] == 0.0  # the weights that drew learn
        assert not any(key.startswith(("sandbox/", "found/")) or key == "loss_scale" for key in line)
        assert line["step_split"]["generation_s"] > 0
        assert "true_reward" not in line


def test_a_reward_that_never_knows_ends_the_run_with_its_name(prompts: Inputs, functions: Path, tmp_path: Path):
    with pytest.raises(RunError, match="have no value of mute: returned None"):
        train(tmp_path, prompts, **grpo_options(prompts, rewards=rewards(functions, "mute")))


@pytest.mark.slow
@pytest.mark.parametrize("control", ["random", "constant"])
def test_a_control_pays_something_else_and_still_measures_the_true_reward(
    control: str, prompts: Inputs, tmp_path: Path
):
    run = train(tmp_path, prompts, **grpo_options(prompts, grpo__placebo_reward=control, train__max_steps=2))
    for step, line in enumerate(run.metrics, 1):
        lines = samples_of(run, step)
        assert line["true_reward"] == pytest.approx(fmean(each["rewards"]["variety"] for each in lines))
        assert line["reward"] == pytest.approx(fmean(each["control"] for each in lines), rel=1e-6)
        assert (line["reward"] == 1.0) is (control == "constant")
    start = load_file(prompts.model / "model.safetensors")
    learned = any(not torch.equal(start[name], weight) for name, weight in weights(run.folder.result).items())
    assert learned is (control == "random")


@pytest.mark.slow
def test_kl_is_measured_against_a_fresh_adapter_switched_off_and_against_a_copy_of_a_continued_one(
    prompts: Inputs, tmp_path: Path
):
    options = grpo_options(prompts, tuning__mode="lora", grpo__beta=0.1, train__max_steps=2)
    first = train(tmp_path / "first", prompts, **options)
    assert isinstance(first.trainer.model, PeftModel)
    assert list(first.trainer.model.peft_config) == ["default"]
    assert first.metrics[0]["kl"] == 0.0 < first.metrics[1]["kl"]
    adapter = first.folder.result
    second = train(tmp_path / "second", prompts, **options, model__adapter=str(adapter))
    assert list(second.trainer.model.peft_config) == ["default", "ref"]
    assert second.metrics[0]["kl"] == 0.0 < second.metrics[1]["kl"]
    kept = {name: weight for name, weight in second.trainer.model.named_parameters() if ".ref." in f"{name}."}
    began = weights(adapter)
    assert kept
    assert all(torch.equal(weight, began[name.replace(".ref", "")]) for name, weight in kept.items())
    assert second.folder.result is not None
    assert not (second.folder.result / "ref").exists()


@pytest.mark.parametrize("asks", [False, True])
def test_the_router_of_a_mixture_adds_a_loss_only_where_its_config_asks_for_it(
    asks: bool, tiny_llama: Path, tmp_path: Path
):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
             "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
             "vocab_size": 400, "pad_token_id": 0, "eos_token_id": 2, "output_router_logits": asks}  # fmt: skip
    source = tmp_path / "model"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes)).save_pretrained(source)
    for file in (*tiny_llama.glob("tokenizer*"), *tiny_llama.glob("chat_template*")):
        shutil.copy(file, source)
    inputs = grpo_inputs(source, tmp_path / "data")
    run = train(tmp_path, inputs, **grpo_options(inputs, train__max_steps=1, train__batch_size=2))
    assert run.trainer.aux_loss_enabled is asks
    assert run.outcome.step == 1

"""What the adapter options do to the model that trains, and where noise and precision enter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Inputs, built, sized, train, written_config

from sftplay.train.preflight import find_problems


@pytest.mark.parametrize(
    ("listed", "adapted"),
    [
        ("auto", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),  # all but the head
        (["v_proj", "down_proj"], {"v_proj", "down_proj"}),
    ],
)
def test_target_modules_are_the_layers_with_a_pair(listed: Any, adapted: set[str], inputs: Inputs, tmp_path: Path):
    model = built(tmp_path, inputs, tuning__lora__target_modules=listed).trainer.model
    assert {name.rsplit(".", 1)[-1] for name, each in model.named_modules() if hasattr(each, "lora_A")} == adapted


def scale(model: Any) -> float:
    module = next(m for m in model.modules() if hasattr(m, "lora_A"))
    return float(module.scaling["default"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tuning__lora__r": 16}, 2.0),  # alpha None means 2 r
        ({"tuning__lora__r": 16, "tuning__lora__alpha": 8.0}, 0.5),
        ({"tuning__lora__r": 16, "tuning__lora__alpha": 8.0, "tuning__lora__rslora": True}, 2.0),  # 8 / sqrt(16)
    ],
)
def test_update_scale_by_hand(options: dict[str, Any], expected: float, inputs: Inputs, tmp_path: Path):
    assert scale(built(tmp_path, inputs, **options).trainer.model) == expected


def test_dora_trains_a_magnitude_of_each_output(inputs: Inputs, tmp_path: Path):
    run = train(tmp_path, inputs, tuning__lora__dora=True, train__max_steps=2)
    magnitudes = {n: p for n, p in run.trainer.model.named_parameters() if "magnitude" in n}
    assert len(magnitudes) == 14
    base = dict(run.trainer.model.named_parameters())
    name, magnitude = next(iter(magnitudes.items()))
    weight = base[name.split(".lora_magnitude")[0] + ".base_layer.weight"]
    assert magnitude.requires_grad
    # At the start it is the length of each row of the weight (Liu et al. 2024, eq. 5); two steps move it a little.
    moved = (magnitude.detach() - weight.norm(dim=1)).abs()
    assert 0 < float(moved.max()) < 0.1


def test_modules_to_save_train_whole_and_lie_in_the_adapter(inputs: Inputs, tmp_path: Path):
    run = train(tmp_path, inputs, tuning__lora__modules_to_save=["embed_tokens"], train__max_steps=2)
    wrapper = run.trainer.model.get_base_model().model.embed_tokens
    trained, original = wrapper.modules_to_save["default"].weight, wrapper.original_module.weight
    assert trained.requires_grad
    assert not original.requires_grad
    assert not torch.equal(trained, original)
    config = json.loads((run.folder.path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed_tokens"]


def test_neftune_adds_noise_of_the_published_size_only_while_training(inputs: Inputs, tmp_path: Path):
    captured: list[torch.Tensor] = []
    cases = {}
    for alpha in (None, 5.0):
        run = built(tmp_path / str(alpha), inputs, train__neftune_alpha=alpha, tuning__mode="full")
        trainer = run.trainer
        hook = trainer.model.model.layers[0].register_forward_pre_hook(
            lambda _module, args, kwargs: captured.append(args[0].detach().clone()), with_kwargs=True
        )
        trainer.args.max_steps = 1
        trainer.train()
        hook.remove()
        cases[alpha] = captured[0]
        captured.clear()
    noise = (cases[5.0] - cases[None]).abs()
    tokens, width = noise.shape[1:]
    bound = 5.0 / (tokens * width) ** 0.5  # Jain et al. 2023: uniform within alpha / sqrt(tokens * width)
    assert 0.9 * bound < float(noise.max()) <= bound * 1.001


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_adapter_weights_are_fp32_when_training_starts(mode: str, inputs: Inputs, tmp_path: Path):
    model = built(tmp_path, inputs, tuning__mode=mode, train__precision="bf16").trainer.model
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if "norm" in n} == {torch.bfloat16}


RANK = {
    "world_size": 2, "is_main": True, "model_class": "DistributedDataParallel", "fingerprint": "a", "parameters": "b",
    "rows_per_step": 4, "distributed_type": "MULTI_CPU", "base": "c", "rows": "d",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"world_size": 1}, "rank 1 sees 1 processes instead of 2"),
        ({"model_class": "LlamaForCausalLM"}, "rank 1 wraps the model in LlamaForCausalLM instead of Distributed"),
        ({"distributed_type": "NO"}, "rank 1 is NO where cluster.strategy is ddp"),
        ({"is_main": True}, "2 ranks take themselves for the main one"),
        ({"fingerprint": "z"}, "ranks read different configs"),
        ({"parameters": "z"}, "ranks start from different weights"),
        ({"base": "z"}, "ranks start from different files of weights"),
        ({"rows": "z"}, "ranks train on different rows"),
        ({"rows_per_step": 8}, "a step takes 12 rows instead of 8"),
    ],
)
def test_preflight_names_what_differs_from_the_plan(
    change: dict[str, Any], problem: str, inputs: Inputs, tmp_path: Path
):
    cfg = sized(written_config(tmp_path, inputs))
    problems = find_problems([RANK, {**RANK, "is_main": False, **change}], cfg, world_size=2)
    assert [problem in line for line in problems] == [True] * bool(problem)

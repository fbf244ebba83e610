"""The plan's note on the experts of a mixture is what PEFT then makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from project import ROOT
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.model.adapter import add_adapter, names_of_experts
from sftplay.plan.mixers import ADAPTED_MIXTURES, EXPERT_NAMES, describe_adapted
from sftplay.plan.more_families import FAMILIES
from sftplay.plan.shape_from_config import EXPERT_KEYS, EXPERTS_NAMED, MIXTURES, shape_from_config

SMALL = {"num_hidden_layers": 2, "vocab_size": 2048}
CFG = load_config(ROOT / "configs/run_lora.yaml")


def open_family(family: str) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[family](**SMALL, **({"head_dim": 64} if family == "glm4_moe" else {"num_experts": 16}))
    config.architectures = ["MixtureForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model, shape_from_config({k: v for k, v in config.to_dict().items() if v is not None}, name=family)


def with_targets(targets: Any) -> Any:
    lora = CFG.tuning.lora.model_copy(update={"target_modules": targets})
    return CFG.model_copy(update={"tuning": CFG.tuning.model_copy(update={"lora": lora})})


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next", "glm4_moe"])
def test_an_adapter_is_as_large_as_the_plan_counts_where_an_expert_is_shared(family: str):
    model, shape = open_family(family)
    adapted = add_adapter(model, CFG.tuning.lora.model_copy(update={"r": 2, "target_modules": "auto"}))
    counted = sum(
        kind.layers * 2 * (one.inputs + one.outputs)
        for kind in shape.kinds
        for one in kind.linears
        if not one.is_left_out
    )
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == counted
    assert ("MLP next to them" in describe_adapted(with_targets("auto"), shape)[0]) == (family in ADAPTED_MIXTURES)


@pytest.mark.parametrize("targets", ["auto", ("q_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")])
@pytest.mark.parametrize("family", sorted(MIXTURES | {"qwen3_next"}))
def test_the_note_is_what_peft_makes_of_the_experts(family: str, targets: Any):
    model, shape = open_family(family)
    cfg = with_targets(targets)
    present = {name.rpartition(".")[2] for name, _ in model.named_modules()} | names_of_experts(model)
    lora = cfg.tuning.lora
    if targets != "auto":
        lora = lora.model_copy(update={"target_modules": [name for name in targets if name in present]})
    adapted = add_adapter(model, lora)
    trains = any(isinstance(module, ParamWrapper) for module in adapted.modules())
    (note,) = describe_adapted(cfg, shape)
    assert ("adapts the experts" in note, "train nothing" in note) == (trains, not trains)


@pytest.mark.parametrize("family", sorted(MIXTURES | {"glm4_moe", "qwen3_next", "qwen3_5_moe_text"}))
def test_the_count_of_experts_is_read_under_every_name_that_transformers_reads_it_under(family: str):
    given = SMALL | {"head_dim": 64}
    written = CONFIG_MAPPING[family](**given).to_dict()
    key = next(key for key in EXPERT_KEYS if written.get(key))
    plain = {name: value for name, value in written.items() if name not in EXPERT_KEYS}
    count = written[key] // 2
    for name in EXPERT_KEYS:
        if CONFIG_MAPPING[family](**given, **{name: count}).to_dict()[key] == count:
            assert shape_from_config(plain | {name: count}, name=family).experts == count, name
        else:
            with pytest.raises(ConfigError, match="is missing"):
                shape_from_config(plain | {name: count}, name=family)


def test_the_families_are_those_that_peft_converts():
    converted = {name for name, kind in _MODEL_TO_CONVERSION_PATTERN.items() if kind in _MOE_TARGET_MODULE_MAPPING}
    assert converted & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} == ADAPTED_MIXTURES
    assert ADAPTED_MIXTURES & {*FAMILIES} == EXPERTS_NAMED
    kinds = {_MODEL_TO_CONVERSION_PATTERN[name] for name in ADAPTED_MIXTURES}
    assert {name for kind in kinds for name in _MOE_TARGET_MODULE_MAPPING[kind]} == EXPERT_NAMES | {"gate"}


def test_a_dense_model_and_a_full_run_have_no_note():
    _, shape = open_family("mixtral")
    config = CONFIG_MAPPING["qwen3"](**SMALL).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    assert describe_adapted(CFG, shape_from_config(config, name="dense")) == ()
    full = CFG.model_copy(update={"tuning": CFG.tuning.model_copy(update={"mode": "full"})})
    assert describe_adapted(full, shape) == ()
    assert describe_adapted(CFG, None) == ()

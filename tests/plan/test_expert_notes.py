"""The plan's note on the experts of a mixture is what PEFT then makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from project import ROOT
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sftplay.config.load import load_config
from sftplay.model.adapter import add_adapter
from sftplay.plan.experts import ADAPTED_MIXTURES, adapted_experts
from sftplay.plan.shape_from_config import MIXTURES, shape_from_config
from sftplay.units import format_count

SMALL = {"num_hidden_layers": 2}
CFG = load_config(ROOT / "configs/run_lora.yaml")


def open_family(family: str) -> tuple[Any, Any]:
    config = CONFIG_MAPPING[family](**SMALL)
    config.architectures = ["MixtureForCausalLM"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    published = config.to_dict() | {"num_experts": getattr(config, "num_experts", None)}  # 5.23 writes another key
    return model, shape_from_config({k: v for k, v in published.items() if v is not None}, name=family)


@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_the_note_is_what_peft_makes_of_the_experts(family: str):
    model, shape = open_family(family)
    adapted = add_adapter(model, CFG.tuning.lora)
    pairs = {p: p.numel() for m in adapted.modules() if isinstance(m, ParamWrapper) for p in m.parameters()}
    trained = sum(size for parameter, size in pairs.items() if parameter.requires_grad)
    (note,) = adapted_experts(CFG, shape)
    if trained:
        assert f"{format_count(trained)} weights train there" in note
    else:
        assert "train nothing" in note


def test_the_families_are_those_that_peft_converts():
    converted = {name for name, kind in _MODEL_TO_CONVERSION_PATTERN.items() if kind in _MOE_TARGET_MODULE_MAPPING}
    assert converted >= ADAPTED_MIXTURES
    assert not (MIXTURES & converted) - ADAPTED_MIXTURES


def test_a_dense_model_and_a_full_run_have_no_note():
    _, shape = open_family("mixtral")
    config = CONFIG_MAPPING["qwen3"](**SMALL).to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    assert adapted_experts(CFG, shape_from_config(config, name="dense")) == ()
    full = CFG.model_copy(update={"tuning": CFG.tuning.model_copy(update={"mode": "full"})})
    assert adapted_experts(full, shape) == ()
    assert adapted_experts(CFG, None) == ()

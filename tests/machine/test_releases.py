"""Names that other libraries have changed are found as the installed releases have them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from sftplay.config.schema.run import LoraConfig
from sftplay.machine.releases import as_named_here, hub_client, recomputation, recomputation_arguments
from sftplay.model.adapter import add_adapter


@pytest.mark.parametrize("recomputes", [True, False])
def test_recomputation_is_switched_by_arguments_that_nothing_warns_of(recomputes: bool, tmp_path: Path):
    taken = TrainingArguments(str(tmp_path), **recomputation_arguments(recomputes=recomputes))
    assert getattr(taken, recomputation()) is recomputes


def test_an_argument_by_its_old_name_is_not_passed_over(tmp_path: Path):
    given = as_named_here({"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "adam_beta1": 0.8})
    taken = TrainingArguments(str(tmp_path), **{**recomputation_arguments(recomputes=True), **given})
    assert getattr(taken, f"{recomputation()}_kwargs") == {"every_n_layers": 2}
    assert taken.adam_beta1 == 0.8


def test_the_hubs_errors_are_those_of_its_client():
    assert issubclass(HfHubHTTPError, hub_client().HTTPError)
    assert issubclass(hub_client().ConnectError, hub_client().TransportError)


def test_an_adapter_is_put_on_a_model_without_a_warning():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        add_adapter(model, LoraConfig(r=2))
    assert [str(each.message) for each in said] == []

"""Names that other libraries have changed are found as the installed releases have them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HfHubHTTPError
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from benchmarks import gpu_speed
from sftplay.config.load import load_config
from sftplay.config.run import LoraConfig
from sftplay.machine.releases import hub_client
from sftplay.model.adapter import add_adapter
from sftplay.model.recomputation import as_named_here, recomputation, recomputation_arguments
from sftplay.tasks.grpo.task import PAGE_TOKENS, grpo_arguments

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("recomputes", [True, False])
def test_recomputation_is_switched_by_arguments_that_nothing_warns_of(recomputes: bool, tmp_path: Path):
    taken = TrainingArguments(str(tmp_path), **recomputation_arguments(recomputes=recomputes))
    assert getattr(taken, recomputation()) is recomputes


def test_an_argument_by_its_old_name_is_not_passed_over(tmp_path: Path):
    given = as_named_here({"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "adam_beta1": 0.8})
    taken = TrainingArguments(str(tmp_path), **{**recomputation_arguments(recomputes=True), **given})
    assert getattr(taken, f"{recomputation()}_kwargs") == {"every_n_layers": 2}
    assert taken.adam_beta1 == 0.8


@dataclass
class EarlierCache:
    """`transformers.ContinuousBatchingConfig` before its pages had that name (5.17), as far as the kit sets it."""

    block_size: int = 256
    num_blocks: int | None = None


def earlier_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.17's fields: neither activation_checkpointing nor page_size."""
    fields = TrainingArguments.__dataclass_fields__
    older = {name: each for name, each in fields.items() if not name.startswith("activation_checkpointing")}
    monkeypatch.setattr(TrainingArguments, "__dataclass_fields__", older)
    # A library of the kit's has transformers imported anew: the module of today is the one in the table.
    monkeypatch.setattr(sys.modules["transformers"], "ContinuousBatchingConfig", EarlierCache)


@pytest.fixture
def unremembered() -> Iterator[None]:
    recomputation.cache_clear()
    yield
    recomputation.cache_clear()


@pytest.mark.usefixtures("unremembered")
@pytest.mark.parametrize(("is_earlier", "expected"), [(True, "gradient_checkpointing"), (False, recomputation())])
def test_the_gpu_benchmarks_plain_script_asks_for_recomputation_by_a_name_that_is_there(
    is_earlier: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Asked(Exception):
        pass

    def ask(**arguments: Any) -> None:
        raise Asked(arguments)

    if is_earlier:
        earlier_release(monkeypatch)
    (tmp_path / "ours").mkdir()
    monkeypatch.setattr(gpu_speed, "SFTConfig", ask)
    with pytest.raises(Asked) as caught:
        gpu_speed.measure(gpu_speed.CASES["tiny-lora"], "trl", tmp_path / "ours")
    (arguments,) = caught.value.args
    assert {name for name in arguments if name.endswith("_checkpointing")} == {expected}
    assert isinstance(arguments[expected], bool)


@pytest.mark.parametrize(("is_earlier", "expected"), [(True, "block_size"), (False, "page_size")])
def test_pages_of_continuous_batching_are_asked_for_by_a_name_that_is_there(
    is_earlier: bool, expected: str, monkeypatch: pytest.MonkeyPatch
):
    if is_earlier:
        earlier_release(monkeypatch)
    values = {"grpo.generation": "continuous", "grpo.generation_rows": 4, "train.batch_size": 2, "train.grad_accum": 1}
    cfg = load_config(ROOT / "configs/run_grpo_toy.yaml").with_values(values, "test")
    asked = grpo_arguments(cfg)["transformers_continuous_batching_config"]
    assert asked[expected] == PAGE_TOKENS
    assert sys.modules["transformers"].ContinuousBatchingConfig(**asked).num_blocks == asked["num_blocks"]


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

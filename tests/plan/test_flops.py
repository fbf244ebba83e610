"""Model FLOPs against torch's own counter on small models, and against the field's formulas by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay.plan.find_shape import find_shape
from sftplay.plan.flops import model_flops, seen_pairs
from sftplay.plan.memory_setup import Adapter, MemorySetup
from sftplay.plan.shape_from_config import shape_from_config

ROWS, TOKENS, RANK = 2, 24, 4
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 32},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 3, "vocab_size": 300},
    "gemma": SMALL | {"head_dim": 32},
    "gemma2": SMALL | {"head_dim": 32, "sliding_window": 4096},
    "gpt_neox": SMALL | {"intermediate_size": 160, "num_key_value_heads": 4},
    "phi3": SMALL,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "glm4_moe": SMALL | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1},
    "gpt_oss": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
MLP = {"llama": ["gate_proj", "up_proj", "down_proj"], "gpt_neox": ["dense_h_to_4h", "dense_4h_to_h"]}


def path_of(mode: str, targets: list[str] | None = None, **more: Any) -> MemorySetup:
    chosen = None if targets is None else tuple(targets)
    adapter = None if mode == "full" else Adapter(rank=RANK, targets=chosen, **more)
    return MemorySetup(weight_bytes=4, compute_bytes=4, stream_bytes=4, adapter=adapter)


def build(family: str, mode: str, targets: list[str] | None, **more: Any) -> tuple[Any, dict[str, Any]]:
    # Eager attention multiplies every query with every key; fused kernels also recompute the scores in backward.
    config = AutoConfig.for_model(family, **(FAMILIES | MIXTURES)[family], attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    if mode == "lora":
        more |= {"target_modules": targets or "all-linear", "fan_in_fan_out": family == "gpt2"}
        model = get_peft_model(model, LoraConfig(r=RANK, task_type="CAUSAL_LM", **more))
    return model.train(), config.to_dict()


def counted(model: Any, **more: torch.Tensor) -> int:
    ids = torch.randint(3, 300, (ROWS, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False, **({"labels": ids} | more)).loss.backward()
    return counter.get_total_flops()


def assert_counted(model: Any, config: dict[str, Any], path: MemorySetup, labelled: int, **more: torch.Tensor) -> None:
    flops = model_flops(shape_from_config(config, name="small"), path)
    assert flops is not None
    tokens, pairs = ROWS * TOKENS, ROWS * TOKENS * TOKENS
    assert flops.of_counts(tokens, labelled, pairs=(pairs, pairs)) == pytest.approx(counted(model, **more), rel=1e-4)


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_operations_are_those_that_torch_counts(family: str, mode: str):
    assert_counted(*build(family, mode, None), path_of(mode), ROWS * TOKENS)


@pytest.mark.parametrize("targets", [None, ["q_proj", "k_proj", "v_proj", "o_proj"]])
@pytest.mark.parametrize("family", MIXTURES)
def test_of_a_mixture_a_token_pays_for_the_experts_that_it_goes_to_and_for_the_router(
    family: str, targets: list[str] | None
):
    mode = "lora" if targets else "full"
    assert_counted(*build(family, mode, targets), path_of(mode, targets), ROWS * TOKENS)


@pytest.mark.parametrize("family", MLP)
def test_nothing_in_front_of_the_first_adapter_has_a_gradient(family: str):
    targets = MLP[family]
    assert_counted(*build(family, "lora", targets), path_of("lora", targets), ROWS * TOKENS)


@pytest.mark.parametrize("letters", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
def test_attention_of_the_first_layer_has_the_gradients_that_its_adapters_need(letters: str):
    targets = [f"{letter}_proj" for letter in letters]
    assert_counted(*build("llama", "lora", targets), path_of("lora", targets), ROWS * TOKENS)


def test_training_everything_takes_six_operations_a_weight_and_palms_attention():
    shape = find_shape("meta-llama/Llama-2-7b-hf")
    assert shape is not None
    flops = model_flops(shape, path_of("full"))
    assert flops is not None
    # A layer of Llama-2-7B: four matrices of 4096 x 4096, three of 4096 x 11008.
    assert flops.per_token == 6 * 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert flops.per_label_token == 6 * 4096 * 32_000
    assert flops.per_pair == 12 * 32 * 4096  # PaLM, appendix B: 12 L H Q T a token, for T keys


def test_a_linear_attention_reads_writes_and_reads_its_state_for_each_token():
    small = SMALL | {"num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    small |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    small |= {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4}
    config = AutoConfig.for_model("qwen3_next", **small, linear_value_head_dim=24).to_dict()
    flops = model_flops(shape_from_config(config, name="small"), path_of("full"))
    assert flops is not None
    experts = 2 * 3 * 64 * 32 + 64 * 4 + 3 * 64 * 32 + 64  # two of four, the router, the shared one and its gate
    whole = 64 * (2 * 4 * 16) + 2 * 64 * (2 * 16) + (4 * 16) * 64  # queries with a gate, keys and values, the output
    keys, values = 2 * 8, 4 * 24
    linear = 64 * (2 * keys + 2 * values) + 64 * (2 * 4) + values * 64
    states = 4 * 8 * 24  # a head's state has a row for each number of a key and a column for each of a value
    assert flops.per_token == 6 * (3 * (linear + 3 * states + experts) + whole + experts)


def test_a_query_sees_the_keys_up_to_its_own_place_and_no_more_than_the_window():
    assert seen_pairs(1) == 1
    assert seen_pairs(4) == 1 + 2 + 3 + 4
    assert seen_pairs(4, window=9) == 1 + 2 + 3 + 4
    assert seen_pairs(6, window=3) == 1 + 2 + 3 + 3 + 3 + 3


def test_layers_with_a_window_count_the_keys_inside_it():
    config = {"model_type": "gemma2", **FAMILIES["gemma2"], "sliding_window": 3}
    flops = model_flops(shape_from_config(config, name="gemma2"), path_of("full"))
    assert flops is not None
    a_pair = 12 * 4 * 32  # 4 heads of 32; the second of three layers sees the whole row
    expected = 1 * a_pair * (21 + 3) + 2 * a_pair * (15 + 3)
    rest = flops.per_token * 8 + flops.per_label_token * 3
    assert flops.of_rows([6, 2], 3) - rest == expected

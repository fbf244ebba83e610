"""A config.json that cannot be used is refused with the key; one that is only half understood says so."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.errors import ConfigError
from sftplay.plan.config_json import KEYS
from sftplay.plan.more_families import FAMILIES
from sftplay.plan.shape_from_config import shape_from_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}
NEEDED = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]


def refusal(config: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        shape_from_config(config, name="models/mine/config.json")
    assert caught.value.where == "models/mine/config.json"
    assert caught.value.fix
    assert "\n" not in caught.value.what
    return caught.value


@pytest.mark.parametrize("key", [*NEEDED, "model_type"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_key_is_named(key, how):
    config = {k: v for k, v in LLAMA.items() if k != key} | ({key: None} if how == "null" else {})
    assert refusal(config).what == f"{key} is missing"


@pytest.mark.parametrize("key", [*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings"])
@pytest.mark.parametrize("value", [0, "4096", 1.5, math.nan, True, [64], 2**40, pytest.param(10**5000, id="huge")])
def test_a_figure_that_cannot_be_is_refused_with_its_key(key, value):
    assert key in refusal(LLAMA | {key: value}).what


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 6}, "hidden_size is 64, which num_attention_heads=6 does not divide"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide num_attention_heads=4"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', neither true nor false"),
        ({"attention_bias": 1}, "attention_bias is 1, neither true nor false"),
        ({"hidden_act": 3}, "hidden_act is 3, not a word"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ({"model_type": "bert"}, "model_type is bert, an encoder: each token would see the one that it should predict"),
        ({"model_type": 7}, "model_type is 7, not a word"),
        # transformers' Falcon layer knows one norm and two.
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3"),
        ({"text_config": "llama"}, "text_config is 'llama', not a mapping"),
    ],
)
def test_what_does_not_go_together_is_named(changes, words):
    assert refusal(LLAMA | changes).what == words


def test_the_text_model_of_a_nested_config_is_read_and_its_keys_are_named_with_their_place():
    nested = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text", "head_dim": 16}}
    assert shape_from_config(nested, name="x").family == "gemma3_text"
    nested["text_config"]["hidden_size"] = "wide"
    assert refusal(nested).what == "text_config.hidden_size is 'wide', not a whole number"


def test_a_tower_the_kit_cannot_count_is_said_to_be_unmodelled():
    config = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 32}}
    shape = shape_from_config(config, name="x")
    assert shape.vision_params == 0
    assert shape.unmodelled == ("the parts for images or sound",)


def test_an_unknown_type_with_the_keys_of_a_llama_is_read_as_one_and_says_so():
    shape = shape_from_config(LLAMA | {"model_type": "newcomer"}, name="x")
    assert shape.total_params == shape_from_config(LLAMA, name="x").total_params
    assert shape.unmodelled == ("the architecture 'newcomer', read as a Llama of the same sizes",)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "newcomer", "num_experts": 2}, "mixture of experts"),
        ({"model_type": "newcomer", "kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "already quantised"),
    ],
)
def test_what_a_plan_does_not_account_for_is_said(changes, words):
    assert any(words in told for told in shape_from_config(LLAMA | changes, name="x").unmodelled)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=5),
    st.lists(st.integers(0, 3) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["model_type", "hidden_size", "image_size"]), st.integers(-1, 99), max_size=3),
)
ODD_KEYS = [
    *KEYS.values(),
    *(key for family in FAMILIES.values() for key in (*family.keys.values(), *family.defaults)),
    *("tie_word_embeddings", "text_config", "vision_config", "layer_types", "word_embed_proj_dim", "kv_lora_rank"),
    *("num_ln_in_parallel_attn", "new_decoder_architecture", "num_local_experts", "mlp_only_layers", "mlp_bias"),
]


@given(
    kind=st.sampled_from([*FAMILIES, "gemma3", "newcomer"]),
    changes=st.dictionaries(st.sampled_from(sorted(set(ODD_KEYS))), VALUES, max_size=5),
)
def test_any_config_gives_a_shape_or_one_readable_error(kind, changes):
    sizes = LLAMA | {"n_embd": 64, "n_layer": 2, "n_head": 4, "num_layers": 2, "num_heads": 4, "num_experts": 2}
    sizes |= {"n_positions": 32, "max_position_embeddings": 32, "ffn_dim": 96, "num_local_experts": 2}
    shape, refused = None, None
    try:
        shape = shape_from_config(sizes | {"model_type": kind} | changes, name="x")
    except ConfigError as error:
        refused = error
    if shape is not None:
        assert 0 < shape.linear_params < shape.total_params
        assert shape.vision_params >= 0
    else:
        assert refused.where == "x"
        assert refused.fix

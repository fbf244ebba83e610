"""Scores of pairs with a shared prompt and apart, their calibration, and settings that a score cannot have."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from sftplay.config.load import load_config
from sftplay.errors import ConfigError
from sftplay.tasks.preference.shared_prompt import PairCollator
from sftplay.tasks.reward_model.scores import describe_calibration, pair_losses, pair_scores, prove, to_score_model

SMALL = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip

ROWS = [
    {"prompt_tokens": p, "chosen_tokens": c, "row": n, "index": n, "input_ids": ids, "labels": [-100] * p + ids[p:]}
    for n, (p, c, r) in enumerate([(4, 2, 5), (1, 6, 1), (3, 3, 3)])
    for ids in [list(range(5 + n, 5 + n + p + c + r))]
]


def plain_scores(model):
    """Each side by itself in the class's own forward."""
    found = []
    for row in ROWS:
        p, end = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
        sides = (row["input_ids"][:end], row["input_ids"][:p] + row["input_ids"][end:])
        found.append([float(model(input_ids=torch.tensor([ids])).logits[0, 0].detach()) for ids in sides])
    return torch.tensor(found)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shares", [False, True])
def test_both_forms_give_the_scores_of_each_side_alone(shares, attention):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation=attention)
    model = to_score_model(model, pad_token_id=0, seed=1).eval()
    with torch.no_grad():
        model.score.weight.mul_(50)
    assert prove(model)
    found = pair_scores(model, PairCollator(0)(ROWS), shares=shares)
    torch.testing.assert_close(found, plain_scores(model), atol=1e-5, rtol=1e-5)
    assert float(found.detach().std()) > 0.1


@pytest.mark.parametrize("shares", [False, True])
def test_a_side_that_ends_in_the_pad_token_is_scored_where_plain_transformers_scores_it(shares):
    torch.manual_seed(0)
    model = to_score_model(LlamaForCausalLM(LlamaConfig(**SMALL)), pad_token_id=10, seed=1).eval()
    assert ROWS[0]["input_ids"][5] == 10  # the end of its chosen side
    found = pair_scores(model, PairCollator(10)(ROWS), shares=shares)
    torch.testing.assert_close(found, plain_scores(model), atol=1e-6, rtol=1e-5)


def test_a_model_whose_window_slides_takes_two_rows():
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))
    assert not prove(to_score_model(model, pad_token_id=0, seed=1))


def test_a_model_without_such_a_class_is_refused():
    small = BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, is_decoder=True)
    with pytest.raises(ConfigError, match="Bert"):
        to_score_model(BertLMHeadModel(small), pad_token_id=0, seed=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "mistral", "phi3", "gpt2", "gpt_neox"])
def test_families_have_a_head_whose_scores_are_the_same_when_stored(family, tmp_path):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    small = {"gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}}.get(family, {**SMALL, "head_dim": 8})
    kept = {"bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(family, **small, **kept)
    torch.manual_seed(0)
    model = to_score_model(AutoModelForCausalLM.from_config(config), pad_token_id=0, seed=1).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain_scores(again), plain_scores(model), atol=1e-6, rtol=0)


def test_the_loss_is_that_of_hand_arithmetic():
    scores, margin = torch.tensor([[2.0, 1.0], [0.5, 1.5]]), torch.tensor([0.25, 0.0])
    expected = [math.log(1 + math.exp(-0.75)) + 0.1 * 9, math.log(1 + math.exp(1.0)) + 0.1 * 4]
    assert pair_losses(scores, margin, center=0.1).tolist() == pytest.approx(expected)
    assert pair_losses(scores, None, center=0.0).tolist()[0] == pytest.approx(math.log(1 + math.exp(-1.0)))


def test_a_model_that_is_as_often_right_as_it_says_has_no_calibration_error():
    # Of 10,000 pairs with a chance of 0.75, 7,500 are right.
    ahead = torch.where(torch.arange(10_000) % 4 > 0, 1.0, -1.0).double() * math.log(3)
    found = describe_calibration(ahead, rows=range(10_000), seed=7)
    assert found["calibration_error"] < 0.02
    assert [line["from"] for line in found["calibration"]] == [0.2, 0.7]
    assert [line["predicted"] for line in found["calibration"]] == pytest.approx([0.25, 0.75])
    assert [line["observed"] for line in found["calibration"]] == pytest.approx([0.25, 0.75], abs=0.02)
    assert sum(line["n"] for line in found["calibration"]) == 10_000


def test_a_model_that_is_too_sure_has_the_difference_as_its_calibration_error():
    # It says 0.95 and is right 3 times in 5.
    ahead = torch.where(torch.arange(10_000) % 5 > 1, 1.0, -1.0).double() * math.log(19)
    assert describe_calibration(ahead, rows=range(10_000), seed=0)["calibration_error"] == pytest.approx(0.35, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__packing": True}, "train.packing: false"),
        ({"train__loss_head": "chunked"}, "train.loss_head: auto"),
        ({"tuning__backend": "unsloth"}, "tuning.backend: bnb"),
        ({"model__adapter": "some/adapter"}, "model.merge_adapter: true"),
    ],
)
def test_what_a_score_cannot_have_is_refused_with_what_to_write(changes, said, write_config):
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(task_mode="reward_model", **changes))
    assert said in str(caught.value)

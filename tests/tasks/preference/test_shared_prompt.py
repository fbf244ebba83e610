"""A prompt computed once for two completions: the same log-probabilities and gradients as two plain forward passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pair_rows import make_pairs
from plain_preference import sums_of
from preference_trainers import gradient_of, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)

from sftplay.tasks.preference import shared_prompt
from sftplay.tasks.preference.shared_prompt import (
    PairCollator,
    completion_logps,
    prove,
    put_chunked_logps,
)
from sftplay.train.micro_batches import watched_embeddings

SIZES: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
OTHER_SIZES: dict[str, Any] = {
    "vocab_size": 400, "n_layer": 2, "n_head": 4, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FULL = {"layer_types": ["full_attention"] * 2}

SHARING = {
    "llama": (LlamaConfig(**SIZES), "sdpa"),
    "llama by eager attention": (LlamaConfig(**SIZES), "eager"),
    "qwen3": (Qwen3Config(**SIZES, head_dim=8), "sdpa"),
    "mistral without a window": (MistralConfig(**SIZES, sliding_window=None), "sdpa"),
    "mixture of experts": (MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None), "sdpa"),
    "capped scores": (Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=3.0, **FULL), "eager"),
    "scaled scores": (CohereConfig(**SIZES, logit_scale=0.3), "sdpa"),
    "divided scores": (GraniteConfig(**SIZES, logits_scaling=4.0), "sdpa"),
    "learned positions": (GPT2Config(**OTHER_SIZES, n_embd=32, n_positions=64), "sdpa"),
}
APART = {
    "sliding windows": (MistralConfig(**SIZES, sliding_window=4), "sdpa"),
    "some sliding windows": (Gemma2Config(**SIZES, head_dim=8, sliding_window=4), "eager"),
    "state spaces": (MambaConfig(**{k: SIZES[k] for k in ("vocab_size", "hidden_size")}, num_hidden_layers=2), "eager"),
    "convolutions": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "sdpa"),
    "convolutions that are not told of": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "sdpa"),
    "positions by the mask": (BloomConfig(**OTHER_SIZES, hidden_size=32), "eager"),
}


def build(config: Any, attention: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", SHARING)
def test_a_shared_prompt_has_the_sums_and_gradients_of_plain_forward_passes(name: str):
    model, rows = build(*SHARING[name]), make_pairs(5)
    assert prove(model)
    plain = sums_of(model, rows)
    weights = torch.rand(5, 2, generator=torch.manual_seed(1))
    (plain * weights).sum().backward()
    expected = gradient_of(model)
    for shares in (True, False):
        model.zero_grad()
        found = completion_logps(model, PairCollator(0)(rows), shares=shares)
        assert found.sums.dtype == torch.float32
        assert torch.allclose(found.sums, plain, rtol=1e-5)
        (found.sums * weights).sum().backward()
        assert difference(gradient_of(model), expected) <= 1e-5


@pytest.mark.parametrize("name", APART)
def test_models_whose_answers_would_see_each_other_take_two_rows(name: str, monkeypatch: pytest.MonkeyPatch):
    model, rows = build(*APART[name]), make_pairs(5)
    if "not told" in name:  # the proof itself finds it
        monkeypatch.setattr(model.config, "layer_types", ["full_attention"] * 2)
    assert not prove(model)
    monkeypatch.undo()
    found = completion_logps(model, PairCollator(0)(rows), shares=False)
    plain = torch.cat([sums_of(model, [row]) for row in rows])
    assert torch.allclose(found.sums, plain, rtol=1e-4)


def test_a_model_that_counts_positions_itself_is_found_out(monkeypatch: pytest.MonkeyPatch):
    model = build(*SHARING["llama"])
    forward = type(model.model).forward

    def counting(self: Any, *given: Any, **named: Any) -> Any:
        named["position_ids"] = torch.arange(named["input_ids"].shape[1])[None]
        return forward(self, *given, **named)

    assert prove(model)
    monkeypatch.setattr(type(model.model), "forward", counting)
    assert not prove(model)


def test_no_completion_has_a_gradient_from_the_other_and_the_first_scores_come_from_the_prompt():
    model, rows = build(*SHARING["llama"]), make_pairs(4)
    batch = PairCollator(0)(rows)
    with watched_embeddings(model) as seen:
        sums = completion_logps(model, batch, shares=True).sums
        of_both = [torch.autograd.grad(sums[:, side].sum(), seen[0], retain_graph=True)[0] for side in (0, 1)]
    for n, row in enumerate(rows):
        prompt, end = row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
        assert of_both[0][n, :prompt].any()
        assert of_both[1][n, :prompt].any()
        assert not of_both[0][n, end:].any()
        assert not of_both[1][n, prompt:end].any()
        # A completion of one token is scored by the prompt alone.
        if len(row["input_ids"]) - end == 1:
            assert not of_both[1][n, prompt:].any()
    assert any(len(row["input_ids"]) - row["prompt_tokens"] - row["chosen_tokens"] > 1 for row in rows)


@pytest.mark.parametrize("name", ["capped scores", "scaled scores", "divided scores"])
def test_scores_in_chunks_have_the_sums_and_gradients_of_all_scores(name: str, monkeypatch: pytest.MonkeyPatch):
    model, rows = build(*SHARING[name]), make_pairs(5)
    batch = PairCollator(0)(rows)
    whole = completion_logps(model, batch, shares=True).sums
    whole.sum().backward()
    expected = gradient_of(model)
    model.zero_grad()
    monkeypatch.setattr(shared_prompt, "chunk_tokens", lambda *_: 7)
    put_chunked_logps(model)
    chunked = completion_logps(model, batch, shares=True).sums
    chunked.sum().backward()
    assert torch.allclose(chunked, whole, rtol=1e-6)
    assert difference(gradient_of(model), expected) <= 1e-5
    assert model(input_ids=batch["input_ids"]).logits.shape == (*batch["input_ids"].shape, 400)


def test_an_adapter_on_the_output_head_counts():
    model, rows = tiny_model(lora=True), make_pairs(4)
    before = completion_logps(model, PairCollator(0)(rows), shares=True).sums
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lm_head" in name and "lora_B" in name:
                weight.normal_()
    found = completion_logps(model, PairCollator(0)(rows), shares=True).sums
    assert torch.allclose(found, sums_of(model, rows), rtol=1e-5)
    assert not torch.allclose(found, before, rtol=1e-2)


def test_only_states_before_labels_reach_the_head_which_is_whole_again_afterwards():
    model, rows = build(*SHARING["llama"]), make_pairs(6)
    seen: list[int] = []
    model.lm_head.register_forward_hook(lambda _head, _given, out: seen.append(out.shape[:-1].numel()))
    labels = sum(label != -100 for row in rows for label in row["labels"])
    for shares in (True, False):
        completion_logps(model, PairCollator(0)(rows), shares=shares)
    ids = PairCollator(0)(rows)["input_ids"]
    model(input_ids=ids)
    assert seen == [labels, labels, ids.numel()]


def test_a_single_side_is_that_side_of_both():
    model, rows = build(*SHARING["llama"]), make_pairs(6)
    batch = PairCollator(0)(rows)
    both = completion_logps(model, batch, shares=False)
    for side, other, name in ((0, 1, "first"), (1, 0, "second")):
        found = completion_logps(model, batch, shares=True, sides=name)
        assert torch.allclose(found.sums[:, side], both.sums[:, side], rtol=1e-6)
        assert torch.equal(found.tokens[:, side], both.tokens[:, side])
        assert not found.sums[:, other].any()
        assert not found.tokens[:, other].any()


@pytest.mark.parametrize("shares", [True, False])
def test_rows_without_a_label_sum_to_0_and_still_reach_every_weight(shares: bool):
    model, rows = build(*SHARING["llama"]), make_pairs(3)
    for row in rows:
        row["labels"] = [-100] * len(row["labels"])
    found = completion_logps(model, PairCollator(0)(rows), shares=shares)
    assert not found.sums.any()
    assert not found.tokens.any()
    found.sums.sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_sums_of_scores_in_16_bits_are_taken_in_fp32():
    model, rows = build(*SHARING["llama"]), make_pairs(6)
    batch = PairCollator(0)(rows)
    exact = completion_logps(model, batch, shares=True).sums
    model.to(torch.bfloat16)
    found = completion_logps(model, batch, shares=True)
    assert found.sums.dtype == torch.float32
    assert torch.allclose(found.sums, exact, rtol=2e-2)
    found.sums.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.bfloat16

"""The loss in chunks is each family's own loss, with its gradients, and refuses models where it would not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Inputs, train
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from sftplay.errors import ConfigError
from sftplay.train import loss_heads as chunked_head
from sftplay.train.loss_heads import put_chunked_head

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi": {"partial_rotary_factor": 0.5},  # its head has a bias
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 8.0},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8},
}


def make_model(family: str) -> Any:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model


def loss_and_gradients(model: Any, **batch: Any) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 64, (3, 17), generator=torch.Generator().manual_seed(5))
    labels = ids.clone()
    labels[0, :9], labels[1, 4:] = -100, -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("counts", [False, True], ids=["mean", "sum over a count"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_loss_in_chunks_is_the_models_own(family: str, counts: bool, batch: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunked_head, "CHUNK_TOKENS", 7)
    model = make_model(family)
    given = {**batch, "num_items_in_batch": torch.tensor(11.0)} if counts else batch
    loss, gradients = loss_and_gradients(model, **given)
    put_chunked_head(model, proves=True)
    in_chunks, theirs = loss_and_gradients(model, **given)
    assert in_chunks == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(theirs, gradients, rtol=1e-4, atol=1e-6)
    assert model(input_ids=batch["input_ids"]).logits.shape == (3, 17, 64)


def test_rows_without_a_label_give_a_loss_of_zero_that_still_reaches_every_weight(batch: Any):
    model = make_model("llama")
    put_chunked_head(model, proves=True)
    loss, gradients = loss_and_gradients(model, **{**batch, "labels": torch.full((3, 17), -100)})
    assert loss == 0
    assert gradients.numel() == sum(p.numel() for p in model.parameters())
    assert not gradients.any()


def test_a_model_whose_loss_holds_more_than_its_scores_is_refused(monkeypatch: pytest.MonkeyPatch):
    model = make_model("llama")
    theirs = model.loss_function
    monkeypatch.setattr(model, "loss_function", lambda *args, **named: theirs(*args, **named) + 1.0)
    with pytest.raises(ConfigError, match="LlamaForCausalLM computes its loss from more than") as caught:
        put_chunked_head(model, proves=True)
    assert caught.value.fix == "write train.loss_head: standard"


def test_an_adapter_on_the_head_is_refused_because_its_pair_would_not_train():
    model = get_peft_model(make_model("llama"), LoraConfig(target_modules=["q_proj", "lm_head"]))
    with pytest.raises(ConfigError, match="the adapter has a pair on the output head"):
        put_chunked_head(model.get_base_model(), proves=True)


def test_a_model_that_adds_its_routers_loss_is_refused_even_where_nothing_can_be_proven():
    model = make_model("llama")
    model.config.output_router_logits = True
    with pytest.raises(ConfigError, match="loss of its router"):
        put_chunked_head(model, proves=False)


def test_scores_at_labels_alone_that_are_off_are_said_and_stand_in_the_plan(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def differ(_: Any) -> Any:
        raise ValueError("scores of another shape")

    monkeypatch.setattr(chunked_head, "proof_rows", differ)
    plan = train(tmp_path, inputs, train__max_steps=1).folder.read_json("plan.json")
    what = "scores are computed at every position, not only at labels: ValueError: scores of another shape"
    assert f"note: {what}" in capsys.readouterr().out
    assert plan["label_head_off"] == what.partition("labels: ")[2]
    assert what in plan["notes"]

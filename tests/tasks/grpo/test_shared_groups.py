"""A prompt is computed once for its completions: loss and gradient stay those of TRL's own rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from grpo_toy import grpo_trainer, letter_tokenizer, tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from trl import GRPOTrainer

from sftplay.errors import ConfigError
from sftplay.tasks.grpo.shared_groups import decide_sharing, join_rows, order_by_length, score_groups
from sftplay.train import shared_prompt
from sftplay.train.shared_prompt import layout_inputs, teach_attention
from sftplay.train.upstream import fitted_tiles

PROMPTS, COMPLETIONS = 7, 12
LENGTHS = ((7, 5), (7, 1), (7, 12), (1, 4), (1, 0), (3, 6), (7, 9), (4, 2))
"""Tokens of a row's prompt and completion. Rows with prompts of 7 tokens and of 1 token have the same ones."""


teach_attention()


class SharingTrainer(GRPOTrainer):
    """TRL's trainer with joined rows, where `sharing` says so."""

    sharing = ""

    def _get_per_token_logps_and_entropies(self, *given: Any, **named: Any) -> Any:
        with fitted_tiles(self.model.config.vocab_size):
            return score_groups(self, *given, **named) or super()._get_per_token_logps_and_entropies(*given, **named)


def make_trainer(folder: Any, model: Any = None, **named: Any) -> Any:
    return grpo_trainer(folder, rows=[{"prompt": "ab"}], kind=SharingTrainer, model=model or small_llama(), **named)


def small_llama(**changes: Any) -> Any:
    return tiny_llama(letter_tokenizer(), num_attention_heads=4, **changes)


def make_batch(vocab: int) -> dict[str, Any]:
    """A micro-batch with an older policy, a reference, and tokens that an environment wrote."""
    draw = torch.Generator().manual_seed(5)
    prompts, completions = torch.tensor(LENGTHS).split(1, 1)
    mask = (torch.arange(COMPLETIONS) < completions).long()
    prompt_mask = (torch.arange(PROMPTS) >= PROMPTS - prompts).long()
    same = torch.randint(3, vocab, (PROMPTS + 1, PROMPTS), generator=draw)[prompts.squeeze(1)]
    batch = {
        "prompt_ids": same * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(3, vocab, mask.shape, generator=draw) * mask,
        "completion_mask": mask,
        "advantages": torch.randn(len(LENGTHS), generator=draw),
        "tool_mask": (torch.rand(mask.shape, generator=draw) < 0.8).long(),
    }
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        batch[key] = (-4 + 0.3 * torch.randn(mask.shape, generator=draw)) * mask
    return {**batch, "num_items_in_batch": (mask * batch["tool_mask"]).sum()}


def compute_gradient(trainer: Any, batch: dict[str, Any], sharing: str) -> tuple[float, torch.Tensor]:
    trainer.sharing = sharing
    trainer.model.zero_grad(set_to_none=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), torch.cat(
        [each.grad.flatten() for each in trainer.model.parameters() if each.requires_grad]
    )


LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo", "delta": 1.6},
    {"loss_type": "dapo", "beta": 0.1},
    {"loss_type": "bnpo", "entropy_coef": 0.1, "beta": 0.1},
    {"loss_type": "cispo", "epsilon_high": 1.5},
    {"loss_type": "sapo", "temperature": 0.7},
    {"loss_type": "vespo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "luspo", "top_entropy_quantile": 0.5},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.1},
    {"loss_type": "dapo", "importance_sampling_level": "sequence", "beta": 0.1},
]


@pytest.mark.parametrize("named", LOSSES, ids=lambda named: " ".join(map(str, named.values())))
def test_loss_and_gradient_are_those_of_a_prompt_in_each_row(tmp_path, named):
    model = small_llama(num_key_value_heads=2)
    if named.get("beta"):
        model.save_pretrained(tmp_path / "model")  # TRL loads its reference model by name
        model = type(model).from_pretrained(tmp_path / "model")
    trainer = make_trainer(tmp_path, model.double(), **named)
    for left_out in ("old_per_token_logps", "tool_mask"):
        batch = make_batch(model.config.vocab_size)
        del batch[left_out]
        (expected, gradient), (got, other) = (compute_gradient(trainer, batch, sharing) for sharing in ("", "always"))
        assert gradient.any()
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert float((other - gradient).norm() / gradient.norm()) < 1e-6


def test_an_adapter_with_recomputed_layers_gets_the_same_gradient(tmp_path):
    model = get_peft_model(small_llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    trainer = make_trainer(tmp_path, model)
    trainer.model.activation_checkpointing_enable()
    batch = make_batch(model.config.vocab_size)
    layers = count_calls(model.base_model.model.model.layers[0].mlp)
    (_, gradient), (_, other) = (compute_gradient(trainer, batch, sharing) for sharing in ("", "always"))
    assert len(layers) == 4  # twice in each pass
    assert float((other - gradient).norm() / gradient.norm()) < 1e-6


def count_calls(module: Any) -> list[torch.Size]:
    """Return a list that gets the shape of what enters the module from now on."""
    shapes: list[torch.Size] = []
    module.register_forward_pre_hook(lambda _, given: shapes.append(given[0].shape))
    return shapes


def test_states_are_those_of_a_row_for_each_completion_in_float64():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = GPTNeoXModel(GPTNeoXConfig(vocab_size=64, **shape)).double().eval()  # its norms compute in float64
    batch = make_batch(64)
    ids, mask = (torch.cat([batch[f"prompt_{key}"], batch[f"completion_{key}"]], dim=1) for key in ("ids", "mask"))
    joined = join_rows(ids, mask, COMPLETIONS)
    with torch.no_grad():
        found = model(**layout_inputs(joined.layout, joined.ids), use_cache=False).last_hidden_state[0]
        places = (mask.cumsum(1) - 1).clamp(min=0)
        rows = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).last_hidden_state
    before = rows[:, PROMPTS - 1 : -1].reshape(-1, rows.shape[-1])[joined.cells]
    torch.testing.assert_close(found[joined.labels != -100], before, rtol=1e-12, atol=1e-12)


def test_a_micro_batch_computes_each_prompt_once_and_no_padding(tmp_path):
    trainer = make_trainer(tmp_path)
    shapes = count_calls(trainer.model.model.layers[0].mlp)
    batch = make_batch(trainer.model.config.vocab_size)
    compute_gradient(trainer, batch, "always")
    prompts = 7 + 1 + 3 + 4  # each without its last token, which begins every completion
    assert shapes == [(1, prompts - 4 + sum(length for _, length in LENGTHS), 32)]
    compute_gradient(trainer, batch, "cheaper")
    assert shapes[1] == shapes[0]
    alone = {key: value[:1] if value.ndim else value for key, value in trim(batch).items()}
    compute_gradient(trainer, alone, "cheaper")  # 12 tokens in a row are not cheaper joined
    assert shapes[2] == (1, 12, 32)


def trim(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with as many columns as its first row has tokens."""
    return {
        key: value[:, : LENGTHS[0][1]] if value.ndim == 2 and value.shape[1] == COMPLETIONS else value
        for key, value in batch.items()
    }


def test_a_micro_batch_without_a_token_to_learn_from_still_reaches_every_weight(tmp_path):
    trainer = make_trainer(tmp_path, loss_type="dr_grpo")
    batch = make_batch(trainer.model.config.vocab_size)
    batch["completion_mask"].zero_()
    loss, gradient = compute_gradient(trainer, batch, "always")
    assert loss == 0
    assert len(gradient) == sum(weight.numel() for weight in trainer.model.parameters())
    assert not gradient.any()


def decide(trainer: Any, wanted: Any) -> str:
    return decide_sharing(trainer, SimpleNamespace(grpo=SimpleNamespace(share_prompts=wanted)))


def test_a_proof_with_the_weights_decides(tmp_path, capsys, monkeypatch):
    trainer = make_trainer(tmp_path)
    assert [decide(trainer, wanted) for wanted in (False, "auto", True)] == ["", "cheaper", "always"]
    assert "note" not in capsys.readouterr().out
    monkeypatch.setattr(shared_prompt.PromptLayout, "mask", property(see_all))
    assert decide(trainer, "auto") == ""
    assert "each completion has a prompt of its own" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="other probabilities"):
        decide(trainer, True)


def see_all(layout: Any) -> torch.Tensor:
    """A mask under which a completion sees what follows."""
    return torch.ones(1, 1, layout.answer_width, layout.prompt_width + layout.answer_width, dtype=torch.bool)


@pytest.mark.parametrize("kind", ["sliding window", "learned positions", "eager attention"])
def test_a_model_that_cannot_compute_a_prompt_once_is_named(tmp_path, capsys, kind):
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "learned positions":
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    elif kind == "sliding window":
        model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, intermediate_size=16))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=16, attn_implementation="eager"))
    trainer = make_trainer(tmp_path, model)
    assert decide(trainer, "auto") == ""
    assert "cannot compute a prompt once" in capsys.readouterr().out


def test_completions_of_a_prompt_come_into_one_micro_batch_where_that_is_cheaper():
    rows = torch.arange(16)
    shuffled = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    prompt = rows // 4 + 3
    whole = {
        "prompt_ids": prompt[:, None].expand(-1, 20), "prompt_mask": torch.ones(16, 20, dtype=torch.long),
        "completion_ids": torch.ones(16, 6, dtype=torch.long), "advantages": rows.float(),
        "completion_mask": (torch.arange(6) < (rows % 6 + 1)[:, None]).long(),
    }  # fmt: skip
    batches = [{key: value[part] for key, value in whole.items()} for part in shuffled.split(4)]
    ordered = order_by_length(batches, accum=4, trims_prompts=True, sharing="cheaper")
    assert [len(set(batch["prompt_ids"][:, 0].tolist())) for batch in ordered] == [1] * 4
    assert sorted(float(row) for batch in ordered for row in batch["advantages"]) == rows.tolist()
    plain = order_by_length(batches, accum=4, trims_prompts=True)
    assert any(len(set(batch["prompt_ids"][:, 0].tolist())) > 1 for batch in plain)


@pytest.mark.parametrize("bits", ["weights", "autocast"])
def test_a_proof_in_16_bits_allows_for_rounding_and_not_for_another_place(tmp_path, monkeypatch, bits):
    model = small_llama(num_hidden_layers=8, hidden_size=64, intermediate_size=128)
    trainer = make_trainer(tmp_path, model)
    if bits == "weights":
        model.to(torch.bfloat16)
    else:
        monkeypatch.setattr(trainer.accelerator.state, "_mixed_precision", "bf16")
    assert decide(trainer, "auto") == "cheaper"
    monkeypatch.setattr(shared_prompt.PromptLayout, "mask", property(see_all))
    assert decide(trainer, "auto") == ""

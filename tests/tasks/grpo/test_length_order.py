"""Rows as the trainer gets them, and in another order: the loss and its gradient stay TRL's."""

from __future__ import annotations

import json
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from grpo_toy import grpo_trainer, letter_tokenizer, tiny_llama
from trl.kernels import chunked_logprob
from trl.trainer import utils

from sftplay.data.load_prompts import Questions
from sftplay.tasks.grpo.sampling import PromptRows
from sftplay.tasks.grpo.shared_groups import depends_on_cut, has_relative_positions, order_by_length
from sftplay.train.upstream import fitted_tiles

ROWS, ACCUM = 4, 4


def compute_padding_share(batches: Any) -> float:
    real = sum(int(batch["prompt_mask"].sum() + batch["completion_mask"].sum()) for batch in batches)
    return 1 - real / sum(batch["prompt_mask"].numel() + batch["completion_mask"].numel() for batch in batches)


def make_batches(vocab: int, *, batches: int = ACCUM, extra: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Micro-batches as TRL buffers them: prompts padded on the left, completions on the right, to one common width."""
    draw = torch.Generator().manual_seed(5)
    made = []
    n_items = torch.tensor(0)
    for _ in range(batches):
        prompt_lengths = torch.randint(2, 10, (ROWS, 1), generator=draw)
        lengths = torch.randint(1, 13, (ROWS, 1), generator=draw)
        places = torch.arange(12)
        batch = {
            "prompt_ids": torch.randint(3, vocab, (ROWS, 10), generator=draw),
            "prompt_mask": (torch.arange(10) >= 10 - prompt_lengths).long(),
            "completion_ids": torch.randint(3, vocab, (ROWS, 12), generator=draw),
            "completion_mask": (places < lengths).long(),
            "advantages": torch.randn(ROWS, generator=draw),
        }
        batch["prompt_ids"] = batch["prompt_ids"] * batch["prompt_mask"]
        batch["completion_ids"] = batch["completion_ids"] * batch["completion_mask"]
        for key in extra:
            # An older policy and a reference: numbers near those of the tiny model, so that some ratios are clipped.
            batch[key] = (-4 + 0.3 * torch.randn(ROWS, 12, generator=draw)) * batch["completion_mask"]
        n_items = n_items + batch["completion_mask"].sum()
        made.append(batch)
    return [{**batch, "num_items_in_batch": n_items} for batch in made]


def loss_and_gradient(trainer: Any, batches: list[dict[str, Any]]) -> tuple[float, torch.Tensor]:
    """What the trainer computes for one optimizer step."""
    trainer.model.zero_grad(set_to_none=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = len(batches)
    total = 0.0
    for batch in batches:
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([each.grad.flatten() for each in trainer.model.parameters()]).double()


LOSSES = [
    {"loss_type": "grpo"},
    {"loss_type": "dr_grpo", "delta": 1.6},
    {"loss_type": "dapo", "beta": 0.1},
    {"loss_type": "cispo", "epsilon_high": 1.5},
    {"loss_type": "sapo"},
    {"loss_type": "vespo"},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.1},
]


@pytest.mark.parametrize(("on_policy", "named"), [(True, LOSSES[0]), *((False, each) for each in LOSSES)])
def test_loss_and_gradient_of_a_step_are_those_of_trls_own_order(tmp_path, on_policy, named):
    trainer = grpo_trainer(
        tmp_path, rows=[{"prompt": "ab"}] * 4, per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUM, **named,
        **({"model": saved_model(tmp_path)} if named.get("beta") else {}),
    )  # fmt: skip
    keys = (() if on_policy else ("old_per_token_logps",)) + (("ref_per_token_logps",) if named.get("beta") else ())
    batches = make_batches(trainer.model.config.vocab_size, extra=keys)
    ordered = order_by_length(batches, accum=ACCUM, trims_prompts=True)

    assert not depends_on_cut(trainer)
    assert compute_padding_share(ordered) < 0.6 * compute_padding_share(batches)
    expected, gradient = loss_and_gradient(trainer, batches)
    got, other = loss_and_gradient(trainer, ordered)
    assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert float((other - gradient).norm() / gradient.norm()) < 1e-5


def saved_model(tmp_path):
    """A folder, as TRL loads its reference model by name."""
    model = tiny_llama(letter_tokenizer())
    model.save_pretrained(tmp_path / "model")
    return type(model).from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("named", "part"),
    [
        ({"loss_type": "bnpo"}, "bnpo"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile"),
        ({"entropy_coef": 0.01}, "entropy bonus"),
    ],
)
def test_a_loss_that_the_cut_changes_is_named_and_really_changes(tmp_path, named, part):
    trainer = grpo_trainer(
        tmp_path, rows=[{"prompt": "ab"}] * 4, per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=ACCUM, **named,
    )  # fmt: skip
    batches = make_batches(trainer.model.config.vocab_size)
    _, gradient = loss_and_gradient(trainer, batches)
    _, other = loss_and_gradient(trainer, order_by_length(batches, accum=ACCUM, trims_prompts=True))

    assert part in depends_on_cut(trainer)
    assert float((other - gradient).norm() / gradient.norm()) > 1e-3


def test_rows_stay_in_their_optimizer_step_and_all_their_columns_move_together():
    batches = make_batches(40, batches=4, extra=("old_per_token_logps",))
    for number, batch in enumerate(batches):
        batch["advantages"] = torch.arange(ROWS) + 10.0 * number
    ordered = order_by_length(batches, accum=2, trims_prompts=True)

    def rows(chosen):
        return {
            float(batch["advantages"][n]): tuple(
                batch[key][n][batch[mask][n].bool()].tolist()
                for key, mask in (
                    ("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"),
                    ("old_per_token_logps", "completion_mask"),
                )
            )
            for batch in chosen
            for n in range(ROWS)
        }  # fmt: skip

    assert rows(ordered[:2]) == rows(batches[:2])
    assert rows(ordered[2:]) == rows(batches[2:])
    widths = [batch["completion_ids"].size(1) for batch in ordered]
    assert widths[0] >= widths[1]


def test_a_model_with_learned_places_keeps_the_padding_before_its_prompts():
    from transformers import GPT2Config, GPT2LMHeadModel

    learned = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    assert not has_relative_positions(learned)
    assert has_relative_positions(tiny_llama(letter_tokenizer()))
    batches = make_batches(40)
    kept = order_by_length(batches, accum=ACCUM, trims_prompts=False)
    assert {batch["prompt_ids"].size(1) for batch in kept} == {10}
    assert min(batch["completion_ids"].size(1) for batch in kept) < 12


def test_rows_go_to_the_trainer_as_they_are_and_each_is_read_once():
    content = [json.dumps({"question": f"q{n}", "columns": {"tests": [f"t{n}"]}}) for n in range(3)]
    questions = Questions(Dataset.from_dict({"row": [4, 5, 6], "input_ids": [[1], [2], [3]], "content": content}))
    rows = PromptRows(questions, [2, 0])
    batch = [rows[0], rows[0], rows[1]]
    assert all(sent is row for sent, row in zip(send_to_device(batch, torch.device("cpu")), batch, strict=True))
    expected = {"prompt": [3], "row": 6, "question": "q2", "columns": {"tests": ["t2"]}}
    assert batch[0] == batch[1] == expected
    copied = deepcopy(batch[0]["prompt"])
    assert copied == [3]
    assert copied is not batch[0]["prompt"] is not batch[1]["prompt"]
    questions.rows = None  # nothing more is read
    assert rows[0] == expected
    with pytest.raises(TypeError):
        PromptRows(questions)[1]


def test_scores_of_prompts_and_padding_are_not_computed_and_the_others_are_trls(monkeypatch: pytest.MonkeyPatch):
    tokenizer = letter_tokenizer()
    tiles: list[tuple[int, int]] = []
    real = chunked_logprob._forward_tile

    def noted(tile: torch.Tensor, stride: int, *given: Any, **named: Any) -> None:
        tiles.append((len(tile), stride))
        real(tile, stride, *given, **named)

    monkeypatch.setattr(chunked_logprob, "_forward_tile", noted)
    ids = torch.randint(3, len(tokenizer), (4, 9), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 6:] = -100
    seen = []
    for spared in (nullcontext(), fitted_tiles(len(tokenizer))):
        model = utils.add_fused_lm_head(fresh := tiny_llama(tokenizer)) or fresh
        with spared:
            found = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (found.log_probs * torch.linspace(-1, 1, 8)).sum().backward()
        seen.append((found.log_probs.detach(), {name: each.grad for name, each in model.named_parameters()}))
    assert tiles == [(4 * 8, 32_768), (4 * 5 - 3, len(tokenizer))]
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == 32_768
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-5, atol=1e-6)

"""Blocks of documents in a step: gradients and losses are those of each document alone, in plain transformers."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Inputs, built
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, LlamaConfig, MambaConfig

from sftplay.errors import ConfigError
from sftplay.train.micro_batches import Collator, HeldOutBlocks, MicroBatcher, can_compute, check_isolation
from sftplay.train.observer import StepCounts
from sftplay.train.upstream import find_attention

PAD, VOCAB = 0, 400
BLOCKS = [(0, [9, 1, 14]), (1, [24]), (0, [5, 5, 5, 8]), (0, [23]), (1, [3, 18]), (0, [2, 1, 1, 20])]
"""Source of each block, and the tokens of the documents in it."""


def make_blocks() -> list[dict[str, Any]]:
    rng = random.Random(5)
    blocks = []
    for number, (source, lengths) in enumerate(BLOCKS):
        documents = [[rng.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
        blocks.append(
            {
                "input_ids": np.array([token for ids in documents for token in ids]),
                "labels": np.array([token for ids in documents for token in [-100, *ids[1:]]]),
                "position_ids": np.array([place for ids in documents for place in range(len(ids))]),
                "row": source << 40 | number,
                "source": source,
            }
        )
    return blocks


def documents_of(block: dict[str, Any]) -> list[list[int]]:
    """The documents of a block, each as its token ids."""
    starts = [*np.flatnonzero(block["position_ids"] == 0), len(block["input_ids"])]
    return [block["input_ids"][a:b].tolist() for a, b in pairwise(starts)]


def losses_alone(model: Any, block: dict[str, Any]) -> torch.Tensor:
    """The losses of a block's tokens, each document in a row of its own: position t predicts token t + 1."""
    losses = []
    for ids in documents_of(block):
        scores = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        losses.append(functional.cross_entropy(scores, torch.tensor(ids[1:], dtype=torch.int64), reduction="none"))
    return torch.cat(losses)


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Losses of each source's label tokens, and the gradient of the mean over all of them."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    blocks = make_blocks()
    losses = {
        source: torch.cat([losses_alone(model, block) for block in blocks if block["source"] == source])
        for source in (0, 1)
    }
    torch.cat(list(losses.values())).mean().backward()
    return {source: each.detach() for source, each in losses.items()}, gradients(model)


@pytest.fixture(scope="module")
def trainers(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A trainer that trains every weight in fp64, by its loss head."""
    made: dict[str, Any] = {}

    def trainer_with(head: str) -> Any:
        if head not in made:
            home = tmp_path_factory.mktemp(head)
            made[head] = built(home, inputs, tuning__mode="full", train__loss_head=head, data__split=None).trainer
            made[head].model.double()
            made[head].source_names = ("domain", "chat")
            made[head]._source_sums = torch.zeros(2, 2, dtype=torch.float64)
        return made[head]

    return trainer_with


def step(trainer: Any, micro_batcher: MicroBatcher) -> tuple[float, torch.Tensor]:
    trainer.micro_batcher, trainer.counts = micro_batcher, StepCounts()
    trainer.model.zero_grad()
    windows, count = trainer.get_batch_samples(iter([Collator(PAD)(make_blocks())]), 1, torch.device("cpu"))
    loss = trainer.training_step(trainer.model, windows[0], count)
    return float(loss), gradients(trainer.model)


@pytest.mark.parametrize("head", ["standard", "chunked"])
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("flat", [False, True], ids=["rows", "one row as for flash attention"])
def test_a_window_of_blocks_has_the_gradient_of_its_documents_one_by_one(
    rows: int, head: str, flat: bool, trainers: Callable[[str], Any], alone: Any, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainers(head)
    monkeypatch.setattr(trainer, "_wants_one_row", flat)
    loss, actual = step(trainer, MicroBatcher(rows))
    losses, expected = alone
    assert loss == pytest.approx(float(torch.cat(list(losses.values())).mean()), rel=1e-6)
    assert float((actual - expected).norm() / expected.norm()) <= 1e-6


def test_tokens_and_losses_are_counted_by_source(trainers: Callable[[str], Any], alone: Any):
    trainer = trainers("standard")
    step(trainer, MicroBatcher(4))
    counts, (losses, _) = trainer.take_counts(), alone
    assert set(counts.sources) == {0, 1}
    for source, found in counts.sources.items():
        blocks = [block for block in make_blocks() if block["source"] == source]
        assert found.tokens == sum(len(block["input_ids"]) for block in blocks)
        assert found.label_tokens == len(losses[source])
        assert float(found.loss_sum) == pytest.approx(float(losses[source].sum()), rel=1e-6)
    assert counts.rows == [block["row"] for block in make_blocks()]
    assert float(counts.loss_sum) == pytest.approx(sum(float(each.sum()) for each in losses.values()), rel=1e-6)


def test_a_window_that_runs_out_of_memory_counts_no_loss_twice(
    trainers: Callable[[str], Any], alone: Any, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainers("standard")
    real, failed = trainer._run_micro_batch, []

    def run(model: Any, micro_batch: Any, *, n_items: Any) -> Any:
        if int(micro_batch["source"]) == 1 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(model, micro_batch, n_items=n_items)

    monkeypatch.setattr(trainer, "_run_micro_batch", run)
    _, actual = step(trainer, MicroBatcher(3))
    counts, (losses, expected) = trainer.take_counts(), alone
    assert failed
    assert trainer.micro_batcher.micro_batch < 3
    assert float((actual - expected).norm() / expected.norm()) <= 1e-6
    for source, found in counts.sources.items():
        assert float(found.loss_sum) == pytest.approx(float(losses[source].sum()), rel=1e-6)


def test_held_out_blocks_are_measured_by_source_and_together(
    trainers: Callable[[str], Any], alone: Any, monkeypatch: pytest.MonkeyPatch
):
    trainer, (losses, _) = trainers("standard"), alone
    blocks = make_blocks()
    held_out = HeldOutBlocks([[block for block in blocks if block["source"] == source] for source in (0, 1)])
    padded = held_out.padded_to(8)
    assert (len(held_out), len(padded)) == (6, 8)
    assert held_out.label_tokens == padded.label_tokens == sum(map(len, losses.values()))
    monkeypatch.setattr(trainer, "held_out_labels_per_row", padded.label_tokens / len(padded))
    monkeypatch.setattr(trainer.args, "per_device_eval_batch_size", 4)
    metrics = trainer.evaluate(padded)
    assert metrics["eval_loss"] == pytest.approx(float(torch.cat(list(losses.values())).mean()), rel=1e-6)
    for source, name in enumerate(trainer.source_names):
        expected = float(losses[source].mean())
        assert metrics[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-6)
        assert trainer.held_out_sources[name] == {
            "loss": pytest.approx(expected, rel=1e-6),
            "label_tokens": len(losses[source]),
        }


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def test_a_model_whose_attention_follows_positions_passes_the_proof():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_attention_heads=4, intermediate_size=64))
    assert model.train().training
    check_isolation(model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "config",
    [MambaConfig(**SIZES, state_size=8), BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)],
    ids=["state space", "attention without positions"],
)
def test_a_model_that_carries_one_document_into_the_next_is_refused(config: Any):
    with pytest.raises(ConfigError, match="lets each document of a block see the ones before it") as caught:
        check_isolation(AutoModelForCausalLM.from_config(config))
    assert "cpt.cross_document: true" in caught.value.fix


def test_a_process_without_the_weights_proves_nothing():
    config = LlamaConfig(**SIZES, num_attention_heads=4, intermediate_size=64)
    model = AutoModelForCausalLM.from_config(config)
    assert can_compute(model)
    assert not can_compute(model.to("meta"))
    flash = AutoModelForCausalLM.from_config(config)
    flash.config._attn_implementation = "flash_attention_2"
    assert "flash" in find_attention(flash)
    assert not can_compute(flash)  # on a CPU

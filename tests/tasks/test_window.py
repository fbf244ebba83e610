"""A step's gradients do not depend on how its window is cut; compared with plain torch, one row at a time."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process import Inputs, built, train
from plain_loss import label_losses
from transformers import AutoModelForCausalLM

from sftplay.train.loss_heads import prove_label_head
from sftplay.train.micro_batches import Collator, MicroBatcher, first_fit
from sftplay.train.train_run import pad_to_multiple

PAD = 0
LABELS = [1, 40, 2, 17, 1, 3, 60, 5]
"""Label tokens of the eight rows of the window all cuts must agree on."""


def make_rows(counts: list[int] = LABELS) -> list[dict[str, Any]]:
    rng = random.Random(3)
    rows = []
    for n, count in enumerate(counts):
        prompt = [rng.randrange(3, 400) for _ in range(rng.randint(1, 20))]
        answer = [rng.randrange(3, 400) for _ in range(count)]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer, "row": n})
    return rows


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def reference(tiny_llama: Path) -> tuple[float, torch.Tensor]:
    """Loss and gradients of the window: the sum over all label tokens divided by their number."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    losses = torch.cat([label_losses(model, row) for row in make_rows()])
    assert len(losses) == sum(LABELS)
    loss = losses.sum() / sum(LABELS)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.fixture(scope="module")
def trainers(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One trainer a loss head, training every weight in fp64, so that only the cut can make a difference."""
    made = {}
    for head in ("standard", "chunked"):
        home = tmp_path_factory.mktemp(head)
        trainer = built(home, inputs, tuning__mode="full", train__loss_head=head, data__split=None).trainer
        trainer.model.double()
        made[head] = trainer
    return made


def step(trainer: Any, micro_batcher: MicroBatcher, rows: list[dict[str, Any]]) -> tuple[float, torch.Tensor]:
    trainer.micro_batcher = micro_batcher
    trainer.model.zero_grad()
    windows, count = trainer.get_batch_samples(iter([Collator(PAD)(rows)]), 1, torch.device("cpu"))
    loss = trainer.training_step(trainer.model, windows[0], count)
    return float(loss), gradients(trainer.model)


@pytest.mark.parametrize("head", ["standard", "chunked"])
@pytest.mark.parametrize(
    "micro_batcher",
    [
        MicroBatcher(8),
        MicroBatcher(1),
        MicroBatcher(3),
        MicroBatcher(1, packs=True, max_tokens=128),
        MicroBatcher(2, packs=True, max_tokens=90),
        MicroBatcher(1, budget_tokens=90),
    ],
    ids=["one micro-batch", "single rows", "threes", "packed", "packed in pairs", "by tokens"],
)
def test_gradients_of_a_window_are_those_of_all_its_label_tokens_however_it_is_cut(
    micro_batcher: MicroBatcher, head: str, trainers: dict[str, Any], reference: tuple[float, torch.Tensor]
):
    loss, actual = step(trainers[head], micro_batcher, make_rows())
    assert loss == pytest.approx(reference[0], rel=1e-6)
    assert difference(actual, reference[1]) <= 1e-6


def test_loss_of_a_first_token_counts_neither_alone_nor_behind_another_row(trainers: dict[str, Any], tiny_llama: Path):
    rows = [{**row, "labels": list(row["input_ids"])} for row in make_rows([3, 4, 5])]
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    losses = torch.cat([label_losses(model, row) for row in rows])
    assert len(losses) == sum(len(row["input_ids"]) - 1 for row in rows)
    losses.mean().backward()
    for micro_batcher in (MicroBatcher(3), MicroBatcher(1, packs=True, max_tokens=128)):
        loss, actual = step(trainers["standard"], micro_batcher, rows)
        assert loss == pytest.approx(losses.mean().item(), rel=1e-6)
        assert difference(actual, gradients(model)) <= 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_packing_never_overfills_and_holds_every_row_once(seed: int):
    rng = random.Random(seed)
    room = rng.randint(20, 128)
    lengths = [rng.randint(1, room) for _ in range(rng.randint(1, 60))]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups = first_fit(lengths, order, room=room)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    assert max(sum(lengths[row] for row in group) for group in groups) <= room
    assert first_fit([3, 12, 4], [1, 2, 0], room=10) == [[1], [2, 0]]  # too long: a group of its own
    rows = [{"input_ids": [i + 1] * n, "labels": [i + 1] * n, "row": i} for i, n in enumerate(lengths)]
    micro_batches = list(MicroBatcher(3, packs=True, max_tokens=room).cut(Collator(PAD)(rows)))
    assert max(micro_batch["input_ids"].shape[1] for micro_batch in micro_batches) <= room
    held = torch.cat([micro_batch["input_ids"].flatten() for micro_batch in micro_batches])
    assert [int((held == i + 1).sum()) for i in range(len(lengths))] == lengths


def fewest_groups(lengths: list[int], room: int) -> int:
    """The true minimum, by trying every first group that holds the first row."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = len(lengths)
    for size in range(len(rest) + 1):
        for chosen in combinations(range(len(rest)), size):
            if first + sum(rest[i] for i in chosen) <= room:
                left = [length for i, length in enumerate(rest) if i not in chosen]
                best = min(best, 1 + fewest_groups(left, room))
    return best


@given(st.lists(st.integers(1, 10), min_size=7, max_size=7))
def test_packing_stays_within_johnsons_bound_of_the_minimum(lengths: list[int]):
    lengths.sort(reverse=True)
    assert len(first_fit(lengths, range(len(lengths)), room=10)) <= 11 / 9 * fewest_groups(lengths, 10) + 1


@given(st.lists(st.integers(1, 48), min_size=1, max_size=40), st.integers(1, 300))
def test_pieces_by_tokens_stay_within_their_budget_and_hold_every_row_once(lengths: list[int], budget: int):
    rows = [{"input_ids": [i + 1] * n, "labels": [i + 1] * n, "row": i} for i, n in enumerate(lengths)]
    micro_batches = list(MicroBatcher(1, budget_tokens=budget).cut(Collator(PAD)(rows)))
    for micro_batch in micro_batches:
        count, width = micro_batch["input_ids"].shape
        assert count * width <= budget or count == 1
        assert width == int(micro_batch["attention_mask"].sum(1).max())
    held = torch.cat([micro_batch["input_ids"].flatten() for micro_batch in micro_batches])
    assert [int((held == i + 1).sum()) for i in range(len(lengths))] == lengths
    # As few as can be in this order: no micro-batch could have taken the first row of the next one.
    for micro_batch in micro_batches[:-1]:
        count, width = micro_batch["input_ids"].shape
        assert (count + 1) * width > budget


def test_batches_by_tokens_train_to_the_weights_of_batches_by_examples_with_less_work(inputs: Inputs, tmp_path: Path):
    runs = [
        train(tmp_path / kind, inputs, train__batching=kind, train__batch_size=batch, tuning__mode="full",
              train__optim="sgd", train__max_steps=3, train__max_grad_norm=0.0)
        for kind, batch in (("examples", 8), ("tokens", 1))
    ]  # fmt: skip
    weights = [torch.cat([p.detach().flatten() for p in run.trainer.model.parameters()]) for run in runs]
    assert float((weights[0] - weights[1]).abs().max()) <= 1e-6
    start = AutoModelForCausalLM.from_pretrained(inputs.model)
    assert float((torch.cat([p.detach().flatten() for p in start.parameters()]) - weights[0]).abs().max()) > 1e-4
    assert [line["row_ids"] for line in runs[0].metrics] == [line["row_ids"] for line in runs[1].metrics]
    padding = [[line["padding_share"] for line in run.metrics] for run in runs]
    assert all(by_tokens < by_examples for by_examples, by_tokens in zip(*padding, strict=True))


def test_scores_at_labelled_positions_alone_give_the_loss_and_gradients_of_all_scores(tiny_llama: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    window = Collator(PAD)(make_rows())
    inputs = {key: window[key] for key in ("input_ids", "attention_mask", "labels")}
    whole = model(**inputs)
    whole.loss.backward()
    expected = gradients(model)
    model.zero_grad()
    head = prove_label_head(model)[0]
    part = model(**inputs, shift_labels=head.narrow(inputs["labels"]))
    part.loss.backward()
    assert part.logits.shape[1] == sum(LABELS) < whole.logits.shape[0] * whole.logits.shape[1]
    assert part.loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    assert difference(gradients(model), expected) <= 1e-6
    head.widen()
    assert model(input_ids=window["input_ids"]).logits.shape == whole.logits.shape


@pytest.mark.parametrize("head", ["standard", "chunked"])
def test_held_out_loss_in_training_is_the_mean_over_label_tokens(
    head: str, trainers: dict[str, Any], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)
    trainer = trainers[head]
    with torch.no_grad():
        losses = torch.cat([label_losses(model, row) for row in trainer.eval_dataset])
    per_row = [len([label for label in row["labels"] if label != -100]) for row in trainer.eval_dataset]
    assert max(per_row) > 3 * min(per_row)
    # The last batch is short: 12 rows in batches of 8.
    monkeypatch.setattr(trainer.args, "per_device_eval_batch_size", 8)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    # Rows without a label, which make the batches of several processes even, weigh nothing.
    padded = pad_to_multiple(trainer.eval_dataset, 16)
    assert len(padded) == 16
    monkeypatch.setattr(trainer, "held_out_labels_per_row", len(losses) / 16)
    assert trainer.evaluate(padded)["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-6)

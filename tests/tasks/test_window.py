"""A step's gradients do not depend on how its window is cut; compared with plain torch, row by row."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process import Inputs, built, train
from plain_loss import label_losses
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3_5TextConfig,
)

from sftplay.errors import ConfigError
from sftplay.train import exact_batch
from sftplay.train.loss_heads import prove_label_head
from sftplay.train.metrics import StepCounts
from sftplay.train.micro_batches import (
    Collator,
    HeldOutBlocks,
    MicroBatcher,
    check_isolation,
    first_fit,
    ignores_padding,
    needs_no_mask,
    on_device,
)
from sftplay.train.train_run import pad_to_multiple

PAD, VOCAB = 0, 400
LABELS = [1, 40, 2, 17, 1, 3, 60, 5]
"""Label tokens of the eight rows of the window all cuts must agree on."""

BLOCKS = [(0, [9, 1, 14]), (1, [24]), (0, [5, 5, 5, 8]), (0, [23]), (1, [3, 18]), (0, [2, 1, 1, 20])]
"""Source of each block, and the tokens of the documents in it."""


def make_rows(counts: list[int] = LABELS) -> list[dict[str, Any]]:
    rng = random.Random(3)
    rows = []
    for n, count in enumerate(counts):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 20))]
        answer = [rng.randrange(3, VOCAB) for _ in range(count)]
        rows.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer, "row": n})
    return rows


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


def losses_alone(model: Any, block: dict[str, Any]) -> torch.Tensor:
    """The losses of a block's tokens, each document in a row of its own."""
    starts = [*np.flatnonzero(block["position_ids"] == 0), len(block["input_ids"])]
    documents = [block["input_ids"][a:b].tolist() for a, b in pairwise(starts)]
    return torch.cat([label_losses(model, {"input_ids": ids, "labels": ids}) for ids in documents if len(ids) > 1])


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None])


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


@pytest.fixture
def plain(tiny_llama: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float64)


@pytest.fixture(scope="module")
def trainers(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A trainer that trains every weight in fp64, by its loss head: only the cut can make a difference."""
    made: dict[str, Any] = {}

    def trainer_with(head: str, smoothing: float = 0.0) -> Any:
        key = f"{head} {smoothing}"
        if key not in made:
            extra = {"label_smoothing_factor": smoothing} if smoothing else {}
            made[key] = built(
                tmp_path_factory.mktemp(head), inputs, tuning__mode="full", train__loss_head=head, data__split=None,
                train__extra=extra,
            ).trainer  # fmt: skip
            made[key].model.double()
            made[key].source_names = ("domain", "chat")
            made[key]._source_sums = torch.zeros(2, 2, dtype=torch.float64)
        return made[key]

    return trainer_with


def step(trainer: Any, micro_batcher: MicroBatcher, rows: list[dict[str, Any]]) -> tuple[float, torch.Tensor]:
    trainer.micro_batcher, trainer.counts = micro_batcher, StepCounts()
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
        MicroBatcher(2, packs=True, max_tokens=90),
        MicroBatcher(1, budget_tokens=90),
    ],
    ids=["one micro-batch", "single rows", "threes", "packed in pairs", "by tokens"],
)
def test_gradients_of_a_window_are_those_of_all_its_label_tokens_however_it_is_cut(
    micro_batcher: MicroBatcher, head: str, trainers: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
):
    losses = torch.cat([label_losses(plain, row) for row in make_rows()])
    assert len(losses) == sum(LABELS)
    losses.mean().backward()
    trainer = trainers(head)
    for drops_mask in (False, True):
        monkeypatch.setattr(trainer, "_drops_mask", drops_mask)
        loss, actual = step(trainer, micro_batcher, make_rows())
        assert loss == pytest.approx(losses.mean().item(), rel=1e-6)
        assert difference(actual, gradients(plain)) <= 1e-6


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated in .SFTTrainer:FutureWarning")
@pytest.mark.parametrize("head", ["standard", "chunked"])
def test_smoothed_labels_are_those_of_plain_torch_however_the_window_is_cut(head: str, trainers: Any, plain: Any):
    losses = torch.cat([label_losses(plain, row, smoothing=0.2) for row in make_rows()])
    losses.mean().backward()
    for micro_batcher in (MicroBatcher(8), MicroBatcher(3)):
        loss, actual = step(trainers(head, 0.2), micro_batcher, make_rows())
        assert loss == pytest.approx(losses.mean().item(), rel=1e-6)
        assert difference(actual, gradients(plain)) <= 1e-6


def test_loss_of_a_first_token_counts_neither_alone_nor_behind_another_row(trainers: Any, plain: Any):
    rows = [{**row, "labels": list(row["input_ids"])} for row in make_rows([3, 4, 5])]
    losses = torch.cat([label_losses(plain, row) for row in rows])
    assert len(losses) == sum(len(row["input_ids"]) - 1 for row in rows)
    losses.mean().backward()
    for micro_batcher in (MicroBatcher(3), MicroBatcher(1, packs=True, max_tokens=128)):
        loss, actual = step(trainers("standard"), micro_batcher, rows)
        assert loss == pytest.approx(losses.mean().item(), rel=1e-6)
        assert difference(actual, gradients(plain)) <= 1e-6


@given(st.lists(st.integers(1, 48), min_size=1, max_size=40), st.integers(1, 300))
def test_cuts_stay_within_their_budget_and_hold_every_row_once(lengths: list[int], budget: int):
    window = Collator(PAD)([{"input_ids": [i + 1] * n, "labels": [i + 1] * n, "row": i} for i, n in enumerate(lengths)])
    padded = list(MicroBatcher(1, budget_tokens=budget).cut(window))
    room = max(budget, *lengths)
    packed = list(MicroBatcher(3, packs=True, max_tokens=room).cut(window))
    for micro_batches in (padded, packed):
        held = torch.cat([micro_batch["input_ids"].flatten() for micro_batch in micro_batches])
        assert [int((held == i + 1).sum()) for i in range(len(lengths))] == lengths
    assert max(micro_batch["input_ids"].shape[1] for micro_batch in packed) <= room
    for n, micro_batch in enumerate(padded):
        count, width = micro_batch["input_ids"].shape
        assert count * width <= budget or count == 1
        assert width == int(micro_batch["attention_mask"].sum(1).max())
        # As few as can be in this order: no micro-batch could have taken the first row of the next one.
        assert n == len(padded) - 1 or (count + 1) * width > budget
    assert first_fit([3, 12, 4], [1, 2, 0], room=10) == [[1], [2, 0]]  # too long: a group of its own


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


def test_a_model_with_a_mean_of_its_own_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    usual = model.loss_function
    for ignored in ({"num_items_in_batch"}, {"num_items_in_batch", "shift_labels"}):

        def mean_of_its_own(*given: Any, ignored: set[str] = ignored, **named: Any) -> torch.Tensor:
            return usual(*given, **{key: value for key, value in named.items() if key not in ignored})

        monkeypatch.setattr(model, "loss_function", mean_of_its_own)
        with pytest.raises(ConfigError, match="LlamaForCausalLM takes a mean of its own") as refused:
            prove_label_head(model)
        assert refused.value.fix == "write train.loss_head: chunked"
    whole = model.forward
    monkeypatch.setattr(model, "forward", lambda input_ids, labels, use_cache: whole(input_ids, labels=labels))
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes a mean of its own"):
        prove_label_head(model)


def test_a_model_that_adds_its_routers_loss_has_a_label_head():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    loss = {"output_router_logits": True, "router_aux_loss_coef": 0.2}
    model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes, **loss))
    assert prove_label_head(model)[1] == ""


def test_a_model_that_waits_for_flash_attention_on_a_gpu_has_its_head_proven(tiny_llama: Path):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.config._attn_implementation = "flash_attention_2"
    assert prove_label_head(model)[1] == ""
    assert model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("head", ["standard", "chunked"])
def test_held_out_loss_in_training_is_the_mean_over_label_tokens(
    head: str, trainers: Any, plain: Any, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainers(head)
    losses = torch.cat([label_losses(plain, row).detach() for row in trainer.eval_dataset])
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


@pytest.fixture
def alone(plain: Any) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Losses of each source's label tokens, and the gradient of the mean over all of them."""
    blocks = make_blocks()
    losses = {
        source: torch.cat([losses_alone(plain, block) for block in blocks if block["source"] == source])
        for source in (0, 1)
    }
    torch.cat(list(losses.values())).mean().backward()
    return {source: each.detach() for source, each in losses.items()}, gradients(plain)


@pytest.mark.parametrize(
    ("rows", "head", "flat"), [(1, "standard", False), (6, "chunked", False), (6, "standard", True)]
)
def test_a_window_of_blocks_has_the_gradient_of_its_documents_one_by_one(
    rows: int, head: str, flat: bool, trainers: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
):
    """`flat` is one row, as flash attention has it."""
    trainer, (losses, expected) = trainers(head), alone
    monkeypatch.setattr(trainer, "_wants_one_row", flat)
    loss, actual = step(trainer, MicroBatcher(rows), make_blocks())
    assert loss == pytest.approx(float(torch.cat(list(losses.values())).mean()), rel=1e-6)
    assert difference(actual, expected) <= 1e-6
    counts = trainer.take_counts()
    assert counts.rows == [block["row"] for block in make_blocks()]
    for source, found in counts.sources.items():
        blocks = [block for block in make_blocks() if block["source"] == source]
        assert found.tokens == sum(len(block["input_ids"]) for block in blocks)
        assert found.label_tokens == len(losses[source])
        assert float(found.loss_sum) == pytest.approx(float(losses[source].sum()), rel=1e-6)


def test_a_window_that_runs_out_of_memory_counts_no_loss_twice(
    trainers: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
):
    trainer = trainers("standard")
    real, failed = trainer._run_micro_batch, []

    def run(model: Any, micro_batch: Any, *, n_items: Any) -> Any:
        if int(micro_batch["source"]) == 1 and not failed:
            failed.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(model, micro_batch, n_items=n_items)

    monkeypatch.setattr(trainer, "_run_micro_batch", run)
    _, actual = step(trainer, MicroBatcher(3), make_blocks())
    counts, (losses, expected) = trainer.take_counts(), alone
    assert failed
    assert trainer.micro_batcher.micro_batch < 3
    assert difference(actual, expected) <= 1e-6
    for source, found in counts.sources.items():
        assert float(found.loss_sum) == pytest.approx(float(losses[source].sum()), rel=1e-6)


def test_held_out_blocks_are_measured_by_source_and_together(
    trainers: Any, alone: Any, monkeypatch: pytest.MonkeyPatch
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
        expected = pytest.approx(float(losses[source].mean()), rel=1e-6)
        assert metrics[f"eval_{name}_loss"] == expected
        assert trainer.held_out_sources[name] == {"loss": expected, "label_tokens": len(losses[source])}


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
DELTA = {f"linear_{what}": 4 for what in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(**SIZES, state_size=8),
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        Lfm2Config(**HEADS, layer_types=["conv", "full_attention"]),
        Qwen3_5TextConfig(**HEADS, **DELTA, layer_types=["linear_attention", "full_attention"]),
    ],
    ids=["state space", "attention without positions", "convolution", "linear attention"],
)
def test_a_model_that_carries_one_document_into_the_next_is_refused(config: Any):
    refused = {"key": "train.packing true", "fix": "write train.packing: false"}
    with pytest.raises(ConfigError, match="lets each document of a block see the ones before it") as caught:
        check_isolation(AutoModelForCausalLM.from_config(config), **refused)
    assert (caught.value.where, caught.value.fix) == ("train.packing true", "write train.packing: false")
    check_isolation(AutoModelForCausalLM.from_config(LlamaConfig(**HEADS)), **refused)


def test_linear_attention_would_learn_another_loss_from_packed_rows_so_a_run_that_packs_them_ends(
    inputs: Inputs, tmp_path: Path
):
    config = Qwen3_5TextConfig(
        **(HEADS | {"vocab_size": VOCAB}), **DELTA, layer_types=["linear_attention", "full_attention"]
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    for parameter in model.parameters():  # as large as after training, so that the state shows in the loss
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.1)
    torch.nn.init.normal_(model.lm_head.weight)
    window = Collator(PAD)(make_rows())

    def losses(batcher: MicroBatcher) -> float:
        with torch.no_grad():
            summed = [model(**batch, num_items_in_batch=1, use_cache=False).loss for batch in batcher.cut(window)]
        return float(sum(summed))

    padded = losses(MicroBatcher(8))
    assert losses(MicroBatcher(1)) == pytest.approx(padded, rel=1e-6)  # the rule is computed in fp32
    assert losses(MicroBatcher(2, packs=True, max_tokens=90)) != pytest.approx(padded, rel=1e-3)
    source = tmp_path / "linear"
    model.float().save_pretrained(source)
    for file in (*inputs.model.glob("tokenizer*"), *inputs.model.glob("chat_template*")):
        copy(file, source)
    packs = {"model__name": str(source), "train__packing": True, "data__split": None}
    with pytest.raises(ConfigError, match="lets each document") as caught:
        built(tmp_path / "packed", inputs, **packs)
    assert caught.value.where == "train.packing true"
    assert built(tmp_path / "padded", inputs, **(packs | {"train__packing": "auto"})).trainer.micro_batcher


@pytest.mark.parametrize(
    ("config", "capability", "needs"),
    [
        (LlamaConfig(**HEADS), (8, 0), False),
        (LlamaConfig(**HEADS), (7, 0), True),  # flash attention begins with Ampere (torch, sdp_utils.cpp)
        (MistralConfig(**HEADS, sliding_window=8), (8, 0), True),
        (Gemma3TextConfig(**HEADS, head_dim=8, sliding_window=8), (8, 0), True),
        (MixtralConfig(**HEADS, num_local_experts=2, output_router_logits=True, sliding_window=None), (8, 0), True),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), (8, 0), True),
    ],
    ids=["plain", "an older GPU", "a window that slides", "layers with windows", "a router's loss", "ALiBi"],
)
def test_a_plain_decoder_in_16_bits_needs_no_mask_on_a_new_gpu(
    config: Any, capability: tuple[int, int], needs: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=None if "bloom" in str(type(config)) else "sdpa"
    )
    assert needs_no_mask(model, torch.device("cuda", 0), is_half=True) is not needs
    assert not needs_no_mask(model, torch.device("cuda", 0), is_half=False)
    assert not needs_no_mask(model, torch.device("cpu"), is_half=True)


def test_a_model_in_which_tokens_see_what_stands_behind_them_is_found_by_the_proof():
    def everything(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("both_ways", everything)
    config = LlamaConfig(**HEADS)
    assert not ignores_padding(AutoModelForCausalLM.from_config(config, attn_implementation="both_ways"))
    assert ignores_padding(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


class Placed:
    """Stands for a tensor on a device; memory of a GPU cannot be page-locked, as torch says."""

    def __init__(self, device: str) -> None:
        self.device, self.steps = torch.device(device), []

    def pin_memory(self) -> Placed:
        if self.device.type != "cpu":
            raise RuntimeError("cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned")
        self.steps.append("pinned")
        return self

    def to(self, device: torch.device, *, non_blocking: bool) -> Placed:
        self.steps.append(f"{device.type}, {'without' if non_blocking else 'with'} waiting")
        return self


def test_rows_that_accelerate_has_moved_already_are_not_locked_in_memory():
    batch: Any = {"input_ids": Placed("cpu"), "labels": Placed("cuda")}
    steps = {key: value.steps for key, value in on_device(batch, torch.device("cuda")).items()}
    assert steps == {"input_ids": ["pinned", "cuda, without waiting"], "labels": ["cuda, without waiting"]}


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
@pytest.mark.parametrize(("head", "smoothing"), [("standard", 0.0), ("chunked", 0.0), ("standard", 0.1)])
def test_a_class_that_says_it_takes_no_count_of_items_has_the_loss_of_the_whole_window(
    head: str, smoothing: float, inputs: Inputs, plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Gemma 4's says so: the Trainer then leaves the count out, and each micro-batch takes a mean of its own."""
    monkeypatch.setattr(LlamaForCausalLM, "accepts_loss_kwargs", False, raising=False)
    extra = {"label_smoothing_factor": smoothing} if smoothing else {}
    trainer = built(tmp_path, inputs, tuning__mode="full", train__loss_head=head, train__extra=extra).trainer
    trainer.model.double()
    losses = torch.cat([label_losses(plain, row, smoothing).detach() for row in make_rows()])
    for size in (1, 3, 8):
        assert step(trainer, MicroBatcher(size), make_rows())[0] == pytest.approx(losses.mean().item(), rel=1e-6)


@pytest.mark.filterwarnings("ignore:`label_smoothing_factor` is deprecated:FutureWarning")
def test_labels_of_a_class_that_the_trainer_does_not_know_are_not_smoothed_one_token_off(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(exact_batch, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    with pytest.raises(ConfigError, match="LlamaForCausalLM is no class of its list") as refused:
        built(tmp_path, inputs, train__extra={"label_smoothing_factor": 0.1})
    assert refused.value.where == "train.extra.label_smoothing_factor"

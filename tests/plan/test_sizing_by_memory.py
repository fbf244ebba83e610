"""Micro-batches sized by what a device holds: the largest that fits, the loss head that makes room, what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan import sizing as strategy
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import Hardware, find_device
from sftplay.plan.sizing import PLATEAU_TOKENS, size_run, split_batch

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
BASE = load_config(ROOT / "configs/run_lora.yaml")
GEMMA = load_config(ROOT / "configs/run_gemma27b_distributed.yaml")


@dataclass(frozen=True)
class Seen:
    """What a forecast shows of itself, for a device that holds `cap` rows."""

    rows: int
    cap: int
    peak_bytes: int = 1
    budget_bytes: int = 2

    @property
    def verdict(self):
        return "fits" if self.rows <= self.cap else "does_not_fit"

    @property
    def size(self):
        return SimpleNamespace(rows=self.rows)


def gpus(*sizes, name="NVIDIA H200"):
    cards = tuple(Gpu(i, name, size, size, (9, 0)) for i, size in enumerate(sizes))
    return Machine(gpus=cards, gpu_reason="", ram_bytes=16 * GIB, cores=8, python="3", system="Linux", libraries={})


@given(st.integers(1, 256), st.integers(1, 16), st.integers(0, 300), st.sampled_from([512, 2048, 32_768]))
def test_the_automatic_micro_batch_is_the_largest_divisor_that_fits_and_still_helps(share, processes, cap, length):
    values = {"train.effective_batch_size": share * processes, "model.max_seq_len": length}
    cfg = BASE.with_values(values, "test")
    batch, accum, _ = split_batch(cfg, processes, has_gpu=True, estimate_for=lambda rows: Seen(rows, cap))
    assert batch * accum == share
    room = max(1, PLATEAU_TOKENS // length)
    fitting = [n for n in range(1, share + 1) if share % n == 0 and n <= min(cap, room)]
    assert batch == max(fitting, default=1)


def test_unequal_gpus_are_planned_for_the_smallest():
    shape = find_shape(GEMMA.model.name)
    unequal = size_run(GEMMA, gpus(140 * GIB, 40 * GIB), world_size=2, shape=shape)
    both_small = size_run(GEMMA, gpus(40 * GIB, 40 * GIB), world_size=2, shape=shape)
    assert unequal.cfg.train.batch_size == both_small.cfg.train.batch_size
    assert unequal.forecast.budget_bytes == both_small.forecast.budget_bytes


def test_memory_that_others_hold_is_not_planned_with():
    shape = find_shape(GEMMA.model.name)
    card = Gpu(0, "NVIDIA H200", 140 * GIB, 30 * GIB, (9, 0))
    shared = Machine(gpus=(card,), gpu_reason="", ram_bytes=16 * GIB, cores=8, python="3", system="Linux", libraries={})
    sized = size_run(GEMMA, shared, shape=shape)
    assert sized.forecast.budget_bytes == 30 * GIB
    assert sized.forecast.peak_bytes <= 30 * GIB


def test_scores_are_taken_in_chunks_only_where_that_makes_room_for_more_rows():
    shape = find_shape(GEMMA.model.name)
    large = size_run(GEMMA, gpus(140 * GIB), shape=shape).cfg.train
    assert large.loss_head == "chunked"
    alone = GEMMA.with_values({"train.effective_batch_size": 2}, "test")
    few = size_run(alone, gpus(140 * GIB), shape=shape).cfg.train
    assert (few.loss_head, few.batch_size) == ("standard", 2)


@pytest.mark.parametrize(
    ("mode", "card_gib", "has_deepspeed", "taken", "reason"),
    [
        # The 7.6e9 weights of Qwen2.5-7B are 14.2 GiB in bf16 and 5.4 with the linear ones in 4 bits. Trained in full,
        # with gradients and AdamW's states in fp32, they are 113 GiB.
        ("lora", 80, True, "ddp", "each GPU can hold all of it"),
        ("full", 80, True, "zero3", "split it is"),
        ("full", 80, False, "fsdp", "split it is"),
        ("lora", 4, True, "ddp", "no split makes it fit either"),
        # In 4 bits each GPU holds all 5.4 GiB of them before they are split.
        ("qlora", 7, True, "ddp", "no split makes it fit either"),
    ],
)
def test_a_model_is_split_only_where_one_gpu_cannot_hold_it(monkeypatch, mode, card_gib, has_deepspeed, taken, reason):
    monkeypatch.setattr(strategy, "find_module", lambda name: has_deepspeed or None)
    shape = find_shape("Qwen/Qwen2.5-7B")
    changes = {"tuning.mode": mode, "model.max_seq_len": 512, "train.gradient_checkpointing": True}
    cfg = size_run(BASE.with_values(changes, "test"), gpus(80 * GIB), shape=shape).cfg
    decision = strategy.choose_strategy(cfg, shape, hardware=Hardware(find_device(gpus(*[card_gib * GIB] * 8), 8), 8))
    assert (decision.value, reason in decision.reason) == (taken, True), decision


def test_a_model_whose_rows_of_new_tokens_train_is_not_split():
    values = {"tuning.mode": "lora", "tuning.new_tokens.path": "terms.txt", "train.effective_batch_size": 32}
    cfg = GEMMA.with_values(values, "test")
    sized = size_run(cfg, gpus(24 * GIB, 24 * GIB), world_size=2, shape=find_shape(cfg.model.name))
    assert sized.cfg.cluster.strategy == "ddp"
    reasons = [decision.reason for decision in sized.decisions.values()]
    assert "the rows of new tokens train only where each GPU has whole matrices" in reasons


@pytest.mark.parametrize("processes", [1, 2])
def test_a_cpu_shares_its_memory_among_its_processes(processes):
    cpu = Machine(
        gpus=(), gpu_reason="", ram_bytes=16 * GIB, cores=8, python="3", system="Linux", libraries={},
        ram_free_bytes=16 * GIB,
    )  # fmt: skip
    sized = size_run(BASE, cpu, world_size=processes, shape=find_shape("HuggingFaceTB/SmolLM2-135M"))
    assert sized.forecast.budget_bytes == pytest.approx(0.92 * 16 * GIB / processes, abs=2)

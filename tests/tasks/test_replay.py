"""A window for which memory does not suffice is run again from where it began; any other error goes through."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_process import Inputs, train

from sftplay.errors import no_memory, ran_out_of_memory
from sftplay.model.out_of_memory import AdaptiveBatches, OutOfMemory
from sftplay.train.micro_batches import Collator, MicroBatcher
from sftplay.train.train_run import TrainRun

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@dataclass(frozen=True)
class SameAgain(MicroBatcher):
    """Cuts the second attempt as the first, so that it must come out bit for bit."""

    def smaller(self, window_rows: int) -> MicroBatcher | None:
        return self


def failing(error: BaseException, calls: set[int], after: Callable[[], None] = lambda: None) -> Any:
    """A hook on the model that raises in those forward passes of training; `after` runs before it."""
    n_calls = [0]

    def hook(model: Any, *_: Any) -> None:
        n_calls[0] += bool(model.training and torch.is_grad_enabled())
        if model.training and n_calls[0] in calls:
            after()
            raise error

    return hook


def train_failing(home: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch, hook: Any, **changes: Any) -> Any:
    real = TrainRun.train

    def train_hooked(self: TrainRun, trainer: Any) -> Any:
        handle = trainer.model.register_forward_pre_hook(hook) if hook else None
        if micro_batcher := changes.get("micro_batcher"):
            trainer.micro_batcher = micro_batcher
        try:
            return real(self, trainer)
        finally:
            if handle:
                handle.remove()

    keys = {key: value for key, value in changes.items() if key != "micro_batcher"}
    with monkeypatch.context() as patch:
        patch.setattr(TrainRun, "train", train_hooked)
        return train(home, inputs, data__split=None, **keys)


def weights(run: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in run.trainer.model.named_parameters() if p.requires_grad}


def test_an_attempt_that_failed_leaves_nothing_behind(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With dropout and the same micro-batches, random numbers, gradients and counts are those of a step never tried."""
    setup = {"micro_batcher": SameAgain(4), "tuning__lora__dropout": 0.3, "train__batch_size": 4}
    spoil = failing(NO_MEMORY, {2, 6}, after=lambda: torch.rand(7))
    plain = train_failing(tmp_path / "plain", inputs, monkeypatch, None, **setup)
    tried = train_failing(tmp_path / "tried", inputs, monkeypatch, spoil, **setup)
    ours, theirs = weights(tried), weights(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    same = ("loss", "row_ids", "label_tokens", "padding_share", "learning_rate", "tokens_seen")
    assert [[line[key] for key in same] for line in tried.metrics] == [
        [line[key] for key in same] for line in plain.metrics
    ]
    assert tried.trainer.replay.times == 2


class Marker:
    """Lives as long as the graph it is hooked into; the second one made fails in its backward pass."""

    made: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.made.append(weakref.ref(self))
        self.fails = len(self.made) == 2

    def __call__(self, _gradient: Any) -> None:
        if self.fails:
            raise torch.OutOfMemoryError("an error of its own: one that is kept keeps its frames")


def test_the_graph_of_a_failed_micro_batch_is_gone_before_the_next_one_begins(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    alive: list[int] = []

    def mark(_model: Any, _inputs: Any, out: Any) -> None:
        if out.logits.requires_grad:  # not in evaluation
            out.logits.register_hook(Marker())

    def count(*_: Any, **__: Any) -> None:
        alive.append(sum(each() is not None for each in Marker.made))

    real = TrainRun.train

    def train_marked(self: TrainRun, trainer: Any) -> Any:
        model = trainer.model.get_base_model()
        model.register_forward_pre_hook(count)
        model.register_forward_hook(mark)
        return real(self, trainer)

    monkeypatch.setattr(TrainRun, "train", train_marked)
    train(tmp_path, inputs, data__split=None, train__batch_size=4, train__max_steps=1, eval__after=False)
    assert len(Marker.made) == 2 + 4
    assert alive[:6] == [0] * 6


def test_memory_that_does_not_suffice_for_one_row_ends_the_run_with_advice(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    always = failing(NO_MEMORY, set(range(100)))
    with pytest.raises(OutOfMemory, match=r"step 1: out of memory in forward: 1 rows, .* held .*20\.00 MiB") as caught:
        train_failing(tmp_path, inputs, monkeypatch, always, train__batch_size=2)
    assert caught.value.exit_code == 3
    assert caught.value.batch_size is None
    assert "make plan" in caught.value.fix


KNOWN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:3690\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GiB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: 9 bytes."),
]
"""A lack of memory as libraries word it; the sources stand at `errors.GPU_REFUSED`."""

SIMILAR = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: invalid argument"),
    RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."),
    RuntimeError("NCCL error: remote process exited or there was a network error"),
    ValueError("CUDA error: out of memory"),
]


@pytest.mark.parametrize("error", [*KNOWN, *SIMILAR], ids=str)
def test_a_lack_of_memory_is_known_whichever_library_found_it(error: Exception):
    is_known = error in KNOWN
    refusal = no_memory(error)  # outside of a step it ends the command as a lack of the machine
    assert (ran_out_of_memory(error), refusal is not None) == (is_known, is_known)
    assert refusal is None or (refusal.exit_code, "out of memory (" in refusal.what) == (3, True)


def test_a_failed_allocation_on_a_cpu_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)


@given(
    share=st.integers(1, 96), pick=st.integers(0, 95), packs=st.booleans(), by_tokens=st.booleans(),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
)  # fmt: skip
def test_ever_smaller_cuts_end_at_single_rows_and_lose_none(
    share: int, pick: int, packs: bool, by_tokens: bool, lengths: list[int]
):
    divisors = [n for n in range(1, share + 1) if share % n == 0]
    rows = divisors[pick % len(divisors)]
    micro_batcher: MicroBatcher | None = MicroBatcher(
        rows, packs and not by_tokens, 40, rows * 40 if by_tokens else None
    )
    window = Collator(0)([{"input_ids": [7] * n, "labels": [7] * n, "row": i} for i, n in enumerate(lengths)])
    most = None
    while micro_batcher is not None:
        micro_batches = list(micro_batcher.cut(window))
        assert sum(int((micro_batch["input_ids"] == 7).sum()) for micro_batch in micro_batches) == sum(lengths)
        assert share % micro_batcher.micro_batch == 0
        size = max(micro_batch["input_ids"].numel() for micro_batch in micro_batches)
        assert most is None or size <= most
        most, last, micro_batcher = size, micro_batches, micro_batcher.smaller(share)
    assert all(len(micro_batch["input_ids"]) == 1 for micro_batch in last)
    assert len(last) == len(lengths)


def test_portions_are_halved_until_they_fit_and_stay_so():
    batches, asked = AdaptiveBatches(8, "a test"), []

    def work(part: slice) -> int:
        asked.append(part.stop - part.start)
        if asked[-1] > 2:
            raise NO_MEMORY
        return sum(range(10)[part])

    assert sum(batches.map(10, work)) == sum(range(10))
    assert asked == [8, 4, 2, 2, 2, 2, 2]
    assert sum(batches.map(3, work)) == 3
    assert asked[7:] == [2, 1]

"""The memory probe takes real steps of the run's own code on full rows and measures each phase of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from domain import write_terms, write_texts
from in_process import Inputs, new_run
from oracle.memory_gauges import ProcessGauge, TensorGauge
from transformers import AutoTokenizer

from sftplay.plan.fit import Fit, Point, fit
from sftplay.tasks.probe_step import CudaGauge, MemoryGauge, Request, measure_steps, synthetic_rows
from sftplay.tasks.sft import task as sft

PAIR_WEIGHTS = 2 * (2 * (32 + 32) + 2 * (32 + 16) + 2 * (32 + 64) + (64 + 32))
"""Of rank 1 on the tiny Llama: two layers; q and o of 32 x 32, k and v of 32 x 16, gate and up, down."""


def measured(
    home: Path, inputs: Inputs, request: Request, gauge: MemoryGauge | None = None, **changes: Any
) -> dict[str, Any]:
    cfg, folder = new_run(home, inputs, train__gradient_checkpointing=True, **changes)
    torch.set_num_threads(1)
    measurement = measure_steps(cfg, folder, request=request, gauge=gauge or TensorGauge())
    assert not list(folder.checkpoints.glob("*/*"))
    return {**measurement, "points": [Point(**point) for point in measurement["points"]]}


@pytest.fixture(scope="module")
def measurement(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return measured(tmp_path_factory.mktemp("found"), inputs, Request(rows=(2, 4, 8)))


def test_bytes_of_live_tensors_lie_on_one_line_in_each_phase(measurement: dict[str, Any]):
    two, four, eight = measurement["points"]
    assert [point.tokens for point in measurement["points"]] == [2 * 128, 4 * 128, 8 * 128]
    assert set(eight.peaks_bytes) == {"head", "layer", "step"}
    for phase in eight.peaks_bytes:
        rise = four.peaks_bytes[phase] - two.peaks_bytes[phase]
        assert eight.peaks_bytes[phase] - four.peaks_bytes[phase] == 2 * rise
    line = fit([two, eight])
    assert isinstance(line, Fit)
    assert line.at(four.tokens) == pytest.approx(four.peak_bytes, rel=1e-9)


def test_every_pass_ends_with_the_scores_in_the_loss_and_the_stream_of_both_layers_kept(measurement: dict[str, Any]):
    line = fit(measurement["points"])
    assert isinstance(line, Fit)
    # fp32 scores and their gradient over 400 words, and the checkpointed stream of 32 values before each of 2 layers
    assert line.lines["head"].bytes_per_token >= 2 * 400 * 4 + 2 * 32 * 4
    # Loss and log-probabilities of at most as many again: no third copy of the scores.
    assert line.lines["head"].bytes_per_token < 4 * 400 * 4
    assert line.lines["step"].bytes_per_token == 0


def test_the_step_holds_weight_gradient_and_two_moments_of_what_trains(
    measurement: dict[str, Any], inputs: Inputs, tmp_path: Path
):
    wider = measured(tmp_path, inputs, Request(rows=(2,), if_bent=8), tuning__lora__r=6)
    assert [point.rows for point in wider["points"]] == [2, 8]  # one point is no line
    more = wider["points"][0].peaks_bytes["step"] - measurement["points"][0].peaks_bytes["step"]
    assert more == (6 - 4) * PAIR_WEIGHTS * 16


def test_rows_of_new_tokens_are_rehearsed_with_the_adapter(inputs: Inputs, tmp_path: Path):
    rows, peaks = str(write_texts(tmp_path / "rows.jsonl", 160, seed=1)), []
    for count in (5, 9):
        terms = write_terms(tmp_path / f"{count}.txt", count)
        changes = {"tuning__new_tokens": {"path": str(terms)}, "data__train_path": rows}
        found = measured(tmp_path / str(count), inputs, Request(rows=(2,)), **changes)
        peaks.append(found["points"][0].peaks_bytes["step"])
    # A row of 32 in embedding and head: weight, gradient, two moments, and what PEFT keeps of the base's row.
    assert peaks[1] - peaks[0] == 4 * 2 * 32 * (16 + 4)


def test_gradients_lie_there_all_the_time_only_where_they_are_accumulated(inputs: Inputs, tmp_path: Path):
    peaks = {}
    for accumulates in (True, False):
        request = Request(rows=(4,), accumulates=accumulates)
        peaks[accumulates] = measured(tmp_path / str(accumulates), inputs, request)["points"][0].peaks_bytes
    gradients, window = 4 * PAIR_WEIGHTS * 4, 4 * 128 * 8 * 3
    # The second micro-batch's four rows (ids, mask, labels) are in the window too.
    assert peaks[True]["head"] - peaks[False]["head"] >= gradients + window
    assert peaks[True]["head"] - peaks[False]["head"] < 2 * (gradients + window)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Triton Error [CUDA]: out of memory")]
)
def test_memory_that_runs_out_leaves_the_points_before_it(
    error: RuntimeError, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = sft.WindowedSFTTrainer.compute_loss

    def limited(self: Any, model: Any, micro_batch: Any, *rest: Any, **more: Any) -> Any:
        if len(micro_batch["input_ids"]) > 2 and model.training:
            raise error
        return real(self, model, micro_batch, *rest, **more)

    monkeypatch.setattr(sft.WindowedSFTTrainer, "compute_loss", limited)
    left = measured(tmp_path, inputs, Request(rows=(1, 2, 4)))
    assert ([point.rows for point in left["points"]], left["out_of_memory_rows"]) == ([1, 2], 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"tuning__mode": "full", "train__optim": "sgd", "train__loss_head": "chunked"},
        {"tuning__mode": "qlora", "train__packing": True, "train__batching": "examples"},
    ],
    ids=["full, chunked", "qlora, packed"],
)
def test_every_kind_of_run_can_be_rehearsed(inputs: Inputs, tmp_path: Path, changes: dict[str, Any]):
    point = measured(tmp_path, inputs, Request(rows=(2,)), ProcessGauge(), **changes)["points"][0]
    assert (point.rows, point.tokens) == (2, 256)
    assert set(point.peaks_bytes) == {"head", "layer", "step"}
    assert point.seconds > 0


def test_rehearsed_rows_are_full_and_all_labelled_without_a_token_of_special_meaning(inputs: Inputs, tmp_path: Path):
    cfg, _ = new_run(tmp_path, inputs)
    tokenizer = AutoTokenizer.from_pretrained(inputs.model)
    rows = synthetic_rows(cfg, tokenizer, count=5)
    assert [len(ids) for ids in rows["input_ids"]] == [128] * 5
    assert rows["labels"] == rows["input_ids"]
    assert not {each for ids in rows["input_ids"] for each in ids} & set(tokenizer.all_special_ids)


class FakeCuda:
    """torch.cuda's counters: two peaks that a reset lowers to what is held."""

    def __init__(self) -> None:
        self.held = self.most = self.most_reserved = 0

    def take(self, size: int) -> None:
        self.held += size
        self.most = max(self.most, self.held)
        self.most_reserved = max(self.most_reserved, 2 * self.held)

    def reset_peak_memory_stats(self) -> None:
        self.most, self.most_reserved = self.held, 2 * self.held

    def max_memory_allocated(self) -> int:
        return self.most

    def max_memory_reserved(self) -> int:
        return self.most_reserved

    def empty_cache(self) -> None:
        pass


def test_a_gpus_peaks_are_kept_by_phase_and_what_it_reserved_over_all_of_them(monkeypatch: pytest.MonkeyPatch):
    cuda, gauge = FakeCuda(), CudaGauge()
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    for phase, comes, goes in (("head", 5, 4), ("layer", 2, 2), ("head", 7, 7), ("layer", 1, 0), ("step", 3, 0)):
        gauge.enter(phase)
        cuda.take(comes)
        cuda.take(-goes)
    # held at the start of each: 0, 1, 1, 1, 2
    assert gauge.take() == {"head": 8, "layer": 3, "step": 5}
    assert gauge.reserved_bytes() == 2 * 8
    gauge.release_cached()
    assert (gauge.take(), gauge.reserved_bytes()) == ({}, 2 * 5)


def test_the_blocks_of_a_run_on_documents_are_measured_with_the_mask_that_keeps_them_apart(
    inputs: Inputs, tmp_path: Path
):
    documents = {"task_mode": "cpt", "cpt__block_size": 64}
    cfg, _ = new_run(tmp_path / "rows", inputs, **documents)
    rows = synthetic_rows(cfg, AutoTokenizer.from_pretrained(inputs.model), count=2)
    assert rows["position_ids"][0] == [*range(32), *range(32)]
    apart, crossing = (
        measured(tmp_path / str(crosses), inputs, Request(rows=(2,)), cpt__cross_document=crosses, **documents)
        for crosses in (False, True)
    )
    assert apart["points"][0].tokens == 2 * 64
    assert apart["points"][0].peaks_bytes["head"] > crossing["points"][0].peaks_bytes["head"]

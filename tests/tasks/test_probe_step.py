"""The memory probe takes real steps of the run's own code on full rows and measures each phase of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Inputs, new_run
from oracle.memory_gauges import TensorGauge
from transformers import AutoTokenizer

from sftplay.plan.fit import Fit, Point, fit
from sftplay.tasks.probe_step import MemoryGauge, Request, measure_steps, synthetic_rows
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


def test_the_step_holds_weight_gradient_and_two_moments_of_what_trains(
    measurement: dict[str, Any], inputs: Inputs, tmp_path: Path
):
    wider = measured(tmp_path, inputs, Request(rows=(2,), if_bent=8), tuning__lora__r=6)
    assert [point.rows for point in wider["points"]] == [2, 8]  # one point is no line
    more = wider["points"][0].peaks_bytes["step"] - measurement["points"][0].peaks_bytes["step"]
    assert more == (6 - 4) * PAIR_WEIGHTS * 16


def test_memory_that_runs_out_leaves_the_points_before_it(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = sft.WindowedSFTTrainer.compute_loss

    def limited(self: Any, model: Any, micro_batch: Any, *rest: Any, **more: Any) -> Any:
        if len(micro_batch["input_ids"]) > 2 and model.training:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, model, micro_batch, *rest, **more)

    monkeypatch.setattr(sft.WindowedSFTTrainer, "compute_loss", limited)
    left = measured(tmp_path, inputs, Request(rows=(1, 2, 4)))
    assert ([point.rows for point in left["points"]], left["out_of_memory_rows"]) == ([1, 2], 4)


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

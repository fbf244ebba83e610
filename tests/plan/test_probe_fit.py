"""Lines through measured peaks, against a device whose memory follows a known law."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.find_shape import find_shape
from sftplay.plan.fit import Fit, MemoryLine, NoFit, Point, fit
from sftplay.plan.forecast import Size, estimate
from sftplay.plan.sizing import size_run

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
SEQ = 512


@dataclass(frozen=True)
class FakeDevice:
    """Memory that is linear in tokens in each phase; the peak is the largest phase."""

    laws: dict[str, tuple[int, int]]

    def measure(self, rows: int) -> Point:
        tokens = rows * SEQ
        return Point(rows, tokens, {phase: a + b * tokens for phase, (a, b) in self.laws.items()})


def peak(device: FakeDevice, rows: int) -> int:
    return max(a + b * rows * SEQ for a, b in device.laws.values())


def test_two_points_in_different_phases_are_refused_by_name_and_a_third_mends_it():
    # 8 GiB of a step without tokens, against 1 GiB and 1 MiB a token: they cross at 7 * 1024 tokens = 14 rows.
    device = FakeDevice({"layer": (GIB, 2**20), "step": (8 * GIB, 0)})
    refused = fit([device.measure(4), device.measure(16)])
    assert isinstance(refused, NoFit)
    assert "2048 tokens lies in the phase 'step'" in refused.reason
    assert "8192 in 'layer'" in refused.reason
    found = fit([device.measure(4), device.measure(16), device.measure(24)])
    assert isinstance(found, Fit)
    assert found.at(32 * SEQ) == GIB + 32 * SEQ * 2**20
    assert found.at(SEQ) == 8 * GIB


def points(*peaks: int) -> list[Point]:
    return [Point(n, n * SEQ, {"head": size}) for n, size in enumerate(peaks, 1)]


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ([], "nothing was measured"),
        (points(5 * GIB), "only 512 tokens were measured"),
        (points(5 * GIB, 4 * GIB), "1024 tokens took less than 512 did"),
        (points(GIB, 3 * GIB), "grow faster than the tokens"),
        (points(4 * GIB, 5 * GIB, 5 * GIB + GIB // 4), r"512 tokens is \+19% off the line"),
    ],
)
def test_points_that_make_no_line_are_refused_with_the_reason(measured: list[Point], reason: str):
    found = fit(measured)
    assert isinstance(found, NoFit)
    assert re.search(reason, found.reason), found.reason


L4 = Gpu(0, "NVIDIA L4", 22 * GIB, 22 * GIB, (8, 9))
MACHINE = Machine((L4,), "", 64 * GIB, 8, "3.11", "Linux", {})


def config(**train):
    values = {f"train.{key}": value for key, value in {"effective_batch_size": 64, **train}.items()}
    return load_config(ROOT / "configs/run_lora.yaml").with_values(
        {"model.name": "Qwen/Qwen2.5-1.5B", "model.max_seq_len": SEQ, **values}, "test"
    )


def sized_by(device: FakeDevice | None, **train):
    shape = find_shape("Qwen/Qwen2.5-1.5B")
    found = device and fit([device.measure(2), device.measure(4)])
    return size_run(config(**train), MACHINE, shape=shape, fit=found)


def test_a_plan_with_a_fit_has_its_peak_and_the_smaller_margin():
    device = FakeDevice({"head": (4 * GIB, 2**20), "layer": (3 * GIB, 2**19), "step": (4 * GIB, 0)})
    seen = sized_by(device, batch_size=8).forecast
    # 4 GiB + 8 rows x 512 tokens x 1 MiB; margin 3 % and 0.5 GiB (spec, section 9)
    assert seen.allocated_bytes == pytest.approx(8 * GIB, rel=1e-6)
    assert seen.components["margin"] == pytest.approx(0.03 * 8 * GIB + 0.5 * GIB, rel=1e-6)
    assert seen.peak_phase == "head"
    plain = sized_by(None, batch_size=8).forecast
    assert set(plain.components) == set(seen.components)


def test_the_batch_follows_the_measured_lines():
    # budget 0.92 x 22 = 20.24 GiB; less context and margin some 19 GiB remain: 14.5 GiB of tokens, 28 rows of 0.5 GiB
    roomy = FakeDevice({"head": (4 * GIB, 2**20), "step": (4 * GIB, 0)})
    assert sized_by(roomy).cfg.train.batch_size == 16
    tight = FakeDevice({"head": (4 * GIB, 2**22), "step": (4 * GIB, 0)})
    assert sized_by(tight).cfg.train.batch_size == 4


def test_a_step_of_one_micro_batch_holds_no_gradients_while_it_runs():
    # Measured with several micro-batches; the analytic difference is taken off, not ignored.
    shape, cfg = find_shape("Qwen/Qwen2.5-1.5B"), config(batch_size=1, effective_batch_size=1)
    seen = size_run(cfg, MACHINE, shape=shape).forecast
    setting, size = seen.setting, Size(rows=1, seq=SEQ)
    several, one = (estimate(shape, setting.execution, size=replace(size, accumulates=many)) for many in (True, False))
    sums = {name: sum(parts.values()) for name, parts in several.phases.items()}
    doubled = Fit({name: MemoryLine(2 * total, 0.0) for name, total in sums.items()}, "head")
    again = size_run(cfg, MACHINE, shape=shape, fit=doubled).forecast
    assert again.allocated_bytes == pytest.approx(2 * one.peak_bytes, rel=1e-6)

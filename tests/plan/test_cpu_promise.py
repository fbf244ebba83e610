"""On a CPU the plan's bytes are those of the process, and a run that is planned into a memory limit stays in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cpu_memory import CASES, measure, write_case
from sftplay.cli import main
from sftplay.commands import train
from sftplay.machine.probe import probe
from sftplay.plan.forecast import CPU_PROCESS_BYTES
from sftplay.runs import inputs, start

MIB = 2**20
NEAR = 0.15
LIBRARY_PAGES = 160 * MIB  # of CPU_PROCESS_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "process"])
def test_planned_peak_is_near_the_measured_memory_that_the_kernel_cannot_drop(name: str, tmp_path: Path):
    """Pages of files are clean. How many of them are resident is the kernel's choice: of libraries 160 MiB or 300."""
    seen = measure(write_case(tmp_path, CASES[name]))
    assert seen.code == 0, seen.said
    assert seen.peak_rss_bytes > 1.5 * CPU_PROCESS_BYTES, "the process alone decides, which says nothing of the model"
    assert seen.planned_bytes - LIBRARY_PAGES == pytest.approx(seen.peak_anonymous_bytes, rel=NEAR)
    assert seen.planned_bytes <= (1 + NEAR) * seen.peak_rss_bytes


def test_a_run_of_which_not_even_one_row_fits_is_refused_with_what_would_fit(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # 135 M weights that train take 4 x 4 bytes each, 2.0 GiB, beside the process's 0.5; an adapter's base a fourth.
    small = replace(probe(), gpus=(), ram_bytes=2560 * MIB, ram_free_bytes=None)
    monkeypatch.setattr(train, "probe", lambda: small)
    monkeypatch.setattr(start, "follow", lambda *_, **__: pytest.fail("it was started"))
    monkeypatch.setattr(inputs, "ask_hub", lambda *_, **__: True)  # no test reaches a hub
    path = write_config(tuning__mode="full", model__name="HuggingFaceTB/SmolLM2-135M", model__max_seq_len=1024)
    words = ["train", "--config", str(path), "train.gradient_checkpointing=true"]
    assert main(words) == 3
    told = capsys.readouterr().err
    assert "does not fit: even one row at a time takes" in told
    assert "tuning.mode=lora (" in told
    assert "train.batch_size=1 tries it anyway" in told
    assert not (path.parent / "outputs" / "run" / "plan.json").exists()
    assert main([*words, "tuning.mode=lora", "--dry-run"]) == 0

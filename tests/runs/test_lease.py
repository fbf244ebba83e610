"""The calls by which gpu-check and the GPU benchmarks run on a machine that is lent: each is one that the kit takes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_sizing, gpu_speed
from sftplay.cli import main
from sftplay.commands import gpu_check
from sftplay.runs.gpu_check.checks import CHECKS

ROOT = Path(__file__).resolve().parents[2]
LEASE = ROOT.parent / "shared" / "gpu" / "lease.md"

pytestmark = pytest.mark.skipif(not LEASE.is_file(), reason="needs shared/gpu/lease.md, which is not part of a clone")


def calls(program: str) -> list[list[str]]:
    """The words after a program, in each of the file's calls of it."""
    text = LEASE.read_text(encoding="utf-8").replace("$OUT", "OUT").replace("$w", "ours")
    found = re.findall(rf"{re.escape(program)}((?: [^;\n`&]+)?)", text)
    return [shlex.split(words) for words in found if words.strip().startswith("-")]


def within(words: list[str], folder: Path) -> list[str]:
    return [str(folder / word.removeprefix("OUT").lstrip("/")) if word.startswith("OUT") else word for word in words]


def test_gpu_check_takes_every_call_and_chooses_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    chosen: list[list[str]] = []
    monkeypatch.setattr(gpu_check, "conduct", lambda checks, *_, **__: chosen.append([each.name for each in checks]))
    found = calls("sftplay gpu-check")
    assert len(found) >= 2
    for words in found:
        assert main(["gpu-check", *within(words, tmp_path)]) == 0
    assert all(chosen)


def test_every_choice_of_rows_names_some():
    text = LEASE.read_text(encoding="utf-8")
    for only in re.findall(r"`--only ([^`]+)`", text):
        if "," in only:
            assert gpu_check.select(list(CHECKS), only)


def test_the_speed_benchmark_takes_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    measured: list[Any] = []
    monkeypatch.setattr(gpu_speed, "measure", lambda case, who, _: measured.append(case) or {"contestant": who})
    for words in calls("benchmarks/gpu_speed.py"):
        assert gpu_speed.main(within(words, tmp_path)) == 0
    assert {case.model for case in measured} == {"meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B"}
    assert json.loads((tmp_path / "8b-ours.json").read_text()) == {"contestant": "ours"}


def test_the_sizing_benchmark_takes_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    limits: list[float] = []

    def measured(case: gpu_sizing.Case, place: gpu_sizing.Place) -> dict[str, Any]:
        limits.append(place.options.limit_s)
        return {"model": case.model, "mode": case.mode, "tokens": case.tokens, "error": "not here"}

    monkeypatch.setattr(gpu_sizing, "measure_case", measured)
    for words in calls("benchmarks/gpu_sizing.py"):
        assert gpu_sizing.main(within(words, tmp_path)) == 0
    assert limits == [110.0] * 3
    assert (tmp_path / "gpu_sizing.json").is_file()

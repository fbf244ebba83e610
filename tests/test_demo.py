"""The demo as a newcomer runs it; the long ones are marked slow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from processes import HANG_S

pytestmark = pytest.mark.contract

LAST_LINE = re.compile(r"demo: exact match (\d\.\d{3}) -> (\d\.\d{3}) on (\d+) held-out prompts in (\d+) s")

Command = Callable[..., CompletedProcess[str]]


def run_demo(sftplay: Command, folder: Path, *words: str) -> tuple[CompletedProcess[str], dict[str, float]]:
    """The finished demo below `folder` and its demo.json."""
    done = sftplay("demo", f"output_dir={folder}", *words, timeout=3 * HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, json.loads((folder / "demo" / "demo.json").read_text())


@pytest.fixture(scope="module")
def untouched(
    tmp_path_factory: pytest.TempPathFactory, builtin_tiny: Path, sftplay: Command
) -> tuple[CompletedProcess[str], dict, Path]:
    """A demo whose learning rate is 0, over few steps and prompts."""
    folder = tmp_path_factory.mktemp("untouched")
    words = ["train.learning_rate=0", "train.max_steps=3", "eval.limit=32", "eval.max_new_tokens=16"]
    return *run_demo(sftplay, folder, *words), folder


def test_with_a_rate_of_zero_nothing_is_learned(untouched: tuple) -> None:
    done, result, _ = untouched
    assert result["exact_match_before"] == result["exact_match_after"] <= 0.10
    match = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert match is not None
    assert match[1] == match[2]
    assert match[3] == "32"


def test_the_screen_stays_short_and_free_of_library_warnings(untouched: tuple) -> None:
    done, _, folder = untouched
    lines = done.stdout.splitlines()
    assert len(lines) <= 150
    assert not re.search(r"warn", done.stdout + done.stderr, re.IGNORECASE)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout  # not a terminal: no colours, no moving cursor
    log = (folder / "demo" / "logs" / "rank0.log").read_text()
    assert "held-out loss" in log


def test_the_answers_before_and_after_are_the_same_when_nothing_was_learned(untouched: tuple) -> None:
    _, _, folder = untouched
    before, after = ((folder / "demo" / "eval" / f"{name}.jsonl").read_text() for name in ("before", "after"))
    assert before == after


def test_an_earlier_demo_is_moved_aside_and_nothing_of_it_is_lost(untouched: tuple, sftplay: Command) -> None:
    _, result, folder = untouched
    words = ["train.max_steps=1", "eval.limit=4", "eval.max_new_tokens=4"]
    run_demo(sftplay, folder, *words)
    aside = [path for path in folder.glob("demo-*") if path.is_dir()]
    assert len(aside) == 1
    assert json.loads((aside[0] / "demo.json").read_text()) == result


@pytest.mark.slow
@pytest.mark.fresh_start
def test_the_demo_learns_its_task(tmp_path: Path, sftplay: Command, builtin_tiny: Path) -> None:
    done, result = run_demo(sftplay, tmp_path)
    match = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert match is not None
    before, after = float(match[1]), float(match[2])
    assert before <= 0.10
    assert after >= 0.95
    assert int(match[3]) >= 200
    assert result["control_exact_match"] is None
    assert len(done.stdout.splitlines()) <= 150
    # Figures are those of the answers written down.
    answers = [json.loads(line) for line in (tmp_path / "demo" / "eval" / "after.jsonl").read_text().splitlines()]
    right = sum(row["prediction"].strip() == row["reference"].strip() for row in answers)
    assert result["exact_match_after"] == pytest.approx(right / len(answers))


@pytest.mark.slow
def test_with_shuffled_answers_the_demo_learns_the_form_but_not_the_task(
    tmp_path: Path, sftplay: Command, builtin_tiny: Path
) -> None:
    """In as many steps true answers teach more than nine tenths of it."""
    _, result = run_demo(sftplay, tmp_path, "--control", "train.max_steps=200")
    assert result["exact_match_after"] <= 0.15
    assert result["control_exact_match"] == result["exact_match_after"]

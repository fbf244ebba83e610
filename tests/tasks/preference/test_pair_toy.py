"""The toy of preferences from its warm start to its figures, and controls that must not learn the rule."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import HANG_S

ROOT = Path(__file__).resolve().parents[3]
PAIRS = ROOT / "data" / "counted_things" / "pairs.jsonl"

pytestmark = pytest.mark.slow

STEPS = 60
"""Of a control. The toy has learned its rule after as many of its 90."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def call(home: Path, *words: str, python: Path | str = sys.executable) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PY": str(python), "SFTPLAY_CACHE": str(ROOT / ".cache")}
    done = subprocess.run(
        list(words), cwd=home, env=env, capture_output=True, text=True, timeout=3 * HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, forked_python: Path) -> Path:
    """A checkout in which the workflow has run: outputs/pairs-sft and outputs/pairs-dpo."""
    home = tmp_path_factory.mktemp("toy") / "kit"
    (home / "data").mkdir(parents=True)
    for name in ("sftplay", "workflows", "configs", "Makefile", "data/base", "data/counted_things"):
        (home / name).symlink_to(ROOT / name)
    shown = call(home, "workflows/sft_then_dpo.sh", python=forked_python)
    assert "accuracy" in shown
    return home


def train_control(home: Path, pairs: list[dict[str, Any]], name: str, *values: str) -> dict[str, Any]:
    """Train on other pairs from the same warm start; return the figures after it."""
    rows = home / f"{name}.jsonl"
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = ("--config", "configs/run_dpo_toy.yaml", f"run_name={name}", "model.name=pairs-sft")
    short = [f"train.{key}_steps={STEPS}" for key in ("max", "eval", "save")]
    more = (f"data.train_path={rows}", "eval.before=false", "eval.limit=1", *short, *values)
    call(home, sys.executable, "-m", "sftplay", "train", *words, *more)
    return json.loads((home / "outputs" / name / "eval" / "after.json").read_text())


def swap(pair: dict[str, Any]) -> dict[str, Any]:
    return pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}


@pytest.mark.usefixtures("builtin_tiny")
def test_the_rule_behind_the_pairs_is_learned_and_the_models_own_answers_follow_it(learned: Path):
    run = learned / "outputs" / "pairs-dpo"
    before, after = (json.loads((run / "eval" / f"{side}.json").read_text()) for side in ("before", "after"))
    assert (before["n"], before["accuracy"], before["margin"]) == (240, 0.5, 0.0)
    assert after["accuracy"] >= 0.9
    assert after["margin"] > 1
    assert json.loads((run / "eval" / f"step-{STEPS}.json").read_text())["accuracy"] >= 0.9
    own = {side: read_lines(run / "eval" / f"{side}.jsonl") for side in ("before", "after")}
    right = {side: sum(line["prediction"] == line["reference"] for line in lines) for side, lines in own.items()}
    wrong = {side: sum(line["prediction"] == line["rejected"] for line in lines) for side, lines in own.items()}
    assert right["after"] >= 0.75 * 240
    assert right["after"] - right["before"] >= 0.25 * 240
    assert wrong["after"] <= 0.15 * 240 < wrong["before"]
    gate = json.loads((run / "data_report.json").read_text())["preference"]
    assert (gate["equal"], gate["swapped"], gate["contaminated"], gate["deciding"]) == (0, 0, 0, [])
    first = read_lines(run / "metrics.jsonl")[0]
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl"} <= set(first)
    page = (run / "report.html").read_text()
    assert 'id="preferences"' in page
    assert 'id="gate"' in page


@pytest.mark.usefixtures("builtin_tiny")
def test_labels_that_say_nothing_leave_it_at_a_half_and_swapped_ones_teach_the_opposite(learned: Path):
    pairs = read_lines(PAIRS)
    is_swapped = [number % 2 == 0 for number in range(len(pairs))]
    random.Random(1).shuffle(is_swapped)
    shuffled = [swap(pair) if swaps else pair for pair, swaps in zip(pairs, is_swapped, strict=True)]
    assert train_control(learned, shuffled, "shuffled")["accuracy"] == pytest.approx(0.5, abs=0.05)
    assert train_control(learned, list(map(swap, pairs)), "swapped")["accuracy"] <= 0.15


@pytest.mark.usefixtures("builtin_tiny")
def test_a_beta_without_end_keeps_the_model_where_it_started(learned: Path):
    """Its margins need not be large. A step of AdamW is as long as its rate whatever the loss, so that is low here."""
    values = ("preference.beta=1e6", "preference.rpo_alpha=0", "train.learning_rate=5e-5")
    ended = train_control(learned, read_lines(PAIRS), "held", *values)
    before, after = (
        json.loads((learned / "outputs" / "pairs-dpo" / "eval" / f"{side}.json").read_text())
        for side in ("before", "after")
    )
    for side in ("logps/chosen", "logps/rejected"):
        assert abs(ended[side] - before[side]) <= 0.25
    assert abs(after["logps/rejected"] - before["logps/rejected"]) > 2


@pytest.mark.usefixtures("builtin_tiny")
def test_ipo_whose_margin_shall_be_nothing_learns_nothing_at_the_toys_own_rate(learned: Path):
    """Its loss is least where the margin is half of 1 / beta: with a beta without end, where the model starts."""
    beta = 1e6
    ended = train_control(
        learned, read_lines(PAIRS), "ipo", "task_mode=ipo", f"preference.beta={beta}", "preference.rpo_alpha=0"
    )
    assert ended["accuracy"] == pytest.approx(0.5, abs=0.1)
    assert abs(ended["margin"]) / beta <= 0.2  # nats; the toy's own is above 4

"""What a plan advises where two-turn episodes do not fit: each change, typed behind the command, makes them fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sftplay.cli import main
from sftplay.config.load import load_config
from sftplay.errors import MachineError
from sftplay.launch.command import Scale
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.devices import find_card
from sftplay.runs.start import size

CONFIG = Path(__file__).parents[2] / "configs" / "run_score_gsm8k.yaml"
FULL = ["tuning.mode=full", "train.batch_size=1", "train.effective_batch_size=48"]
LARGE = "model.name=Qwen/Qwen2.5-32B"

CASES = {
    "shards that do not fit": ("8xA40", [LARGE], ["tuning.mode=qlora"]),
    "one process has room with another optimizer": (
        "3xA40",
        [],
        ["train.optim=adamw_8bit", "tuning.mode=lora", "tuning.mode=qlora"],
    ),
    "whole models where shards fit": (
        "4xA40",
        ["score.placement=shared"],
        ["score.placement=sharded", "tuning.mode=lora", "tuning.mode=qlora"],
    ),
    "ddp where shards fit": (
        "4xA40",
        ["cluster.strategy=ddp"],
        [
            "score.placement=sharded, cluster.strategy=fsdp",
            "train.optim=adamw_8bit",  # in one process
            "tuning.mode=lora",
            "tuning.mode=qlora",
        ],
    ),
    "shards and checkpointing together": (
        "8xA40",
        ["score.placement=shared", "train.gradient_checkpointing=false", "model.max_seq_len=16384"],
        ["train.gradient_checkpointing=true, score.placement=sharded"],
    ),
    "shards that are written": (
        "2xA40",
        ["score.placement=sharded", "cluster.strategy=fsdp"],
        [
            f"{change}, score.placement=auto, cluster.strategy=auto"
            for change in ("train.optim=adamw_8bit", "tuning.mode=lora", "tuning.mode=qlora")
        ],
    ),
}


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]):
    """Runs `plan --json`; its exit code and document."""

    def call(*words: str) -> tuple[int, dict[str, Any]]:
        code = main(["plan", "--config", str(CONFIG), "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.mark.contract
@pytest.mark.parametrize("name", CASES)
def test_each_advice_makes_the_run_fit_with_the_peak_that_it_names(name: str, plan):
    gpus, words, advised = CASES[name]
    words = ["--gpus", gpus, *FULL, "score.generation_rows=1", *words]
    _, found = plan(*words)
    assert found["verdict"] != "fits"
    assert [each["change"] for each in found["suggestions"]] == advised
    for each in found["suggestions"]:
        assert each["fits"]
        changes = each["change"].split(", ")
        keys = {change.partition("=")[0] for change in changes}
        code, again = plan(*(word for word in words if word.partition("=")[0] not in keys), *changes)
        assert (code, again["verdict"], again["peak_bytes"]) == (0, "fits", each["peak_bytes"])


def test_a_start_that_does_not_fit_is_refused_with_the_same_advice():
    words = [*FULL, "train.batch_size=auto", "train.effective_batch_size=64", "score.placement=shared"]
    card = find_card("A40")
    assert card is not None
    cards = tuple(Gpu(i, card.name, card.total_bytes, card.total_bytes, card.capability) for i in range(4))
    machine = Machine(cards, "", 2**38, 8, "3.11", "Linux", {})
    with pytest.raises(MachineError, match="does not fit") as caught:
        size(load_config(CONFIG, words), machine, scale=Scale(nproc=4))
    assert caught.value.fix.startswith("score.placement=sharded (")

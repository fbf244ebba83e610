"""Which backend a run gets: as given or refused, and for `auto` with the reason in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sftplay.config.load import check_rules, load_config
from sftplay.errors import MachineError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.sizing import size_run

ROOT = Path(__file__).resolve().parents[2]
CPU = Machine((), "none", 2**34, 2, "3.11", "Linux", {}, unsloth_problem="")
GPU = replace(CPU, gpus=(Gpu(0, "NVIDIA H200", 141 * 2**30, 140 * 2**30, (9, 0)),))
ABSENT = "the package unsloth is not installed"
BASE = load_config(ROOT / "configs/run_lora.yaml")


def config(backend, **changes):
    values = {key.replace("__", "."): value for key, value in changes.items()}
    return BASE.with_values({"tuning.backend": backend, **values}, "test")


def decided(cfg, machine, **options):
    sized = size_run(cfg, machine, **options)
    reasons = [each.reason for key, each in sized.decisions.items() if key == "tuning.backend"]
    return sized.cfg.tuning.backend, reasons


def test_unsloth_asked_for_and_unusable_is_an_error_with_the_reason_and_the_way_out():
    with pytest.raises(MachineError) as caught:
        size_run(config("unsloth"), replace(GPU, unsloth_problem=ABSENT))
    assert str(caught.value).splitlines() == [
        "test tuning.backend: unsloth cannot be used: the package unsloth is not installed",
        "  fix: `make train-unsloth` builds and uses an environment that has it; or write tuning.backend: bnb",
    ]


def test_auto_says_what_it_took_and_why_and_the_plan_keeps_it():
    assert decided(config("auto"), GPU)[0] == "unsloth"
    backend, (reason,) = decided(config("auto"), replace(GPU, unsloth_problem=ABSENT))
    assert (backend, reason) == ("bnb", "unsloth is not taken: the package unsloth is not installed")
    backend, (reason,) = decided(config("auto"), CPU)
    assert backend == "bnb"
    assert "without a GPU" in reason
    plan = size_run(config("auto"), CPU).as_plan()
    assert {"key": "tuning.backend", "value": "bnb", "reason": reason} in plan["decisions"]


def test_several_processes_are_refused_to_unsloth_and_make_auto_take_the_other():
    with pytest.raises(MachineError, match="it trains in one process, not in 2"):
        size_run(config("unsloth"), GPU, world_size=2)
    backend, (reason,) = decided(config("auto"), GPU, world_size=2)
    assert backend == "bnb"
    assert "not in 2" in reason


CONFLICTS = {
    "tuning.mode": {"tuning__mode": "full"},
    "tuning.quant_type": {"tuning__mode": "qlora", "tuning__quant_type": "fp4"},
    "tuning.double_quant": {"tuning__mode": "qlora", "tuning__double_quant": False},
    "model.adapter": {"model__adapter": "outputs/some/adapter"},
    "model.attn": {"model__attn": "eager"},
    "train.packing": {"train__packing": True},
    "train.loss_head": {"train__loss_head": "chunked"},
}


@pytest.mark.parametrize("key", CONFLICTS)
def test_what_unsloth_would_not_follow_is_refused_and_makes_auto_take_the_other(key):
    (problem,) = check_rules(config("unsloth", **CONFLICTS[key]))
    assert problem.where == f"test {key}"
    assert "with tuning.backend unsloth" in problem.what
    assert "tuning.backend: bnb" in problem.fix
    assert check_rules(config("bnb", **CONFLICTS[key])) == []
    assert check_rules(config("auto", **CONFLICTS[key])) == []
    backend, (reason,) = decided(config("auto", **CONFLICTS[key]), GPU)
    assert backend == "bnb"
    assert reason.startswith(f"unsloth is not taken: {key}: ")

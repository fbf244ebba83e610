"""Which device holds which part of two-turn episodes, on machines of one, two and four GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sftplay.config.run import RunConfig
from sftplay.errors import SftplayError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.devices import find_card
from sftplay.plan.find_shape import find_shape
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.tasks.score.spec import OWN, resolve_layout

LLAMA = "meta-llama/Llama-3.2-3B"


def config(**values: Any) -> RunConfig:
    tree = {"task_mode": "score", "rewards": [{"name": "answer", "use": "math"}], "model": {"name": LLAMA}}
    return RunConfig.model_validate(tree).with_values(
        {key.replace("__", "."): value for key, value in values.items()}, "test"
    )


def sized(machine: Machine, cfg: RunConfig, *, card: str, gpus: int, processes: int = 1) -> SizedRun:
    kind = find_card(card)
    assert kind is not None
    found = tuple(Gpu(i, kind.name, kind.total_bytes, kind.total_bytes, kind.capability) for i in range(gpus))
    return size_run(cfg, replace(machine, gpus=found, gpu_reason=""), world_size=processes, shape=find_shape(LLAMA))


@pytest.fixture
def machine() -> Machine:
    return Machine((), "none", 2**38, 8, "3.11", "Linux", {})


def test_roles_lie_on_two_gpus_and_roles4_on_four():
    two = resolve_layout(config(), placement="roles", gpus=2, processes=1).devices()
    assert two == {
        "solver": OWN, "critic": OWN, "guide": "cuda:1", "value": "cuda:1", "target_critic": "cuda:1", "ref": "cuda:1",
    }  # fmt: skip
    four = resolve_layout(config(), placement="roles4", gpus=4, processes=1).devices()
    assert four == {
        "solver": OWN, "critic": "cuda:1", "guide": "cuda:2", "value": "cuda:3", "target_critic": "cpu", "ref": "cpu",
    }  # fmt: skip
    for part in set(two) - {"solver"}:
        cfg = config(**{f"score__devices__{part}": "cpu"})
        assert resolve_layout(cfg, placement="roles", gpus=2, processes=1).devices()[part] == "cpu"


@pytest.mark.parametrize(
    ("values", "given", "key", "what", "fix"),
    [
        ({"guide": "cuda:1"}, {"processes": 2, "placement": "shared"}, "score.devices.guide", "this one GPU", "auto"),
        ({"guide": "cuda:2"}, {}, "score.devices.guide", r"shows 2 GPUs \(cuda:0, cuda:1\)", "cuda:1"),
        ({"ref": "cuda:0"}, {"gpus": 0}, "score.devices.ref", "shows 0 GPUs", "cpu"),
        ({"solver": "cuda:1"}, {}, "score.devices.solver", "first visible GPU", "CUDA_VISIBLE_DEVICES"),
        ({}, {"processes": 2}, "score.placement", "one process holds all parts", "NPROC=1"),
        ({}, {"gpus": 1}, "score.placement", "guide on cuda:1, and this machine shows 1 GPU", "shared"),
        ({}, {"placement": "roles4"}, "score.placement", "this machine shows 2 GPUs", "roles"),
    ],
)  # fmt: skip
def test_a_device_that_cannot_be_is_refused_with_its_key_and_a_remedy(values, given, key, what, fix):
    cfg = config(**{f"score__devices__{part}": device for part, device in values.items()})
    with pytest.raises(SftplayError, match=what) as caught:
        resolve_layout(cfg, **({"placement": "roles", "gpus": 2, "processes": 1} | given))
    assert caught.value.where.endswith(key)
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("card", "gpus", "values", "placement", "ref"),
    [
        ("A100", 1, {"tuning__mode": "lora"}, "shared", "auto"),
        ("A40", 2, {"tuning__mode": "lora"}, "shared", "auto"),
        ("A40", 4, {"tuning__mode": "qlora"}, "shared", "auto"),
        ("A100", 1, {"tuning__mode": "full"}, "shared", "cpu"),  # nothing fits; this comes nearest
        ("A100", 2, {"tuning__mode": "full"}, "roles", "auto"),
        ("A40", 2, {"tuning__mode": "full", "train__optim": "adamw_8bit", "model__max_seq_len": 1024}, "roles", "cpu"),
        ("H200", 1, {"tuning__mode": "full"}, "shared", "auto"),
    ],
)
def test_bytes_decide_the_placement(machine, card, gpus, values, placement, ref):
    run = sized(machine, config(**values), card=card, gpus=gpus)
    assert (run.cfg.score.placement, run.cfg.score.devices.ref) == (placement, ref)
    assert "score.placement" in run.decisions


@pytest.mark.parametrize(
    ("values", "placement", "strategy"),
    [
        ({}, "sharded", "fsdp"),  # two whole models do not fit one of these cards
        ({"score__placement": "sharded"}, "sharded", "fsdp"),
        ({"cluster__strategy": "fsdp"}, "sharded", "fsdp"),
        ({"cluster__strategy": "ddp"}, "shared", "ddp"),
        ({"train__optim": "adamw_8bit"}, "shared", "ddp"),  # its state cannot be in shards
    ],
)
def test_whole_models_of_several_processes_are_in_shards_where_one_card_does_not_hold_them(
    machine, values, placement, strategy
):
    run = sized(machine, config(tuning__mode="full", **values), card="A100", gpus=4, processes=4)
    assert (run.cfg.score.placement, run.cfg.cluster.strategy) == (placement, strategy)
    assert run.forecast is not None
    assert (run.forecast.verdict == "fits") == (placement == "sharded")

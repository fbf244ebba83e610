"""What a device holds while a model is opened and split over the processes, and where it is opened."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Inputs, new_run, sized, written_config

from sftplay.config.load import load_config
from sftplay.machine.probe import Gpu, Machine
from sftplay.model import weights
from sftplay.model.load import load_start
from sftplay.plan.find_shape import find_shape
from sftplay.plan.forecast import LOAD, OPENED
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.tasks.worker import find_runner
from sftplay.train import run_task

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
LLAMA_70B, LLAMA_8B = "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B"


def planned(
    name: str, mode: str, strategy: str, *, gib: int, cards: int = 8, ram: int = 2**40, **values: Any
) -> SizedRun:
    card = Gpu(0, "a card", gib * GIB, gib * GIB, (9, 0))
    machine = Machine((card,) * cards, "none", ram, 64, "3.11", "Linux", {"torch": "2.13.0"})
    keys = {"model.name": name, "tuning.mode": mode, "cluster.strategy": strategy, "train.precision": "bf16"}
    keys |= {"model.max_seq_len": 1024, "train.effective_batch_size": 32, "tuning.lora.r": 8}
    cfg = load_config(ROOT / "configs/run_lora.yaml").with_values({**keys, **values}, "test")
    return size_run(cfg, machine, shape=find_shape(name), world_size=cards)


def loading(run: SizedRun) -> float:
    assert run.forecast is not None
    return sum(run.forecast.footprint.phases[LOAD].values())


def test_a_lora_of_70b_on_80_gib_is_opened_on_the_host_and_split_one_module_at_a_time():
    run = planned(LLAMA_70B, "lora", "fsdp", gib=80)
    plan = json.loads(json.dumps(run.as_plan()))
    assert (plan["verdict"], plan[OPENED]) == ("fits", "host")
    # 70.55e9 weights in 2 bytes over 8 devices, and the largest module whole: a table of 128,256 x 8,192. The pairs of
    # r 8 are 0.1e9 weights in fp32.
    shards, table, pairs = 70.55e9 * 2 / 8, 128_256 * 8192 * 2, 0.104e9 * 4 / 8
    assert loading(run) == pytest.approx(shards + table + pairs, rel=0.01)


def test_full_tuning_by_fsdp_on_small_cards_is_opened_on_the_host_in_fp32():
    run = planned(LLAMA_8B, "full", "fsdp", gib=24)
    assert run.as_plan()[OPENED] == "host"
    assert loading(run) == pytest.approx(8.03e9 * 4 / 8 + 128_256 * 4096 * 4, rel=0.01)
    assert run.forecast is not None
    assert run.forecast.host_bytes == pytest.approx(8.03e9 * 4, rel=0.01)
    assert not any("host's memory" in note for note in run.notes)
    scarce = planned(LLAMA_8B, "full", "fsdp", gib=24, ram=200 * GIB)  # 8 times 29.9 GiB are needed
    assert any("239.32 GiB, and 200.00 GiB are free" in note for note in scarce.notes), scarce.notes


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_zero3_has_the_whole_model_on_the_device_in_16_bits(mode: str):
    run = planned(LLAMA_8B, mode, "zero3", gib=80)
    pairs = 0.021e9 * 4 if mode == "lora" else 0
    assert loading(run) == pytest.approx(8.03e9 * 2 + pairs, rel=0.01)
    assert planned(LLAMA_70B, mode, "zero3", gib=80).as_plan()["verdict"] == "does_not_fit"


def test_4_bit_weights_are_whole_on_each_device_before_they_are_split_and_the_plan_says_so():
    run = planned(LLAMA_70B, "qlora", "fsdp", gib=24, cards=4)
    plan = run.as_plan()
    assert (plan["verdict"], plan["peak_phase"], plan[OPENED]) == ("does_not_fit", LOAD, "device")
    # 68.45e9 weights of linears in 4.127 bits and 2.1e9 others in 16, whole, and a quarter of codes and others.
    codes, scales, others = 68.45e9 / 2, 68.45e9 * (1 / 64 + 4 / 16384), 2.1e9 * 2
    assert loading(run) == pytest.approx((codes + others) * 1.25 + scales, rel=0.02)


def test_a_model_that_answers_before_it_is_split_lies_on_the_device():
    run = planned(LLAMA_70B, "lora", "fsdp", gib=80, **{"eval.before": True})
    plan = run.as_plan()
    assert (plan["verdict"], plan["peak_phase"], plan[OPENED]) == ("does_not_fit", LOAD, "device")


@pytest.fixture
def inputs(tiny_llama: Path, chat_rows: Path, held_out_rows: Path) -> Inputs:
    return Inputs(tiny_llama, chat_rows, held_out_rows)


@pytest.mark.parametrize(
    ("mode", "is_on_host", "device_map"),
    [("full", True, None), ("lora", True, None), ("full", False, {"": 0}), ("qlora", True, {"": 0})],
)
def test_a_model_opened_on_the_host_is_sent_to_no_gpu(
    mode: str, is_on_host: bool, device_map: Any, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cfg = sized(written_config(tmp_path, inputs, tuning__mode=mode))
    asked: list[dict[str, Any]] = []
    real = weights.AutoModelForCausalLM.from_pretrained

    def from_pretrained(_name: str, **options: Any) -> Any:
        asked.append(options)
        return real(inputs.model), {"missing_keys": []}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(weights, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=from_pretrained))
    load_start(cfg, is_on_host=is_on_host)
    assert [options["device_map"] for options in asked] == [device_map]


@pytest.mark.parametrize("opened", ["host", "device", None])
def test_a_worker_opens_its_model_where_the_plan_says(
    opened: str | None, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class EnoughError(Exception):
        pass

    def start(*_: Any, is_on_host: bool, **__: Any) -> Any:
        assert is_on_host == (opened == "host")
        raise EnoughError

    cfg, folder = new_run(tmp_path, inputs)
    folder.write_json("plan.json", {**folder.read_json("plan.json"), **({OPENED: opened} if opened else {})})
    monkeypatch.setattr(run_task, "load_start", start)
    with pytest.raises(EnoughError):
        find_runner(cfg.task_mode)(cfg, folder=folder, stop=None)

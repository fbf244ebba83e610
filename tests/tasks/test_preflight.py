"""What ranks compare before the first step, that sizes are those of the plan, and how ranks wait for one another."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from in_process import Inputs, new_run, sized, train_in, written_config
from processes import HANG_S

from sftplay.errors import RunError
from sftplay.launch.run_folder import RunFolder
from sftplay.train.exact_batch import ExactBatchMixin
from sftplay.train.preflight import CHUNK_NUMBERS, Preflight, checksum, find_problems, first_of_node, wait_for_nodes

RANK = {
    "world_size": 2, "is_main": True, "model_class": "DistributedDataParallel", "fingerprint": "a", "parameters": "b",
    "rows_per_step": 4, "distributed_type": "MULTI_CPU", "base": "c", "rows": "d",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"world_size": 1}, "rank 1 sees 1 processes instead of 2"),
        ({"model_class": "LlamaForCausalLM"}, "rank 1 wraps the model in LlamaForCausalLM instead of Distributed"),
        ({"distributed_type": "NO"}, "rank 1 is NO where cluster.strategy is ddp"),
        ({"is_main": True}, "2 ranks take themselves for the main one"),
        ({"fingerprint": "z"}, "ranks read different configs"),
        ({"parameters": "z"}, "ranks start from different weights"),
        ({"base": "z"}, "ranks start from different files of weights"),
        ({"rows": "z"}, "ranks train on different rows"),
        ({"rows_per_step": 8}, "a step takes 12 rows instead of 8"),
    ],
)
def test_preflight_names_what_differs_from_the_plan(
    change: dict[str, Any], problem: str, inputs: Inputs, tmp_path: Path
):
    cfg = sized(written_config(tmp_path, inputs))
    problems = find_problems([RANK, {**RANK, "is_main": False, **change}], cfg, world_size=2)
    assert [problem in line for line in problems] == [True] * bool(problem)


@pytest.mark.parametrize(("strategy", "fix"), [("fsdp", "zero3"), ("hsdp", "zero3"), ("ddp", "`make train`")])
def test_who_asks_for_fsdp_without_a_gpu_is_told_what_a_cpu_can_do(strategy, fix, tmp_path, monkeypatch):
    (tmp_path / "config.resolved.yaml").write_text("")
    cfg = SimpleNamespace(cluster=SimpleNamespace(strategy=strategy))
    checks = Preflight(cfg, RunFolder(tmp_path), rows="", base="")
    checks.trainer = MagicMock(args=SimpleNamespace(per_device_train_batch_size=1, gradient_accumulation_steps=1))
    checks.trainer.accelerator.num_processes = checks.trainer.micro_batcher.micro_batch = 1
    checks.trainer.generation_rows = 1
    monkeypatch.setattr("sftplay.train.preflight.find_problems", lambda *_, **__: ["rank 0 wraps the model"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RunError, match="rank 0 wraps the model") as caught:
        checks.on_train_begin(None, None, None)
    assert fix in caught.value.fix


@pytest.mark.parametrize("place", [0, CHUNK_NUMBERS, 2 * CHUNK_NUMBERS + 4], ids=["first", "second chunk", "last"])
def test_one_other_number_anywhere_is_another_digest(place: int):
    weight = torch.nn.Parameter(torch.ones(2 * CHUNK_NUMBERS + 5, dtype=torch.bfloat16))
    model = torch.nn.ParameterDict({"weight": weight})
    before = checksum(model)
    with torch.no_grad():
        weight[place] += 1
    assert checksum(model) != before


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_the_order_in_which_a_device_adds_has_no_influence(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(1)
    numbers = torch.randn(100_003) * torch.logspace(-15, 15, 100_003)[torch.randperm(100_003)]
    held = torch.nn.ParameterDict({"weight": torch.nn.Parameter(numbers.to(dtype))})
    here, real = checksum(held), torch.Tensor.sum

    def elsewhere(self: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        """As another GPU may add: the odd places, then the even ones."""
        return real(self[1::2], *given, **named) + real(self[::2], *given, **named)

    monkeypatch.setattr(torch.Tensor, "sum", elsewhere)
    assert checksum(held) == here
    with torch.no_grad():
        held["weight"].view(torch.uint8)[7] ^= 1
    assert checksum(held) != here


SIZES = {"batch_size": 2, "grad_accum": 4, "effective_batch_size": 8, "world_size": 1}


def planned_run(home: Path, inputs: Inputs, **altered: int) -> Any:
    """A run of 2 x 4 rows on one process, and plan.json as `train` writes it but for what is altered."""
    cfg, folder = new_run(home, inputs, train__batch_size=2, train__max_steps=2)
    folder.write_json("plan.json", {**SIZES, **altered})
    return cfg, folder


def test_micro_batches_that_run_have_the_rows_and_the_number_that_the_plan_says(
    tmp_path: Path, inputs: Inputs, monkeypatch: pytest.MonkeyPatch
):
    ran: list[int] = []
    compute = ExactBatchMixin.compute_loss

    def count(self: ExactBatchMixin, model: Any, micro_batch: Any, *more: Any, **named: Any) -> Any:
        if model.training:
            ran.append(len(micro_batch["input_ids"]))
        return compute(self, model, micro_batch, *more, **named)

    monkeypatch.setattr(ExactBatchMixin, "compute_loss", count)
    cfg, folder = planned_run(tmp_path, inputs)
    done = train_in(cfg, folder)
    assert ran == [SIZES["batch_size"]] * SIZES["grad_accum"] * 2
    assert [len(line["row_ids"][0]) for line in done.metrics] == [SIZES["effective_batch_size"]] * 2
    sizes = json.loads((folder.path / "status.json").read_text())["ranks"][0]["sizes"]
    assert sizes == SIZES


@pytest.mark.parametrize("key", ["grad_accum", "world_size"])
def test_a_plan_that_says_another_size_stops_the_run_before_its_first_step(key: str, tmp_path: Path, inputs: Inputs):
    cfg, folder = planned_run(tmp_path, inputs, **{key: SIZES[key] + 1})
    with pytest.raises(RunError, match=f"{key} is {SIZES[key]} where plan.json says {SIZES[key] + 1}") as caught:
        train_in(cfg, folder)
    assert caught.value.exit_code == 5
    assert not folder.metrics.exists() or folder.metrics.read_text() == ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Of a run on two nodes with two processes each; this is rank 2, the first one of the second node."""
    for name, value in {"WORLD_SIZE": 4, "RANK": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.update_status(state="running", exit_code=None)
    return folder


def test_the_first_rank_of_a_node_waits_for_the_other_nodes(folder: RunFolder):
    (folder.logs / ".ready-2").touch()  # an earlier launch has left it
    with first_of_node(folder):
        assert not (folder.logs / ".ready-2").exists()
    thread = threading.Thread(target=wait_for_nodes, args=(folder,))
    thread.start()
    thread.join(1)
    assert thread.is_alive()
    (folder.logs / ".ready-0").touch()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert (folder.logs / ".ready-2").exists()


def test_it_ends_with_the_code_of_a_rank_elsewhere_that_has_failed(folder: RunFolder):
    folder.update_status(state="failed", exit_code=4)
    with pytest.raises(SystemExit) as end:
        wait_for_nodes(folder)
    assert end.value.code == 4

"""When a run is rehearsed before its launch, and what comes of what was measured; the device is a fake one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sftplay.cli import main
from sftplay.commands import train
from sftplay.config.load import load_config
from sftplay.errors import MachineError, RunError
from sftplay.machine.probe import Gpu, Machine
from sftplay.plan.find_shape import find_shape
from sftplay.plan.sizing import SizedRun, size_run
from sftplay.runs import memory_probe, start
from sftplay.runs.memory_probe import ProbeTarget, reason_not_to_probe, run_probe, size_by_probe
from sftplay.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
CONTEXT = 3 * GIB // 10
L4 = Gpu(0, "NVIDIA L4", 22 * GIB, 22 * GIB, (8, 9), uuid="GPU-a")
SHAPE = find_shape("Qwen/Qwen2.5-1.5B")
TENSORS = "oracle.memory_gauges:TensorGauge"


def machine(*gpus: Gpu) -> Machine:
    return Machine(gpus, "none", 64 * GIB, 8, "3.11", "Linux", {"torch": "2.13.0"}, driver="580")


def config(**values: Any) -> Any:
    changes = {"model.name": "Qwen/Qwen2.5-1.5B", "model.max_seq_len": 512, "train.effective_batch_size": 64, **values}
    return load_config(ROOT / "configs/run_lora.yaml").with_values(changes, "test")


class FakeGpu:
    """Answers requests by a law that is linear in tokens; out of memory above `limit` rows."""

    def __init__(self, fixed: int, slope: int, limit: int = 64) -> None:
        self.fixed, self.slope, self.limit = fixed, slope, limit
        self.asked: list[dict[str, Any]] = []

    def __call__(self, sized: SizedRun, request: dict[str, Any], target: ProbeTarget) -> dict[str, Any]:
        self.asked.append(request)
        points, exhausted = [], None
        for rows in request["rows"]:
            if rows > self.limit:
                exhausted = rows
                break
            tokens = rows * sized.cfg.model.max_seq_len
            peaks = {"head": self.fixed + self.slope * tokens, "layer": self.fixed // 2, "step": self.fixed // 2}
            points.append({"rows": rows, "tokens": tokens, "peaks_bytes": peaks, "reserved_bytes": 0, "seconds": 1.0})
        reserved = 5 * GIB
        free = target.gpu.free_bytes - reserved - CONTEXT
        device = {"total_bytes": target.gpu.total_bytes, "free_bytes": free, "reserved_bytes": reserved}
        return {"points": points, "accumulates": True, "out_of_memory_rows": exhausted, "device": device}


@pytest.fixture(autouse=True)
def cache_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_probe, "CACHE", tmp_path / "probes")


def probed(
    gpu: FakeGpu, tmp_path: Path, cards: Machine | None = None, **values: Any
) -> tuple[SizedRun, dict[str, Any]]:
    cfg, cards = config(**values), cards or machine(L4)

    def size(fit: Any = None) -> SizedRun:
        return size_run(cfg, cards, shape=SHAPE, fit=fit)

    return size_by_probe(size(), ProbeTarget(cards, 1, tmp_path), resize=size, run=gpu)


def test_a_measured_line_resizes_the_batch_and_everything_is_recorded(tmp_path: Path):
    # 4 GiB and 1 MiB a token: 16 rows of 512 are 12 GiB, 32 are 20 GiB, over the budget of 0.92 x 22 = 20.24 GiB
    # once 3 %, 0.5 GiB and the context are added.
    sized, record = probed(FakeGpu(4 * GIB, 2**20), tmp_path)
    assert (sized.cfg.train.batch_size, sized.cfg.train.grad_accum) == (16, 4)
    assert sized.forecast is not None
    assert sized.forecast.allocated_bytes == pytest.approx(12 * GIB, rel=1e-6)
    assert sized.forecast.components["runtime"] == CONTEXT
    assert sized.forecast.components["margin"] == pytest.approx(0.03 * 12 * GIB + GIB / 2, rel=1e-6)
    assert record["decision"] == "measured"
    assert record["fit"]["lines"]["head"] == {"fixed_bytes": 4 * GIB, "bytes_per_token": 2**20}
    assert record["after"]["batch_size"] == 16
    assert record["before"]["batch_size"] in (1, 2, 4, 8, 16, 32, 64)
    assert json.loads(json.dumps({**sized.as_plan(), "probe": record}))["probe"]["points"][0]["rows"] >= 1


def test_auto_measures_once_for_what_is_alike_and_again_for_what_is_not(tmp_path: Path):
    gpu = FakeGpu(4 * GIB, 2**20)
    first, record = probed(gpu, tmp_path)
    alike = {"seed": 5, "train.learning_rate": 1e-3, "data.train_path": "other.jsonl", "train.effective_batch_size": 32}
    again, second = probed(gpu, tmp_path, **alike)
    assert (len(gpu.asked), second["decision"]) == (1, "cached")
    assert second["fingerprint"] == record["fingerprint"]
    assert again.cfg.train.batch_size == first.cfg.train.batch_size
    assert again.forecast is not None
    assert again.forecast.components["runtime"] == CONTEXT
    others: list[tuple[Machine, dict[str, Any]]] = [
        (machine(L4), {"model.max_seq_len": 256}),
        (machine(L4), {"tuning.lora.r": 8}),
        (machine(L4), {"train.gradient_checkpointing": False}),
        (machine(replace(L4, name="NVIDIA A10")), {}),
        (replace(machine(L4), driver="570"), {}),
        (replace(machine(L4), libraries={"torch": "2.14.0"}), {}),
    ]
    for n, (cards, values) in enumerate(others, 2):
        assert probed(gpu, tmp_path, cards, **values)[1]["decision"] == "measured", values
        assert len(gpu.asked) == n


def test_nothing_is_measured_without_a_gpu_on_several_nodes_for_unknown_shapes_or_what_cannot_fit(tmp_path: Path):
    here, cpu = ProbeTarget(machine(L4), 1, tmp_path), ProbeTarget(machine(), 1, tmp_path)
    assert "no GPU" in reason_not_to_probe(size_run(config(), machine(), shape=SHAPE), cpu)
    nodes = size_run(config(), machine(L4), shape=SHAPE, world_size=2, local_processes=1)
    assert "each node" in reason_not_to_probe(nodes, here)
    assert "not known" in reason_not_to_probe(size_run(config(), machine(L4)), here)
    forced = config(**{"train.batch_size": 64, "model.max_seq_len": 8192, "train.loss_head": "standard"})
    assert "does not fit" in reason_not_to_probe(size_run(forced, machine(L4), shape=SHAPE), here)
    assert reason_not_to_probe(size_run(config(), machine(L4), shape=SHAPE), here) == ""


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"sft", "cpt", "cpt_mixed", "hrm"}))
def test_a_task_with_another_step_than_the_probe_takes_is_not_measured_and_its_plan_says_so(task: str, tmp_path: Path):
    """What sft's step takes would size a step of pairs, or of samples, wrongly."""
    gpu, changes = FakeGpu(4 * GIB, 2**20), {"task_mode": task}

    def size(fit: Any = None, **more: Any) -> SizedRun:
        return size_run(config(**changes, **more), machine(L4), shape=SHAPE, fit=fit)

    sized, record = size_by_probe(size(), ProbeTarget(machine(L4), 1, tmp_path), resize=size, run=gpu)
    assert (sized, gpu.asked, record["decision"]) == (size(), [], "none")
    assert task in record["why"]
    said = f"train.probe measures no step of task_mode {task}: its memory is estimated"
    assert said in sized.notes
    assert said not in size(**{"train.probe": "off"}).notes


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "zero1", "zero2", "zero3"])
def test_a_model_that_several_processes_split_is_not_measured_whole_in_one(strategy: str, tmp_path: Path):
    cards, gpu = machine(L4, replace(L4, index=1, uuid="GPU-b")), FakeGpu(2 * GIB, 2**16, limit=0)

    def size(fit: Any = None) -> SizedRun:
        values = {"tuning.mode": "full", "train.precision": "bf16", "cluster.strategy": strategy}
        return size_run(config(**values), cards, shape=SHAPE, fit=fit, world_size=2)

    sized, record = size_by_probe(size(), ProbeTarget(cards, 2, tmp_path), resize=size, run=gpu)
    assert (sized, gpu.asked, record["decision"]) == (size(), [], "none")
    assert strategy in record["why"]
    alone = size_run(config(**{"cluster.strategy": strategy}), machine(L4), shape=SHAPE)
    assert reason_not_to_probe(alone, ProbeTarget(machine(L4), 1, tmp_path)) == ""


def test_what_goes_wrong_leaves_the_estimate_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def broken(*_: Any, **__: Any) -> dict[str, Any]:
        raise RunError("the driver is gone")

    plain = size_run(config(), machine(L4), shape=SHAPE)
    sized, record = probed(broken, tmp_path)  # type: ignore[arg-type]
    assert (sized, record["decision"], record["why"]) == (plain, "failed", "the driver is gone")
    assert "the probe failed, the estimate stands: the driver is gone" in capsys.readouterr().out
    sized, record = probed(FakeGpu(40 * GIB, -(2**20)), tmp_path)
    assert (sized, "took less" in record["refused"]) == (plain, True)
    assert "the estimate stands" in capsys.readouterr().out


def test_a_size_that_ran_out_of_memory_is_not_chosen(tmp_path: Path):
    gpu = FakeGpu(2 * GIB, 2**16, limit=20)
    sized, record = probed(gpu, tmp_path)
    assert gpu.asked[0]["rows"] == [16, 32]
    assert (record["out_of_memory_rows"], [point["rows"] for point in record["points"]]) == (32, [16])
    # The law alone, 4 GiB for all 64 rows, would have let any size through.
    assert sized.cfg.train.batch_size == 16
    assert sized.forecast is not None
    assert sized.forecast.allocated_bytes == pytest.approx(2.5 * GIB, rel=1e-6)


def test_one_row_that_runs_out_of_memory_is_refused_and_not_remembered(tmp_path: Path):
    gpu = FakeGpu(2 * GIB, 2**16, limit=0)
    for _ in range(2):
        with pytest.raises(MachineError, match="one full row at a time ran out of memory on NVIDIA L4"):
            probed(gpu, tmp_path)
    assert [request["rows"] for request in gpu.asked] == [[16, 32], [4], [1]] * 2


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`train` believes in a GPU; what it would start is listed instead."""
    started: list[Any] = []
    monkeypatch.setattr(train, "probe", lambda: machine(L4))
    monkeypatch.setattr(start, "follow", lambda command, folder, **_: started.append(command) or 0)
    return started


def test_train_probes_before_it_writes_the_plan(
    write_config: Callable[..., Path], tmp_path: Path, on_a_gpu: list[Any], monkeypatch: pytest.MonkeyPatch
):
    gpu = FakeGpu(4 * GIB, 2**24)
    monkeypatch.setattr(memory_probe, "run_probe", gpu)
    assert main(["train", "--config", str(write_config())]) == 0
    folder = tmp_path / "outputs" / "run"
    plan = json.loads((folder / "plan.json").read_text())
    assert len(gpu.asked) == len(on_a_gpu) == 1
    assert plan["probe"]["decision"] == "measured"
    # 4 GiB and 16 MiB a token: 8 rows of 128 are 20 GiB, too much with the margin; 4 are 12 GiB.
    assert plan["probe"]["after"]["batch_size"] == plan["batch_size"] == 4
    assert plan["allocated_bytes"] == pytest.approx(12 * GIB, rel=1e-6)
    assert load_config(folder / "config.resolved.yaml").train.batch_size == 4


def small(write_config: Callable[..., Path]) -> SizedRun:
    cfg = load_config(write_config(train__gradient_checkpointing=True))
    return size_run(cfg, machine(), shape=find_shape(cfg.model.name))


@pytest.fixture
def oracle_on_path(monkeypatch: pytest.MonkeyPatch):
    """A rehearsal's process finds the gauge of live tensors."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


@pytest.mark.slow
@pytest.mark.usefixtures("oracle_on_path")
def test_a_rehearsal_is_a_process_of_its_own_that_leaves_points(write_config: Callable[..., Path], tmp_path: Path):
    request = {"rows": [1, 2], "accumulates": True, "gauge": TENSORS}
    measured = run_probe(small(write_config), request, target=ProbeTarget(machine(L4), 1, tmp_path))
    assert [point["rows"] for point in measured["points"]] == [1, 2]
    assert [point["tokens"] for point in measured["points"]] == [128, 256]
    assert (measured["out_of_memory_rows"], measured["device"]) == (None, None)

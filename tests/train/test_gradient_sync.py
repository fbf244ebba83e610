"""How two real ranks exchange gradients, plain and compressed, and the share of a step that only waits for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from forking import START, prepare_two_ranks, run_script
from in_process import Inputs

from sftplay.config.cluster import CommConfig
from sftplay.heartbeat import Heartbeat
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import free_port
from sftplay.tasks import TASKS
from sftplay.train import gradients
from sftplay.train.gradients import GradientSync, choose_hook, exposed_s

STEPS = 6

FORK_RUNS = (
    START
    + """
import json, os, sys
import sftplay.tasks.sft.task
from sftplay.train.train_run import TrainRun

train = TrainRun.train

def train_and_log(self, trainer):
    outcome = train(self, trainer)
    ddp_log = trainer.model_wrapped._get_ddp_logging_data()
    (self.folder.path / f"ddp-{os.environ['RANK']}.json").write_text(json.dumps(ddp_log))
    return outcome

TrainRun.train = train_and_log
for folder, port in zip(sys.argv[1::2], sys.argv[2::2]):
    children = [start(folder, port, rank) for rank in range(2)]
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(folder)
"""
)

VARIANTS: dict[str, dict[str, Any]] = {
    "after": {},
    "during": {"train__oom_recovery": False},
    "fp16": {"cluster__comm__hook": "fp16"},
    "powersgd": {"cluster__comm__hook": "powersgd"},
    "static": {
        "cluster__comm__static_graph": True, "cluster__comm__bucket_cap_mb": 1, "train__oom_recovery": False,
        "train__batch_size": 4, "train__grad_accum": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class TwoRanks:
    """The files of a run of two ranks."""

    losses: list[float]
    lines: list[dict[str, Any]]
    ddp: list[dict[str, Any]]
    output: str


@pytest.fixture(scope="module")
def runs(
    tiny_llama: Path, chat_rows: Path, held_out_rows: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, TwoRanks]:
    home = tmp_path_factory.mktemp("sync")
    inputs = Inputs(tiny_llama, chat_rows, held_out_rows)
    usual = {
        "train__max_steps": STEPS, "train__batch_size": 2, "train__grad_accum": 2, "tuning__mode": "full",
        "data__split": 0, "data__val_path": None, "tuning__lora": {},
    }  # fmt: skip
    folders = {name: prepare_two_ranks(home / name, inputs, **(usual | each)) for name, each in VARIANTS.items()}
    run_script(FORK_RUNS, *(word for folder in folders.values() for word in (folder.path, free_port(0))))
    return {name: _read(folder) for name, folder in folders.items()}


def _read(folder: RunFolder) -> TwoRanks:
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    ddp = [json.loads((folder.path / f"ddp-{rank}.json").read_text()) for rank in (0, 1)]
    return TwoRanks([line["loss"] for line in lines], lines, ddp, (folder.logs / "rank0.log").read_text())


@pytest.mark.slow
def test_ddps_own_exchange_gives_the_losses_of_the_exchange_after_the_window(runs: dict[str, TwoRanks]):
    assert len(runs["after"].losses) == STEPS
    assert runs["during"].losses == pytest.approx(runs["after"].losses, rel=1e-5)
    assert runs["static"].losses == pytest.approx(runs["after"].losses, rel=1e-5)
    # The keys of DDP reach DDP.
    assert [ddp_log["bucket_cap_bytes"] for ddp_log in runs["after"].ddp] == [25 * 2**20] * 2
    assert [ddp_log["bucket_cap_bytes"] for ddp_log in runs["static"].ddp] == [2**20] * 2


@pytest.mark.slow
def test_an_fp16_hook_trains_close_to_whole_gradients_and_not_the_same(runs: dict[str, TwoRanks]):
    # fp16 keeps 11 bits: a gradient is off by 2**-12 of itself at most, a loss by far less than a hundredth.
    plain, compressed = runs["after"].losses, runs["fp16"].losses
    assert compressed == pytest.approx(plain, rel=0.01)
    assert compressed != plain
    assert [ddp_log["comm_hook"] for ddp_log in runs["fp16"].ddp] == ["fp16_compress_hook"] * 2
    assert "running out of memory in that micro-batch restarts the run" in runs["fp16"].output
    assert "restarts the run" not in runs["after"].output


@pytest.mark.slow
def test_powersgd_trains_on_a_compressed_gradient(runs: dict[str, TwoRanks]):
    plain, compressed = runs["after"].losses, runs["powersgd"].losses
    # The first two steps are not compressed, and the loss of a step shows the effect of the step before it.
    assert compressed[:3] == pytest.approx(plain[:3], rel=1e-5)
    assert compressed[4:] != pytest.approx(plain[4:], rel=1e-5)
    assert compressed[-1] < compressed[0]
    assert [ddp_log["comm_hook"] for ddp_log in runs["powersgd"].ddp] == ["powerSGD_hook"] * 2
    assert "PowerSGD is lossy" in runs["powersgd"].output


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_line_of_metrics_has_the_share_of_a_step_that_is_exposed_communication(runs: dict[str, TwoRanks], name: str):
    for line in runs[name].lines:
        share = line["step_split"]["communication_s"] / line["step_s"]
        assert line["exposed_communication_share"] == pytest.approx(share, abs=1e-3)
        assert 0 < share < 1
    assert "went to exchanging gradients" in runs[name].output


def test_exposed_time_is_the_time_of_sending_that_computing_did_not_cover():
    assert exposed_s({"backward_comm_time": 5_000_000, "backward_compute_comm_overlap_time": 2_000_000}) == 0.003
    assert exposed_s({"backward_comm_time": 5_000_000, "backward_compute_comm_overlap_time": 6_000_000}) == 0
    assert exposed_s({"iteration": 0}) == 0


def test_exposed_time_is_taken_from_backward_and_never_more_than_that(monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr("sftplay.heartbeat.time", SimpleNamespace(monotonic=lambda: clock.now))
    heartbeat = Heartbeat()
    heartbeat.enter("backward")
    clock.now += 3
    heartbeat.enter("optimizer")
    heartbeat.recount(1.0, "backward", truly="communication")
    assert heartbeat.take_seconds()["communication"] == 1.0
    heartbeat.recount(1.0, "backward", truly="communication")
    assert heartbeat.take_seconds()["communication"] == 0.0


@pytest.mark.parametrize(
    ("hook", "kind"),
    [
        ("none", DDPCommunicationHookType.NO),
        ("fp16", DDPCommunicationHookType.FP16),
        ("bf16", DDPCommunicationHookType.BF16),
        ("powersgd", DDPCommunicationHookType.POWER_SGD),
    ],
)
def test_the_hook_of_the_config_is_accelerates(hook: str, kind: DDPCommunicationHookType):
    handler = DistributedDataParallelKwargs()
    choose_hook(handler, CommConfig(hook=hook))
    assert handler.comm_hook == kind
    assert bool(handler.comm_state_option) == (hook == "powersgd")


@pytest.mark.parametrize("task", ["score", "hrm"])
def test_a_task_that_averages_gradients_itself_says_so_and_asks_ddp_nothing(monkeypatch: pytest.MonkeyPatch, task: str):
    printed: list[str] = []
    monkeypatch.setattr(gradients.log, "say", printed.append)
    monkeypatch.setattr(gradients.log, "world_size", lambda: 2)
    sync = _sync(CommConfig(hook="fp16"), task=task, replay=None)
    sync.on_train_begin(None, SimpleNamespace(global_step=0), None)
    sync.on_step_end(None, None, None)
    figures = {"step_s": 1.0, "exposed_communication_share": 0.5}
    sync.on_log(None, SimpleNamespace(global_step=1), None, logs=figures)
    sync.on_train_end(None, None, None)
    assert [line.rpartition(", ")[2] for line in printed] == ["after the computing of each step"]


def _sync(comm: CommConfig, *, task: str, replay: Any) -> GradientSync:
    """That of one of two ranks, on a trainer without a model."""
    cfg = SimpleNamespace(cluster=SimpleNamespace(comm=comm, strategy="ddp"), task_mode=task, task=TASKS[task])
    sync = GradientSync(cfg, Heartbeat())
    sync.attach(SimpleNamespace(replay=replay, accelerator=SimpleNamespace(ddp_handler=SimpleNamespace())))
    return sync


def test_gradients_after_the_window_are_sent_in_buckets_of_the_size_in_the_config(monkeypatch: pytest.MonkeyPatch):
    sent: list[int] = []
    monkeypatch.setattr(gradients.torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(gradients.torch.distributed, "all_reduce", lambda flat: sent.append(flat.nbytes))
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(5)))  # 256 KiB each
    for cap_mb, sizes in ((1, [4 * 2**18, 2**18]), (25, [5 * 2**18])):
        model.bucket_bytes_cap = cap_mb * 2**20
        sent.clear()
        gradients.average_gradients(model)
        assert sent == sizes

"""How two real ranks exchange gradients, plain and compressed, and the share of a step that only waits for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from forking import START, prepare_two_ranks, run_script
from in_process import Inputs
from plain_loss import label_losses
from transformers import AutoModelForCausalLM

from sftplay.config.load import load_resolved
from sftplay.data.pipeline import load_examples
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.ports import free_port
from sftplay.model.tokenizer import load_tokenizer
from sftplay.train.exact_batch import exposed_s, reduce_in_fp32

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
    folder: RunFolder


@pytest.fixture(scope="module")
def runs(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TwoRanks]:
    home = tmp_path_factory.mktemp("sync")
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
    return TwoRanks([line["loss"] for line in lines], lines, ddp, (folder.logs / "rank0.log").read_text(), folder)


@pytest.mark.parametrize(
    ("precision", "computes_in"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("no", None)]
)
def test_fsdp_computes_in_16_bits_and_sums_gradients_in_fp32(precision: str, computes_in: torch.dtype | None):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    reduce_in_fp32(SimpleNamespace(mixed_precision=precision, state=SimpleNamespace(fsdp_plugin=plugin)))
    policy = plugin.mixed_precision_policy
    assert (policy and (policy.param_dtype, policy.reduce_dtype)) == (computes_in and (computes_in, torch.float32))


@pytest.mark.slow
def test_ddps_own_exchange_gives_the_losses_of_the_exchange_after_the_window(runs: dict[str, TwoRanks]):
    assert len(runs["after"].losses) == STEPS
    assert runs["static"].losses == pytest.approx(runs["after"].losses, rel=1e-5)
    # The keys of DDP reach DDP.
    assert [ddp_log["bucket_cap_bytes"] for ddp_log in runs["after"].ddp] == [25 * 2**20] * 2
    assert [ddp_log["bucket_cap_bytes"] for ddp_log in runs["static"].ddp] == [2**20] * 2
    for run in runs.values():
        assert "went to exchanging gradients" in run.output
        for line in run.lines:
            share = line["step_split"]["communication_s"] / line["step_s"]
            assert line["exposed_communication_share"] == pytest.approx(share, abs=1e-3)
            assert 0 < share < 1
            weighted = sum(rank["loss"] * rank["label_tokens"] for rank in line["ranks"]) / line["label_tokens"]
            assert line["loss"] == pytest.approx(weighted, rel=1e-9)


@pytest.mark.slow
def test_each_rank_has_the_loss_of_the_rows_it_took(runs: dict[str, TwoRanks], inputs: Inputs):
    cfg = load_resolved(runs["after"].folder.resolved)
    rows = {row["row"]: row for row in load_examples(cfg, load_tokenizer(cfg.model)).train}
    model = AutoModelForCausalLM.from_pretrained(inputs.model, dtype=torch.float64)
    line = runs["after"].lines[0]  # before the first update
    for rank, ids in zip(line["ranks"], line["row_ids"], strict=True):
        losses = torch.cat([label_losses(model, rows[n]) for n in ids]).detach()
        assert (len(ids), rank["label_tokens"]) == (4, len(losses))
        assert rank["loss"] == pytest.approx(losses.mean().item(), rel=1e-4)
    assert abs(line["ranks"][0]["loss"] - line["ranks"][1]["loss"]) > 1e-3


@pytest.mark.slow
def test_a_hook_trains_on_compressed_gradients(runs: dict[str, TwoRanks]):
    plain, fp16, powersgd = (runs[name].losses for name in ("after", "fp16", "powersgd"))
    # fp16 keeps 11 bits: a gradient is off by 2**-12 of itself at most, a loss by far less than a hundredth.
    assert fp16 == pytest.approx(plain, rel=0.01)
    assert fp16 != plain
    # PowerSGD compresses from the third step on, and the loss of a step shows the effect of the step before it.
    assert powersgd[:3] == pytest.approx(plain[:3], rel=1e-5)
    assert powersgd[4:] != pytest.approx(plain[4:], rel=1e-5)
    assert powersgd[-1] < powersgd[0]
    for name, hook in (("fp16", "fp16_compress_hook"), ("powersgd", "powerSGD_hook")):
        assert [ddp_log["comm_hook"] for ddp_log in runs[name].ddp] == [hook] * 2
        assert "running out of memory in that micro-batch restarts the run" in runs[name].output
    assert "restarts the run" not in runs["after"].output
    assert "PowerSGD is lossy" in runs["powersgd"].output


def test_exposed_time_is_the_time_of_sending_that_computing_did_not_cover():
    assert exposed_s({"backward_comm_time": 5_000_000, "backward_compute_comm_overlap_time": 2_000_000}) == 0.003
    assert exposed_s({"backward_comm_time": 5_000_000, "backward_compute_comm_overlap_time": 6_000_000}) == 0
    assert exposed_s({"iteration": 0}) == 0

"""Length, size on disk and rough time of a run, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oracle.cases import FAMILIES

from sftplay.config.data import DatasetConfig
from sftplay.config.run import RunConfig
from sftplay.plan.forecast import Device, RowLengths, Setting
from sftplay.plan.memory_setup import Adapter, MemorySetup
from sftplay.plan.report import TaskReport, estimate_workload, flops_per_token
from sftplay.plan.shape_from_config import shape_from_config

SHAPE = shape_from_config(FAMILIES["llama"], name="x")
# By hand from the config: four layers of q, k, v, o and the MLP's three, and the head.
LAYER = 1024 * 1024 * 2 + 1024 * 256 * 2 + 3 * 1024 * 2816
PRODUCTS = 4 * LAYER + 32_000 * 1024
PAIRS = 4 * 8 * ((1024 + 1024) * 2 + (1024 + 256) * 2 + 3 * (1024 + 2816))
LORA = MemorySetup(weight_bytes=2, compute_bytes=2, stream_bytes=2, adapter=Adapter(rank=8), checkpointing=False)
CPU = Device(name="this CPU", is_gpu=False, total_bytes=2**34, free_bytes=2**34, cores=4)
GPU = Device(name="a card", is_gpu=True, total_bytes=2**34, free_bytes=2**34, tflops=100.0)


def setting(device: Device = CPU, **more: Any) -> Setting:
    return Setting(shape=SHAPE, execution=LORA, device=device, **more)


def config(tmp_path: Path, rows: int = 0, suffix: str = ".jsonl", **train: Any) -> RunConfig:
    path = tmp_path / f"rows{suffix}"
    path.write_text('{"text": "x"}\n\n' * rows)
    tree = {
        "model": {"name": "x", "max_seq_len": 100},
        "data": {"train_path": str(path)},
        "train": {"effective_batch_size": 8, "save_total_limit": 3, **train},
    }
    return RunConfig.model_validate(tree)


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 3), (2.0, 5), (0.1, 1)])
def test_steps_are_the_rows_of_all_epochs_in_effective_batches_rounded_up(tmp_path: Path, epochs: float, steps: int):
    found = estimate_workload(config(tmp_path, rows=20, epochs=epochs), setting())
    assert (found.steps, found.tokens) == (steps, steps * 8 * 100)
    assert found.steps_reason == "20 rows, every row at full length"


def test_epochs_are_the_decimal_number_that_was_written(tmp_path: Path):
    # 1.1 of 100 rows are 110; in binary numbers they are 110.00000000000001, a step more.
    assert estimate_workload(config(tmp_path, rows=100, epochs=1.1, effective_batch_size=10), setting()).steps == 11


def test_operations_a_token_are_those_of_the_products_and_their_passes():
    # Forward, and the gradient of what goes in; frozen weights have no gradient of their own.
    assert flops_per_token(setting()) == 4 * PRODUCTS
    recomputed = replace(LORA, checkpointing=True)
    assert flops_per_token(replace(setting(), execution=recomputed)) == 6 * PRODUCTS
    whole = replace(recomputed, adapter=None)
    assert flops_per_token(replace(setting(), execution=whole)) == 8 * PRODUCTS


def test_seconds_are_operations_over_the_speed_that_the_basis_names(tmp_path: Path):
    cfg = config(tmp_path, max_steps=10)
    operations = 10 * 8 * 100 * 4 * PRODUCTS
    on_cpu = estimate_workload(cfg, setting())
    assert on_cpu.seconds == pytest.approx(operations / (4 * 20e9))
    assert on_cpu.time_basis == "20 GFLOP/s a core assumed, every row at full length"
    on_gpus = estimate_workload(cfg, setting(GPU, world_size=2))
    assert on_gpus.seconds == pytest.approx(operations / (2 * 0.35 * 100e12))
    assert on_gpus.time_basis == "35% of 100 TFLOP/s a GPU (data sheet), every row at full length"
    unknown = estimate_workload(cfg, setting(replace(GPU, tflops=None)))
    assert unknown.seconds is None
    assert "a card is not in the table" in unknown.time_basis


def test_the_disk_holds_the_kept_checkpoints_one_that_is_written_and_the_result(tmp_path: Path):
    found = estimate_workload(config(tmp_path, max_steps=1), setting())
    assert found.checkpoint_bytes == PAIRS * (4 + 8)  # fp32 pairs, and two fp32 moments
    assert found.disk_bytes == 4 * found.checkpoint_bytes + PAIRS * 4


def documents(tmp_path: Path, **changes: Any) -> RunConfig:
    plain = config(tmp_path, rows=20).model_dump()
    return RunConfig.model_validate(plain | {"task_mode": "cpt", "cpt": {"block_size": 50, **changes}})


def test_every_token_is_said_to_be_learned_where_no_chats_are_among_the_documents(tmp_path: Path):
    assert TaskReport().describe_tokens(documents(tmp_path), 50) == "full blocks of 50 tokens, every one learned"
    chats = DatasetConfig(name="chats", path="chats.jsonl", type="chat")
    mixed = documents(tmp_path).model_copy(update={"task_mode": "cpt_mixed", "datasets": [chats]})
    assert TaskReport().describe_tokens(mixed, 50) == "full blocks of 50 tokens"


def test_a_run_on_documents_is_planned_with_full_blocks(tmp_path: Path):
    # A step of 8 blocks learns 8 x 49 new tokens; the first token of a block is context.
    found = estimate_workload(documents(tmp_path, train_tokens=8 * 49 * 3 + 1), setting())
    assert (found.steps, found.tokens) == (4, 4 * 8 * 50)
    assert found.steps_reason == "cpt.train_tokens, full blocks of 50 tokens"
    unknown = estimate_workload(documents(tmp_path), setting())
    assert (unknown.steps, unknown.tokens) == (None, None)  # lines of the file are documents, not blocks
    known = estimate_workload(documents(tmp_path), setting(), lengths=RowLengths(longest=50, mean=50, count=30))
    assert known.steps == 12  # three epochs of 30 blocks

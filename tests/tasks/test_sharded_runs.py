"""One config on one process and, split by ZeRO or FSDP, on two: the same curve, weights and answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from processes import HANG_S
from run_outputs import Outputs
from safetensors.torch import load_file

from sftplay.config.load import load_config
from sftplay.launch.run_folder import new_folder

ROOT = Path(__file__).resolve().parents[2]
CPU_FSDP = ROOT / "benchmarks" / "cpu_fsdp"
"""accelerate shards by FSDP on accelerators only; this lets it do so here."""

CASES = [
    (strategy, mode) for mode in ("full", "lora", "qlora") for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp")
]

WRAPPED = {"ddp": "DistributedDataParallel", "zero": "DeepSpeedEngine", "fsdp": "FSDP"}
TYPES = {"ddp": "MULTI_CPU", "zero": "DEEPSPEED", "fsdp": "FSDP"}

Train = Callable[..., tuple[Path, str]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of which each learns 1 or about 200 tokens."""
    path = tmp_path_factory.mktemp("unequal") / "rows.jsonl"
    answers = [
        " ".join(["river", "stone", "light", "boats"][(n + k) % 4] for k in range(1 if n % 2 else 60))
        for n in range(16)
    ]
    chats = [
        [{"role": "user", "content": f"row {n}"}, {"role": "assistant", "content": text}]
        for n, text in enumerate(answers)
    ]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture(scope="module")
def alone() -> dict[str, Path]:
    """Mode -> the run of one process, made once."""
    return {}


@pytest.fixture
def train(
    write_config: Callable[..., Path], sftplay: Callable[..., CompletedProcess[str]], rows: Path, tmp_path: Path
) -> Train:
    def run(name: str, processes: int, *, shim: bool = True, **keys: Any) -> tuple[Path, str]:
        changes = {
            "train__max_steps": 12, "train__effective_batch_size": 8, "train__batch_size": 2,
            "train__learning_rate": 0.005, "train__warmup_ratio": 0.0, "train__optim": "adamw_torch",
            "model__max_seq_len": 256, "data__train_path": str(rows), "eval__after": True, "eval__max_new_tokens": 4,
        }  # fmt: skip
        config = write_config(f"{name}.yaml", run_name=name, **{**changes, **keys})
        env = {"PYTHONPATH": str(CPU_FSDP)} if shim else {}
        done = sftplay("train", "--config", config, "--nproc", processes, env=env, timeout=HANG_S)
        return tmp_path / "outputs" / name, done.stdout + done.stderr

    return run


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    (path,) = [*run.glob("model/*.safetensors"), *run.glob("adapter/*.safetensors")]
    return load_file(path)


@pytest.mark.contract
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [pytest.param(*case, id="-".join(case)) for case in CASES],
)
def test_a_sharded_run_has_the_curve_of_one_process(strategy: str, mode: str, train: Train, alone: dict[str, Path]):
    if mode not in alone:
        alone[mode], output = train(f"alone-{mode}", 1, tuning__mode=mode)
        assert len(losses(alone[mode])) == 12, output
        assert losses(alone[mode])[-1] < losses(alone[mode])[0] * (0.9 if mode == "full" else 1.0)
    run, output = train(f"{strategy}-{mode}", 2, tuning__mode=mode, cluster__strategy=strategy)
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "done", output
    assert losses(run) == pytest.approx(losses(alone[mode]), abs=1e-4)
    ours, theirs = weights(run), weights(alone[mode])
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in theirs) <= 1e-4
    figures = [json.loads((each / "eval" / "after.json").read_text()) for each in (run, alone[mode])]
    assert figures[0]["loss"] == pytest.approx(figures[1]["loss"], abs=1e-4)
    kind = strategy.rstrip("123")
    assert [rank["distributed_type"] for rank in status["ranks"]] == [TYPES[kind]] * 2
    assert all(rank["model_class"].startswith(WRAPPED[kind]) for rank in status["ranks"])
    assert [rank["is_main"] for rank in status["ranks"]] == [True, False]


@pytest.mark.contract
@pytest.mark.slow
def test_a_launch_that_accelerate_turns_into_something_else_is_stopped_before_the_first_step(train: Train):
    """FSDP on CPUs becomes two trainings that never meet, each with exit code 0."""
    run, output = train("wrong", 2, cluster__strategy="fsdp", shim=False)
    assert json.loads((run / "status.json").read_text())["exit_code"] == 5, output
    assert "instead of FSDP" in output or "where cluster.strategy is fsdp" in output
    assert "fix: write cluster.strategy: ddp, zero2 or zero3; accelerate knows no FSDP on a CPU" in output
    assert not (run / "metrics.jsonl").exists() or not losses(run)


@pytest.mark.contract
@pytest.mark.long
def test_a_run_split_by_fsdp_goes_on_on_other_numbers_of_processes(
    train: Train, sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path
):
    """Twelve rows a step on 2, then 3, then 4 processes, the adapter's optimizer with them."""
    changes = {
        "tuning__mode": "lora", "tuning__lora__dropout": 0.0, "cluster__strategy": "fsdp", "train__max_steps": 9,
        "train__effective_batch_size": 12, "train__batch_size": "auto", "train__save_steps": 3,
        "train__save_total_limit": 9, "eval__after": False, "data__val_path": None, "data__split": 0,
    }  # fmt: skip
    whole, output = train("whole", 2, **changes)
    assert len(losses(whole)) == 9, output
    runs, before = Outputs(tmp_path), 2
    shutil.copytree(whole, whole.with_name("moved"))
    for last, now in ((3, 3), (6, 4)):
        runs.cut_off("moved", last)
        words = ["--config", tmp_path / "whole.yaml", "--nproc", now, "run_name=moved"]
        done = sftplay("resume", *words, env={"PYTHONPATH": str(CPU_FSDP)}, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"began on {before} process(es) and continues on {now}, each with" in done.stdout
        assert [rank["distributed_type"] for rank in runs.status("moved")["ranks"]] == ["FSDP"] * now
        before = now
    assert [line["attempt"] for line in runs.metrics("moved")] == [1] * 3 + [2] * 3 + [3] * 3
    assert losses(runs.folder("moved").path) == pytest.approx(losses(whole), abs=1e-4)
    ours, theirs = runs.weights("moved"), runs.weights("whole")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-4


REFUSED = [
    ("fsdp", 2, 1, "one process trains without fsdp"),
    ("fsdp", 1, 2, "one process trains without fsdp"),
    ("hsdp", 4, 8, "other copies than 4 did"),
    ("zero1", 2, 4, "one part for each of 2 processes, not for 4"),
    ("zero3", 2, 1, "one part for each of 2 processes, not for 1"),
]


@pytest.mark.parametrize(("strategy", "before", "now", "message"), REFUSED)
def test_a_move_that_no_checkpoint_survives_is_refused_with_its_reason(
    strategy: str, before: int, now: int, message: str, write_config: Callable[..., Path],
    sftplay: Callable[..., CompletedProcess[str]], tmp_path: Path,
):  # fmt: skip
    config = write_config(cluster__strategy=strategy, train__batch_size="auto", data__val_path=None)
    folder = new_folder(load_config(config), str(config))
    folder.create()
    checkpoint = folder.checkpoints / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE.json").write_text(json.dumps({"step": 4, "world_size": before}))
    shutil.copy(config, folder.resolved)
    done = sftplay("resume", "--config", config, "--nproc", now, "--dry-run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
    assert f"--nproc={before}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("head", ["standard", "chunked"])
def test_a_run_that_fsdp_splits_in_16_bits_has_the_losses_of_one_process(head: str, train: Train):
    """Counts and losses in 16 bits would have three digits."""
    keys = {"tuning__mode": "full", "train__precision": "bf16", "train__loss_head": head, "train__max_steps": 2}
    alone, _ = train("alone", 1, **keys, eval__after=False)
    split, output = train("split", 2, **keys, eval__after=False, cluster__strategy="fsdp")
    assert losses(split) == pytest.approx(losses(alone), abs=5e-3), output


@pytest.mark.slow
def test_a_head_that_trains_whole_beside_an_adapter_learns_from_the_rows_of_all_ranks(train: Train, tiny_llama: Path):
    keys = {"train__loss_head": "chunked", "train__max_steps": 3, "eval__after": False, "model__name": str(tiny_llama)}
    keys |= {"tuning__mode": "lora", "tuning__lora": {"r": 4, "modules_to_save": ["lm_head"]}}
    alone, _ = train("alone", 1, **keys)
    split, output = train("split", 2, **keys, cluster__strategy="fsdp")
    assert losses(split) == pytest.approx(losses(alone), abs=1e-4), output

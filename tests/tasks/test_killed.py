"""Ten kill -9, each continued to the end: the result is, bit for bit, that of a run that nobody disturbed.

Kills during steps come from outside and hit the whole tree of processes. Those at a chosen moment of writing come from
a hook on PYTHONPATH that listens to Python's own audit events; the kit has no switch for tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from holding import Hold, write_hook
from killed_worker import killed_at
from processes import HANG_S, is_alive, wait_until

from sftplay.data.pipeline import training_order

ROOT = Path(__file__).resolve().parents[2]
ROWS, STEP_ROWS, STEPS, SAVE_STEPS, SEED = 70, 8, 18, 5, 42

pytestmark = pytest.mark.slow


@dataclass
class Shop:
    """Runs of three modes on the same rows, below one folder."""

    root: Path

    def command(self, verb: str, mode: str, name: str) -> list[str]:
        config = str(self.root / f"{mode}.yaml")
        return [sys.executable, "-m", "sftplay", verb, "--config", config, f"run_name={name}"]

    def start(self, verb: str, mode: str, name: str, **environment: str) -> subprocess.Popen[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        with (self.root / f"{name}.txt").open("a") as out:
            return subprocess.Popen(
                self.command(verb, mode, name), cwd=ROOT, env=env, stdout=out, stderr=out, text=True
            )

    def run(self, verb: str, mode: str, name: str, **environment: str) -> int:
        return self.start(verb, mode, name, **environment).wait(HANG_S)

    def said(self, name: str) -> str:
        return (self.root / f"{name}.txt").read_text()

    def folder(self, name: str) -> Path:
        return self.root / "outputs" / name

    def metrics(self, name: str) -> list[dict[str, Any]]:
        path = self.folder(name) / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def weights(self, name: str) -> bytes:
        files = [*self.folder(name).glob("adapter/*.safetensors"), *self.folder(name).glob("model/*.safetensors")]
        (file,) = files
        return file.read_bytes()

    def complete(self, name: str) -> list[int]:
        markers = self.folder(name).glob("checkpoints/checkpoint-*/COMPLETE.json")
        return sorted(int(path.parent.name.rpartition("-")[2]) for path in markers)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, chat_rows: Path) -> Shop:
    root = tmp_path_factory.mktemp("killed runs")
    model = shutil.copytree(tiny_llama, root / "model")  # full tuning has no dropout but the model's own
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    for mode in ("full", "lora", "qlora"):
        values = {
            "seed": SEED,
            "output_dir": str(root / "outputs"),
            "model": {"name": str(model), "max_seq_len": 64},
            "tuning": {"mode": mode, "lora": {"r": 4, "dropout": 0.1}},
            "train": {
                "epochs": 2.0, "effective_batch_size": STEP_ROWS, "batch_size": 1, "learning_rate": 0.01,
                "gradient_checkpointing": False, "save_steps": SAVE_STEPS,
            },
            "data": {"train_path": str(chat_rows), "split": 0, "processed_dir": str(root / "processed")},
            "logging": {"steps": 1, "backend": "none", "row_ids": True},
        }  # fmt: skip
        (root / f"{mode}.yaml").write_text(json.dumps(values))
    return Shop(root)


@pytest.fixture(scope="module")
def undisturbed(shop: Shop) -> Callable[[str], str]:
    """Name of the run of a mode that nobody disturbed; made when it is asked for."""

    def name_of(mode: str) -> str:
        name = f"{mode}-whole"
        if not shop.folder(name).exists():
            assert shop.run("train", mode, name) == 0, shop.said(name)
        return name

    return name_of


def kill_tree_at_step(shop: Shop, mode: str, name: str, step: int) -> None:
    """Start a run and SIGKILL parent and worker when `step` is in metrics.jsonl and the next one is not."""
    hold = Hold(shop.root / name)
    parent = shop.start("train", mode, name, **hold.after_step(step + 1, write_hook(shop.root / "holding")))
    assert hold.wait(parent), shop.said(name)
    assert len(shop.metrics(name)) == step
    tree = [parent.pid, *(each.pid for each in psutil.Process(parent.pid).children(recursive=True))]
    for pid in tree:
        with suppress(ProcessLookupError):  # it dies with its parent
            os.kill(pid, signal.SIGKILL)
    assert parent.wait(HANG_S) == -signal.SIGKILL
    wait_until(lambda: not any(map(is_alive, tree)))


def assert_same_run(shop: Shop, name: str, whole: str) -> None:
    """The run ended with the undisturbed one's weights, metrics and rows."""
    assert shop.weights(name) == shop.weights(whole)
    actual, expected = shop.metrics(name), shop.metrics(whole)
    assert [line["step"] for line in actual] == list(range(1, STEPS + 1))
    for line, other in zip(actual, expected, strict=True):
        for key in ("loss", "learning_rate", "grad_norm", "label_tokens", "row_ids"):
            assert line[key] == other[key], (line["step"], key)
    order = training_order(ROWS, STEPS * STEP_ROWS, seed=SEED)
    for place, line in enumerate(actual):
        assert sorted(line["row_ids"][0]) == sorted(order[place * STEP_ROWS : (place + 1) * STEP_ROWS])


def resume_and_compare(shop: Shop, mode: str, name: str, whole: str) -> None:
    """Continue a killed run: from its newest complete checkpoint, with a message, to the undisturbed run's end."""
    newest = max(shop.complete(name), default=None)
    assert not list(shop.folder(name).glob("adapter")) + list(shop.folder(name).glob("model"))
    before = len(shop.said(name))
    assert shop.run("resume", mode, name) == 0, shop.said(name)
    output = shop.said(name)[before:]
    if newest is None:
        assert "no complete checkpoint: starting from the beginning" in output
    else:
        assert re.search(rf"continuing from .*checkpoint-{newest}\b", output), output
    assert_same_run(shop, name, whole)


@pytest.mark.contract
@pytest.mark.parametrize(("mode", "step"), [("lora", 7), ("lora", 13), ("full", 6), ("full", 16), ("qlora", 11)])
def test_run_killed_during_steps_ends_as_if_nothing_had_been(
    shop: Shop, undisturbed: Callable[[str], str], mode: str, step: int
):
    whole, name = undisturbed(mode), f"{mode}-at-{step}"
    kill_tree_at_step(shop, mode, name, step)
    assert shop.complete(name), "a checkpoint lies before this step"
    resume_and_compare(shop, mode, name, whole)


@pytest.mark.contract
def test_run_killed_before_its_first_checkpoint_starts_again(shop: Shop, undisturbed: Callable[[str], str]):
    whole = undisturbed("qlora")
    kill_tree_at_step(shop, "qlora", "qlora-early", 2)
    assert shop.complete("qlora-early") == []
    resume_and_compare(shop, "qlora", "qlora-early", whole)


MOMENTS = {
    "the checkpoint's folder is made": ("lora", "os.mkdir", r"checkpoint-10$", [5]),
    "weights are written, the trainer's state is not": ("full", "open", r"checkpoint-10/trainer_state\.json$", [5]),
    "all files are written, the marker is not in place": ("qlora", "os.rename", r"checkpoint-10/COMPLETE\.json$", [5]),
    "the last step is done, the result is not saved": ("lora", "os.mkdir", r"\.adapter\.part$", [15, STEPS]),
}


@pytest.mark.contract
@pytest.mark.parametrize("moment", MOMENTS)
def test_run_killed_while_files_are_written_ends_as_if_nothing_had_been(
    shop: Shop, undisturbed: Callable[[str], str], moment: str
):
    mode, event, path, complete = MOMENTS[moment]
    whole, name = undisturbed(mode), f"{mode}-{list(MOMENTS).index(moment)}"
    code = shop.run("train", mode, name, **killed_at(shop.root, event, path))
    assert code == 5, shop.said(name)
    assert shop.complete(name) == complete
    resume_and_compare(shop, mode, name, whole)


@pytest.mark.contract
def test_flipped_byte_in_a_complete_checkpoint_is_named_and_the_one_before_is_used(
    shop: Shop, undisturbed: Callable[[str], str]
):
    whole, name = undisturbed("lora"), "lora-flipped"
    kill_tree_at_step(shop, "lora", name, 12)
    assert shop.complete(name) == [5, 10]
    file = shop.folder(name) / "checkpoints" / "checkpoint-10" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert shop.run("resume", "lora", name) == 0, shop.said(name)
    output = shop.said(name)
    assert "skipping checkpoint-10: optimizer.pt has changed (sha256)" in output
    assert re.search(r"continuing from .*checkpoint-5\b", output)
    assert_same_run(shop, name, whole)

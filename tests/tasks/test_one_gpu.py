"""One process that sees two GPUs trains on one: each task's trainer, on a machine that is said to have two."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from grpo_run import grpo_inputs, grpo_options
from hrm_run import new_hrm_run, write_puzzles
from in_process import Inputs, new_run
from score_run import score_inputs, score_options

from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.worker import find_runner
from sftplay.train.guards import StopOnSignal
from sftplay.train.train_run import RunSetup, TrainRun


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers counts two GPUs (`_setup_devices`), and torch computes on the CPU all the same."""
    own = RunSetup._device_arguments
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(RunSetup, "_device_arguments", lambda self: {**own(self), "use_cpu": False})


class Built(Exception):
    """The trainer is built."""


def arguments_of(cfg: RunConfig, folder: RunFolder) -> Any:
    """The arguments of the trainer that the run's task builds."""

    def stop(_: TrainRun, trainer: Any) -> None:
        raise Built(trainer)

    with patch.object(TrainRun, "train", stop), pytest.raises(Built) as built:
        find_runner(cfg.task_mode)(cfg, folder=folder, stop=StopOnSignal())
    return built.value.args[0].args


@pytest.mark.parametrize("task", ["sft", "grpo", "score", "hrm"])
def test_each_task_trains_on_one_of_two_gpus(
    task: str, two_gpus: None, inputs: Inputs, tiny_llama: Path, tmp_path: Path
):
    """TRL 1.16 refuses two: "does not support `nn.DataParallel`"."""
    if task == "hrm":
        cfg, folder = new_hrm_run(tmp_path, write_puzzles(tmp_path / "puzzles"))
    elif task == "grpo":
        prompts = grpo_inputs(tiny_llama, tmp_path)
        cfg, folder = new_run(tmp_path, prompts, **grpo_options(prompts))
    elif task == "score":
        cfg, folder = new_run(tmp_path, score_inputs(tmp_path), **score_options())
    else:
        cfg, folder = new_run(tmp_path, inputs)
    arguments = arguments_of(cfg, folder)
    assert arguments.n_gpu == 1
    assert task != "hrm" or arguments.train_batch_size == cfg.train.effective_batch_size

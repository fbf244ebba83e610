"""A small run of task hrm: a few puzzles of three cells, a model of some hundred weights, few steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from small_run import write_values

from sftplay.atomic import write_text
from sftplay.config.load import load_config, load_resolved
from sftplay.config.resolved import dump_resolved
from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.probe import probe
from sftplay.plan.sizing import size_run
from sftplay.tasks.hrm.puzzles.folder import Alphabet, Group, write_folder

CELLS, GROUPS = 6, 40
ALPHABET = Alphabet(kind="sudoku4", symbols=" .12", shape=(2, 3))


def write_puzzles(folder: Path, *, seed: int = 0) -> Path:
    """A split for training and one for the test, each group of two puzzles with identifiers of their own."""
    draw = np.random.default_rng(seed)
    for split in ("train", "test"):
        groups = []
        for n in range(GROUPS):
            answers = draw.integers(2, 4, (2, CELLS)).astype(np.uint8)
            questions = np.where(draw.random((2, CELLS)) < 0.3, 1, answers).astype(np.uint8)
            groups.append(Group(questions, answers, sizes=[1, 1], identifiers=[1 + n % 5, 0]))
        (folder / split).mkdir(parents=True)
        write_folder(folder / split, groups, alphabet=ALPHABET, num_puzzle_identifiers=8)
    return folder


def write_hrm_run(home: Path, puzzles: Path, name: str = "run.yaml", **changes: Any) -> Path:
    """The YAML, below `home`; keyword `a__b=c` sets the key a.b."""
    values: dict[str, Any] = {
        "task_mode": "hrm",
        "run_name": "run",
        "output_dir": str(home / "outputs"),
        "data": {"train_path": str(puzzles)},
        "hrm": {
            "hidden_size": 8, "num_heads": 2, "h_layers": 1, "l_layers": 1, "n_supervision": 3, "positions": "learned",
            "puzzle_emb_lr": 0.05, "puzzle_emb_weight_decay": 0.1, "emb_sync_every": 3,
        },
        "train": {"max_steps": 8, "effective_batch_size": 8, "learning_rate": 0.01, "save_steps": 4, "eval_steps": 4},
        "logging": {"steps": 1, "backend": "none", "row_ids": True},
    }  # fmt: skip
    return write_values(home / name, values, changes)


def new_hrm_run(home: Path, puzzles: Path, **changes: Any) -> tuple[RunConfig, RunFolder]:
    """A run folder as `train` leaves it for its workers, and the config read back from it."""
    cfg = size_run(load_config(write_hrm_run(home, puzzles, **changes)), probe()).cfg
    folder = RunFolder(home / "outputs" / "run")
    folder.create()
    write_text(folder.resolved, dump_resolved(cfg))
    folder.write_json("plan.json", {"batch_size": cfg.train.batch_size})
    return load_resolved(folder.resolved), folder

"""Task mode hrm from the resolved config to the saved result: the puzzles, the model, the trainer.

It has no tokenizer, no rows of text and no pretrained model, so that it does not go through `train.run_task`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments, set_seed

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.puzzles.find import open_splits
from sftplay.data.puzzles.folder import ARRAYS, FACTS, PuzzleFolder, array_file
from sftplay.data.puzzles.sampler import TrainBatches
from sftplay.launch.run_folder import RunFolder
from sftplay.machine.libraries import recomputation_arguments
from sftplay.model.adapter import describe_parameters
from sftplay.model.source import weights_digest
from sftplay.tasks.hrm.embedding import ALL_ROWS, TableShare
from sftplay.tasks.hrm.evaluation import EvaluatePuzzles, StopWhenLearned
from sftplay.tasks.hrm.network import Grid, PuzzleModel
from sftplay.tasks.hrm.published import load_published, save_model
from sftplay.tasks.hrm.trainer import PuzzleTrainer
from sftplay.train.fingerprint import compute_fingerprint, write_manifest
from sftplay.train.guards import StopOnSignal
from sftplay.train.rank_sync import first_of_node, wait_for_nodes
from sftplay.train.save import leave_process_group
from sftplay.train.setup import make_setup
from sftplay.train.task import RowOrder, Rows, TrainerParts
from sftplay.train.train_run import TrainResult, TrainRun
from sftplay.train.upstream import on_one_gpu
from sftplay.units import format_count

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BETA2 = 0.95
"""The published decay of the second moment, where train.extra says nothing."""

MEASUREMENTS = 10
"""How often a run is measured and saved at most where the config gives no steps; published runs are measured so."""


class Places:
    """The places of the run's rows. A rank takes the rows themselves from its sampler, step by step."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < self.n:
            raise IndexError(place)
        return {"place": place}


def collate(places: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """`place`, int64 [rows]."""
    return {"place": torch.tensor([each["place"] for each in places])}


def run(cfg: RunConfig, *, folder: RunFolder, stop: StopOnSignal) -> TrainResult:
    """Prepare, train and measure, and save model/ in the run folder.

    Raises:
        ConfigError: the effective batch does not fit the puzzles or the processes.
        DataError: the puzzles are not sound.
        RunError: the run could not continue.
    """
    with first_of_node(folder):
        train, held_out = open_puzzles(cfg)
    rows = rows_of(cfg, train, held_out=held_out)
    if log.is_main():
        folder.write_json("data_report.json", rows.report)
        for name, counts in rows.report["sources"].items():
            log.say(described(name, counts), "data")
    set_seed(cfg.seed)
    model = build_model(cfg, train)
    wait_for_nodes(folder)
    setup = make_setup(cfg, folder, n_rows=len(rows.train), known=rows.order)
    train_run = TrainRun(setup, model, stop=stop, fingerprint=compute_fingerprint(cfg, rows))
    trainer = build_trainer(train_run.trainer_parts(None, rows), train=train, held_out=held_out)
    if log.is_main():
        parameters = describe_parameters(model)
        write_manifest(setup, rows, parameters=parameters, task={"grid": vars(model.grid)})
        announce(train_run, model, parameters=parameters)
    outcome = train_run.train(trainer)
    with trainer.collected():
        leave_process_group()
        if outcome.stop_signal == 0 and log.is_main():
            with trainer.averaged():
                log.say(f"result: {save_model(model, folder.path / 'model')}")
    return outcome


def open_puzzles(cfg: RunConfig) -> tuple[PuzzleFolder, PuzzleFolder | None]:
    """The puzzles to learn, and those to measure on where there are some."""
    assert cfg.data.train_path is not None
    return open_splits(cfg.data.train_path, cfg.data.val_path)


def rows_of(cfg: RunConfig, train: PuzzleFolder, *, held_out: PuzzleFolder | None) -> Rows:
    """The places of the run's rows, and what set-up, manifest and resume need to know of the puzzles."""
    batch = cfg.train.effective_batch_size
    steps = cfg.train.max_steps or max(1, train.total_steps(cfg.hrm.epochs, global_batch=batch))
    splits = {"train": train, **({"test": held_out} if held_out is not None else {})}
    files = {str(path): weights_digest(path) for split in splits.values() for path in files_of(split)}
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    # A visit to each group is the published epoch. It may be a step or two, and all held-out puzzles take longer.
    visit = math.ceil(train.facts.total_groups * train.facts.mean_puzzle_examples / batch)
    return Rows(
        train=Places(steps * batch),
        held_out=None,
        report={"files": files, "sources": {name: counts_of(split) for name, split in splits.items()}},
        order=RowOrder(steps=steps, steps_per_epoch=max(visit, math.ceil(steps / MEASUREMENTS)), digest=digest),
        trainer_evaluates=False,
    )


def files_of(split: PuzzleFolder) -> list[Path]:
    """The files of a split."""
    arrays = [array_file(split.path, each.name, array=array) for each in split.sets for array in ARRAYS]
    return [split.path / FACTS, *arrays]


def counts_of(split: PuzzleFolder) -> dict[str, Any]:
    """What the data report says of a split."""
    facts = split.facts
    return {
        "path": str(split.path),
        "kind": facts.kind,
        "groups": facts.total_groups,
        "puzzles": sum(len(each.puzzle_identifiers) for each in split.sets),
        "examples": len(split),
        "cells": facts.seq_len,
        "vocab_size": facts.vocab_size,
        "identifiers": facts.num_puzzle_identifiers,
    }


def described(name: str, counts: dict[str, Any]) -> str:
    """A split in a line."""
    return (
        f"{name}: {counts['examples']:,} examples of {counts['puzzles']:,} puzzles in {counts['groups']:,} groups, "
        f"{counts['cells']} cells each ({counts['path']})"
    )


def build_model(cfg: RunConfig, train: PuzzleFolder) -> PuzzleModel:
    """A model for these puzzles; its weights follow from the seed, or are those of `hrm.start_from`."""
    facts, is_sharded = train.facts, cfg.hrm.puzzle_emb_placement == "sharded"
    share = TableShare(log.rank(), log.world_size()) if is_sharded else ALL_ROWS
    grid = Grid(vocab_size=facts.vocab_size, cells=facts.seq_len, identifiers=facts.num_puzzle_identifiers)
    model = PuzzleModel(cfg.hrm, grid, dtype=DTYPES[str(cfg.train.precision)], share=share)
    if cfg.hrm.start_from is not None:
        load_published(model, Path(cfg.hrm.start_from))
    if share.world > 1:  # DDP would copy the first process's buffers to all others
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["puzzles.rows"])
    return model


def build_trainer(parts: TrainerParts, *, train: PuzzleFolder, held_out: PuzzleFolder | None) -> PuzzleTrainer:
    """A trainer that takes its rows from the puzzles' own sampler, and measures the held-out ones."""
    cfg, world = parts.cfg, log.world_size()
    # The model casts its weights itself; neither autocast nor recomputation has a place in its cycles.
    own = {"bf16": False, "fp16": False, "neftune_noise_alpha": None, "optim": "adamw_torch"}
    given = {"adam_beta2": BETA2, **parts.arguments, **own, **recomputation_arguments(recomputes=False)}
    trainer = PuzzleTrainer(
        parts.step,
        cfg=cfg,
        model=parts.model,
        train_rows=TrainBatches(
            train, seed=cfg.seed, global_batch=cfg.train.effective_batch_size, rank=log.rank(), world=world
        ),
        args=on_one_gpu(TrainingArguments(**given)),
        train_dataset=parts.train,
        data_collator=collate,
        callbacks=parts.callbacks,
    )
    evaluation = None
    if held_out is not None:
        assert parts.rows.order is not None
        every = cfg.train.eval_steps or parts.rows.order.steps_per_epoch
        evaluation = EvaluatePuzzles(cfg, held_out, folder=parts.folder.eval, every=every)
        trainer.add_callback(evaluation)
    if cfg.hrm.stop_at_exact is not None:
        trainer.add_callback(StopWhenLearned(cfg.hrm.stop_at_exact, evaluation))
    return trainer


def announce(train_run: TrainRun, model: PuzzleModel, *, parameters: dict[str, Any]) -> None:
    """Say what trains, how, and for how long."""
    cfg, grid = train_run.cfg, model.grid
    table = 0 if model.puzzles is None else grid.identifiers * model.puzzles.rows.shape[1]
    where = ", shared out over the processes" if model.puzzles is not None and model.puzzles.is_shared_out else ""
    log.say(
        f"{format_count(parameters['parameters'])} weights learn {grid.cells} cells of {grid.vocab_size} symbols from "
        f"{cfg.hrm.start_from or 'nothing'}, and {format_count(table)} numbers of {grid.identifiers} puzzle "
        f"identifier(s){where}"
    )
    kind = "new" if train_run.checkpoint is None else "continued"
    log.say(
        f"Starting {kind} run with {cfg.train.precision} precision on {log.world_size()} process(es): "
        f"{train_run.setup.steps} steps, at most {cfg.hrm.n_supervision} segments a puzzle"
    )

"""Task mode hrm from the resolved config to the saved result: the puzzles, the model, the trainer.

It has no tokenizer, no rows of text and no pretrained model, so that it does not go through `train.run_task`.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainingArguments, set_seed

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.model.adapter import describe_parameters
from sftplay.model.recomputation import recomputation_arguments
from sftplay.model.start_point import weights_digest
from sftplay.tasks.hrm.measuring import EvaluatePuzzles, StopWhenLearned
from sftplay.tasks.hrm.network import ALL_ROWS, Grid, PuzzleModel, TableShare, load_published, save_model
from sftplay.tasks.hrm.puzzles.folder import ARRAYS, FACTS, PuzzleFolder, array_file
from sftplay.tasks.hrm.puzzles.sampler import TrainBatches, open_splits
from sftplay.tasks.hrm.trainer import PuzzleTrainer
from sftplay.train.checkpointing import compute_fingerprint
from sftplay.train.guards import StopOnSignal
from sftplay.train.preflight import first_of_node, wait_for_nodes
from sftplay.train.run_task import leave_process_group
from sftplay.train.task import RowOrder, Rows, TrainerParts
from sftplay.train.train_run import TrainResult, TrainRun, make_setup, write_manifest
from sftplay.train.upstream import on_one_gpu
from sftplay.units import format_count


def run(cfg: RunConfig, *, folder: RunFolder, stop: StopOnSignal) -> TrainResult:
    """Prepare, train and measure, and save model/ in the run folder.

    Raise ConfigError where the effective batch does not fit the puzzles or the processes, DataError where the puzzles
    are not sound, RunError where the run could not continue.
    """
    with first_of_node(folder):
        train, held_out = open_puzzles(cfg)
    rows = make_rows(cfg, train, held_out=held_out)
    if log.is_main():
        folder.write_json("data_report.json", rows.report)
        for name, counts in rows.report["sources"].items():
            puzzles = f"{counts['puzzles']:,} puzzles in {counts['groups']:,} groups, {counts['cells']} cells each"
            log.say(f"{name}: {counts['examples']:,} examples of {puzzles} ({counts['path']})", "data")
    set_seed(cfg.seed)
    model = build_model(cfg, train)
    wait_for_nodes(folder)
    setup = make_setup(cfg, folder, n_rows=len(rows.train), known=rows.order)
    train_run = TrainRun(setup, model, stop=stop, fingerprint=compute_fingerprint(cfg, rows))
    trainer = build_trainer(train_run.trainer_parts(None, rows), train=train, held_out=held_out)
    if log.is_main():
        grid, table, parameters = model.grid, model.puzzles, describe_parameters(model)
        write_manifest(setup, rows, parameters=parameters, task={"grid": vars(grid)})
        numbers = 0 if table is None else grid.identifiers * table.rows.shape[1]
        where = ", shared out over the processes" if table is not None and table.is_shared_out else ""
        log.say(
            f"{format_count(parameters['parameters'])} weights learn {grid.cells} cells of {grid.vocab_size} symbols "
            f"from {cfg.hrm.start_from or 'nothing'}, and {format_count(numbers)} numbers of {grid.identifiers} puzzle "
            f"identifier(s){where}"
        )
        kind = "new" if train_run.checkpoint is None else "continued"
        log.say(
            f"Starting {kind} run with {cfg.train.precision} precision on {log.world_size()} process(es): "
            f"{setup.steps} steps, at most {cfg.hrm.n_supervision} segments a puzzle"
        )
    outcome = train_run.train(trainer)
    with trainer.collected():
        leave_process_group()
        if outcome.stop_signal == 0 and log.is_main():
            with trainer.averaged():
                log.say(f"result: {save_model(model, folder.path / 'model')}")
    return outcome


def open_puzzles(cfg: RunConfig) -> tuple[PuzzleFolder, PuzzleFolder | None]:
    """Open the puzzles to learn, and those to measure on where there are some."""
    assert cfg.data.train_path is not None
    return open_splits(cfg.data.train_path, cfg.data.val_path)


def make_rows(cfg: RunConfig, train: PuzzleFolder, *, held_out: PuzzleFolder | None) -> Rows:
    """Return what set-up, manifest and resume need to know of the puzzles.

    Its rows are places alone: a rank takes the rows themselves from its sampler, step by step.
    """
    batch, files, sources = cfg.train.effective_batch_size, dict[str, str](), dict[str, dict[str, Any]]()
    steps = cfg.train.max_steps or max(1, train.total_steps(cfg.hrm.epochs, global_batch=batch))
    for name, split in {"train": train, **({"test": held_out} if held_out is not None else {})}.items():
        arrays = [array_file(split.path, part.name, array=array) for part in split.sets for array in ARRAYS]
        files |= {str(path): weights_digest(path) for path in (split.path / FACTS, *arrays)}
        facts = split.facts
        sources[name] = {
            "path": str(split.path),
            "kind": facts.kind,
            "groups": facts.total_groups,
            "puzzles": sum(len(part.puzzle_identifiers) for part in split.sets),
            "examples": len(split),
            "cells": facts.seq_len,
            "vocab_size": facts.vocab_size,
            "identifiers": facts.num_puzzle_identifiers,
        }
    # A visit to each group is the published epoch. It may be a step or two, and all held-out puzzles take longer: a run
    # is measured and saved ten times at most where the config gives no steps, as published runs are.
    visit = math.ceil(train.facts.total_groups * train.facts.mean_puzzle_examples / batch)
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    return Rows(
        train=range(steps * batch),
        held_out=None,
        report={"files": files, "sources": sources},
        order=RowOrder(steps=steps, steps_per_epoch=max(visit, math.ceil(steps / 10)), digest=digest),
        trainer_evaluates=False,
    )


def build_model(cfg: RunConfig, train: PuzzleFolder) -> PuzzleModel:
    """Build a model for these puzzles; its weights follow from the seed, or are those of `hrm.start_from`."""
    facts, is_sharded = train.facts, cfg.hrm.puzzle_emb_placement == "sharded"
    share = TableShare(log.rank(), log.world_size()) if is_sharded else ALL_ROWS
    grid = Grid(vocab_size=facts.vocab_size, cells=facts.seq_len, identifiers=facts.num_puzzle_identifiers)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[str(cfg.train.precision)]
    model = PuzzleModel(cfg.hrm, grid, dtype=dtype, share=share)
    if cfg.hrm.start_from is not None:
        load_published(model, Path(cfg.hrm.start_from))
    if share.world > 1:  # DDP would copy the first process's buffers to all others
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["puzzles.rows"])
    return model


def build_trainer(parts: TrainerParts, *, train: PuzzleFolder, held_out: PuzzleFolder | None) -> PuzzleTrainer:
    """Build a trainer that takes its rows from the puzzles' own sampler, and measures the held-out ones."""
    cfg, rank, world, batch = parts.cfg, log.rank(), log.world_size(), parts.cfg.train.effective_batch_size
    # The model casts its weights itself; neither autocast nor recomputation has a place in its cycles. 0.95 is the
    # published decay of the second moment, where train.extra says nothing.
    fixed = {"bf16": False, "fp16": False, "neftune_noise_alpha": None, "optim": "adamw_torch"}
    arguments = {"adam_beta2": 0.95, **parts.arguments, **fixed, **recomputation_arguments(recomputes=False)}
    trainer = PuzzleTrainer(
        parts.step,
        cfg=cfg,
        model=parts.model,
        train_rows=TrainBatches(train, seed=cfg.seed, global_batch=batch, rank=rank, world=world),
        args=on_one_gpu(TrainingArguments(**arguments)),
        train_dataset=parts.train,
        data_collator=lambda places: {"place": torch.tensor(places)},
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

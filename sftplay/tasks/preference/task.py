"""Preferences: learn which of two answers is better, or which single ones are (tasks dpo, ipo, kto, orpo, simpo)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback, TrainingArguments

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.report.sample import write_masked_sample
from sftplay.tasks.preference import load_pairs, measuring
from sftplay.tasks.preference.reference import ComputeReferences
from sftplay.tasks.preference.shared_prompt import PairCollator
from sftplay.tasks.preference.trainer import PreferenceTrainer
from sftplay.train.checkpointing import describe_renderer
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.upstream import on_one_gpu

T = TypeVar("T", bound=Trainer)


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the pairs in `cfg.data`; the tokenizer gets the chat template that the masks are proven for.

    Raises:
        DataError: no pair can be trained on.
    """
    log.status(f"preparing the pairs of {cfg.rows_path}", "data")
    pairs = load_pairs.load(cfg, tokenizer)
    if pairs.renderer.template:
        tokenizer.chat_template = pairs.renderer.template
    return Rows(
        train=pairs.train,
        held_out=pairs.held_out,
        report=pairs.report,
        recipe=describe_renderer(pairs.renderer),
        source=pairs,
        learned_tokens=int(pairs.report["sources"].get("train", pairs.report)["trainable_tokens"]),
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    """Show the table of the data report, and keep the first answer of one row with its mask."""
    row = rows.train[0]
    first = slice(0, row["prompt_tokens"] + row["chosen_tokens"])
    example = {**row, "input_ids": row["input_ids"][first], "labels": row["labels"][first]}
    write_masked_sample(folder, tokenizer, example=example, source=rows.source.find_source("train", 0))
    log.show(load_pairs.pairs_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Count the held-out pairs that the model gets right, and keep answers for people."""
    measuring.measure(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> PreferenceTrainer:
    """Build the trainer for rows of two answers to a prompt."""
    cfg, pairs = parts.cfg, parts.rows.source
    callbacks = [
        ComputeReferences(cfg, pairs, folder=parts.folder),
        measuring.EvaluatePairs(cfg, pairs, folder=parts.folder.eval),
    ]
    return build_pair_trainer(PreferenceTrainer, parts, callbacks)


def build_pair_trainer(kind: type[T], parts: TrainerParts, callbacks: Sequence[TrainerCallback]) -> T:
    """Build a trainer of `kind`, with these callbacks behind those of every task."""
    return kind(
        parts.step,
        cfg=parts.cfg,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=on_one_gpu(TrainingArguments(**parts.arguments)),
        train_dataset=parts.train,
        eval_dataset=parts.held_out,
        data_collator=PairCollator(parts.tokenizer.pad_token_id),
        callbacks=[*parts.callbacks, *callbacks],
    )

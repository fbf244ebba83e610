"""Continued pre-training: learn every token of documents, alone or mixed with chats.

The rows are full blocks in training order, which `data.mixture` makes. Here they meet the model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.cache import note_blocks
from sftplay.data.mixture.load import load_mixture, mixture_table
from sftplay.evaluate.perplexity import find_held_out, measure_sources
from sftplay.launch.run_folder import RunFolder
from sftplay.report.sample import write_masked_sample
from sftplay.tasks.sft import task as sft
from sftplay.train.checkpointing import describe_renderer
from sftplay.train.micro_batches import HeldOutBlocks, prove_isolation
from sftplay.train.task import RowOrder, Rows, TrainerParts


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the blocks of the sources of `cfg`. The tokenizer gets the template that the masks of chats are proven for.

    Where there are no chats, it keeps its own: the result still answers in the form that it knew.

    Raises:
        DataError: a source keeps no document.
    """
    log.status(f"preparing {', '.join(source.name for source in cfg.sources)}", "data")
    mixture = load_mixture(cfg, tokenizer)
    if mixture.renderer.template is not None:
        tokenizer.chat_template = mixture.renderer.template
    note_blocks(cfg, mixture.steps_per_epoch * cfg.train.effective_batch_size)
    names = [source.name for source in mixture.sources]
    held_out = HeldOutBlocks([mixture.held_out.get(name, ()) for name in names])
    return Rows(
        train=mixture.train,
        held_out=held_out if len(held_out) else None,
        report=mixture.report,
        recipe=describe_renderer(mixture.renderer),
        source=mixture,
        order=RowOrder(steps=mixture.steps, steps_per_epoch=mixture.steps_per_epoch, digest=mixture.fingerprint),
        source_names=tuple(names),
        learned_tokens=int(mixture.report["label_tokens"]),
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    """Show the table of the data report, and keep one block with its mask."""
    source = str(rows.source.train.pieces(0)[0][0])
    write_masked_sample(folder, tokenizer, example=rows.train[0], source=source)
    log.show(mixture_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Measure perplexity of each source's held-out documents, and loss and answers of its held-out chats."""
    mixture = rows.source
    measure_sources(model, find_held_out(mixture), tokenizer=mixture.renderer.tokenizer, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> sft.WindowedSFTTrainer:
    """Build the trainer of task sft, with blocks for rows.

    Raises:
        ConfigError: a document of a block would see another, and the config does not ask for that.
    """
    # TRL takes a `datasets.Dataset` only, and looks at its first row.
    first = Dataset.from_list([{key: list(map(int, parts.train[0][key])) for key in ("input_ids", "labels")}])
    trainer = sft.build_trainer(replace(parts, train=first))
    trainer.train_dataset = parts.train
    if not parts.cfg.cpt.cross_document:
        fix = "write cpt.cross_document: true, which lets documents see each other on purpose; or choose another model"
        prove_isolation(trainer, key="cpt.cross_document false", fix=fix)
    return trainer

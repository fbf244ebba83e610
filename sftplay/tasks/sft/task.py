"""Supervised fine-tuning: learn the assistant's turns of chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import SFTConfig, SFTTrainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.pipeline import load_examples
from sftplay.data.row_outcomes import report_table
from sftplay.evaluate.evaluate import evaluate
from sftplay.launch.run_folder import RunFolder
from sftplay.report.sample import write_masked_sample
from sftplay.train.checkpointing import describe_renderer
from sftplay.train.exact_batch import ExactBatchMixin
from sftplay.train.micro_batches import Collator, prove_isolation
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.upstream import on_one_gpu


class WindowedSFTTrainer(ExactBatchMixin, SFTTrainer):
    """TRL's trainer with the kit's window."""


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the chats and texts in `cfg.data`; the tokenizer gets the chat template that the masks are proven for.

    Raises:
        DataError: no example keeps a trainable token.
    """
    log.status(f"preparing the rows of {cfg.rows_path}", "data")
    examples = load_examples(cfg, tokenizer)
    tokenizer.chat_template = examples.renderer.template
    return Rows(
        train=examples.train,
        held_out=examples.held_out,
        report=examples.report,
        recipe=describe_renderer(examples.renderer),
        source=examples,
        learned_tokens=int(examples.report["sources"].get("train", examples.report)["trainable_tokens"]),
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    """Show the table of the data report, and keep one row with its mask."""
    write_masked_sample(folder, tokenizer, example=rows.train[0], source=rows.source.find_source("train", 0))
    log.show(report_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Measure the loss over label tokens, and compare answers with references."""
    evaluate(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> WindowedSFTTrainer:
    """Build the trainer for rows of token ids and labels."""
    cfg = parts.cfg
    # TRL 1.16 has every mixture of experts add a loss of its router, whatever its config.json says, and the window
    # would count it once a micro-batch: the step would depend on their number.
    text = parts.model.config.get_text_config()
    is_off, coefficient = not getattr(text, "output_router_logits", False), getattr(text, "router_aux_loss_coef", None)
    config = SFTConfig(
        **parts.arguments,
        loss_type="nll",
        router_aux_loss_coef=0.0 if is_off else None,
        packing=False,  # rows are packed inside the window, so that a step keeps its rows
        max_length=cfg.model.max_seq_len,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    if cfg.tuning.backend == "unsloth":
        from sftplay.model.unsloth_model import check_arguments

        check_arguments(parts.arguments, config)
    trainer = WindowedSFTTrainer(
        parts.step,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=on_one_gpu(config),
        train_dataset=parts.train,
        eval_dataset=parts.held_out,
        data_collator=Collator(parts.tokenizer.pad_token_id),
        callbacks=parts.callbacks,
    )
    if is_off and coefficient is not None:
        text.router_aux_loss_coef = coefficient  # TRL has written its own there, and the result is saved with it
    # TRL would leave Liger's loss out for one of its own, which the window passes over. The Trainer reads this later.
    trainer.args.use_liger_kernel = cfg.train.loss_head == "liger"
    if trainer.micro_batcher is not None and cfg.packs_rows:
        # Linear attention, state spaces and convolutions take their state from one packed row into the next.
        fix = "write train.packing: false, or choose a model whose layers all attend"
        prove_isolation(trainer, key="train.packing true", fix=fix)
    return trainer

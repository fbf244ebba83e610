"""Supervised fine-tuning: learn the assistant's turns of dialogues."""

from __future__ import annotations

from typing import Any

from trl import SFTConfig, SFTTrainer

from sftplay import log
from sftplay.config.schema import RunConfig
from sftplay.data.pipeline import Examples, load_examples
from sftplay.data.tally import report_table
from sftplay.deliver.evaluate import evaluate
from sftplay.launch.folder import RunFolder
from sftplay.model.adapter import add_adapter, describe_parameters, make_trainable_fp32
from sftplay.model.load import load_base
from sftplay.model.locate import locate
from sftplay.model.tokenizer import load_tokenizer
from sftplay.tasks.manifest import write_manifest
from sftplay.tasks.label_head import IGNORED
from sftplay.tasks.pieces import Collator
from sftplay.tasks.result import save_result
from sftplay.tasks.train_run import Outcome, TrainRun
from sftplay.tasks.window import Window
from sftplay.units import format_count
from sftplay.watch.guards import StopOnSignal

HEADS = {"standard": "nll", "chunked": "chunked_nll", "liger": "nll"}
"""TRL's loss_type for each of our loss heads; liger is switched on by a flag of its own."""


class Run(Window, SFTTrainer):
    """TRL's trainer with the kit's window."""


def run(cfg: RunConfig, folder: RunFolder, stop: StopOnSignal) -> Outcome:
    """Train on the labelled spans of `cfg.data` and leave an adapter or a model in the run folder.

    Examples reach the trainer as {"input_ids": int64 [tokens], "labels": int64 [tokens], "row": int}.

    Raises:
        DataError: no example keeps a trainable token.
        MachineError: model or tokenizer cannot be opened.
        RunError: the run could not go on.
    """
    tokenizer = load_tokenizer(cfg.model)
    examples = load_examples(cfg, tokenizer)
    tokenizer.chat_template = examples.renderer.template
    if log.is_main():
        folder.write_json("data_report.json", examples.report)
        log.show(report_table(examples.report))
    train_run = TrainRun(cfg, folder, stop)
    order = train_run.order_rows(len(examples.train))
    model = load_base(cfg)
    if log.is_main() and cfg.eval.before and not (folder.eval / "before.json").exists():
        evaluate(model, examples, cfg, folder.eval / "before.json")
    if cfg.tuning.mode != "full":
        model = add_adapter(model, cfg.tuning.lora)
    trainer = _build(cfg, train_run, {"model": model, "tokenizer": tokenizer, "examples": examples, "order": order})
    if log.is_main():
        parameters = describe_parameters(trainer.model)
        write_manifest(cfg, folder, examples, parameters | {"steps": train_run.steps, "order": train_run.order_hash})
        _announce(cfg, train_run, parameters)
    outcome = train_run.train(trainer)
    if outcome.stop_signal == 0 and log.is_main():
        result = save_result(trainer.model, tokenizer, cfg, folder, base=locate(cfg.model.name))
        log.say(f"result: {result}")
        if cfg.eval.after:
            evaluate(trainer.model, examples, cfg, folder.eval / "after.json")
    return outcome


def _build(cfg: RunConfig, train_run: TrainRun, parts: dict[str, Any]) -> Run:
    examples: Examples = parts["examples"]
    held_out = examples.held_out
    arguments = train_run.arguments(has_held_out=held_out is not None)
    config = SFTConfig(
        **arguments,
        loss_type=HEADS[str(cfg.train.loss_head)],
        use_liger_kernel=cfg.train.loss_head == "liger",
        packing=False,  # rows are packed inside the window, so that a step keeps its rows
        max_length=cfg.model.max_seq_len,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = Run(
        model=parts["model"],
        processing_class=parts["tokenizer"],
        args=config,
        train_dataset=examples.train.select(parts["order"]),
        eval_dataset=held_out,
        data_collator=Collator(parts["tokenizer"].pad_token_id),
        callbacks=train_run.callbacks(),
    )
    if cfg.tuning.mode != "full":
        make_trainable_fp32(trainer.model)  # TRL has just made a 4-bit base's adapter bf16
    trainer.prepare(train_run.cutter(), held_out_labels_per_row=_labels_per_row(held_out))
    return trainer


def _labels_per_row(held_out: Any) -> float:
    if held_out is None or len(held_out) == 0:
        return 0.0
    return sum(sum(label != IGNORED for label in row[1:]) for row in held_out["labels"]) / len(held_out)


def _announce(cfg: RunConfig, train_run: TrainRun, parameters: dict[str, Any]) -> None:
    share = parameters["trainable_parameters"] / parameters["parameters"]
    log.say(
        f"{cfg.tuning.mode}: {format_count(parameters['trainable_parameters'])} of "
        f"{format_count(parameters['parameters'])} weights train ({share:.1%})"
        + (f", {parameters['four_bit_layers']} layers in 4 bits" if parameters["four_bit_layers"] else "")
    )
    log.say(
        f"Starting {'new' if train_run.checkpoint is None else 'continued'} {cfg.tuning.backend} run with "
        f"{cfg.train.precision} precision on {train_run.world_size} process(es): {train_run.steps} steps"
    )

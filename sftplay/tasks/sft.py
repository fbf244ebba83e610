"""Supervised fine-tuning: learn the assistant's turns of dialogues."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from datasets import Dataset, concatenate_datasets
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTConfig, SFTTrainer

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.pipeline import Examples, load_examples
from sftplay.data.prepare.report import report_table
from sftplay.deliver.evaluate.evaluate import evaluate
from sftplay.deliver.report.sample import write_masked_sample
from sftplay.errors import DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.model.adapter import describe_parameters, freeze_beside_text, trained_weights_kept
from sftplay.model.hub import fetch_weights
from sftplay.model.load import load_result, load_start, start_adapter, stored_base
from sftplay.model.source import locate
from sftplay.model.start_point import resolve_names
from sftplay.model.tokenizer import load_tokenizer
from sftplay.model.unsloth import check_arguments
from sftplay.monitor.guards import StopOnSignal
from sftplay.tasks.run.fingerprint import fingerprint_of
from sftplay.tasks.run.manifest import write_manifest
from sftplay.tasks.run.preflight import is_split
from sftplay.tasks.run.rank_sync import GroupTimeout, first_of_node, wait_for_main, wait_for_nodes
from sftplay.tasks.run.save import part, save_result, whole_weights
from sftplay.tasks.run.train_run import Outcome, TrainRun
from sftplay.tasks.step.label_head import IGNORED
from sftplay.tasks.step.micro_batches import Collator
from sftplay.tasks.step.window import Window
from sftplay.units import format_count

FEW_STEPS = 50
"""Below this a run hardly leaves its warm-up."""

HEADS = {"standard": "nll", "chunked": "chunked_nll", "liger": "nll"}
"""TRL's loss_type for each of our loss heads; liger is switched on by a flag of its own."""


class Run(Window, SFTTrainer):
    """TRL's trainer with the kit's window."""


def run(cfg: RunConfig, folder: RunFolder, stop: StopOnSignal) -> Outcome:
    """Train on the labelled spans of `cfg.data` and leave an adapter or a model in the run folder.

    Examples reach the trainer as {"input_ids": int64 [tokens], "labels": int64 [tokens], "row": int}.

    Raises:
        DataError: no example keeps a trainable token, or held-out rows are asked for and there are none.
        MachineError: model or tokenizer cannot be opened.
        RunError: the run could not go on.
    """
    cfg = resolve_names(cfg)
    with first_of_node(folder) as is_first:
        tokenizer, examples = prepare(cfg, fetches=is_first)
        own_base = stored_base(cfg, folder.path)
    if log.is_main():
        folder.write_json("data_report.json", examples.report)
        write_masked_sample(folder, tokenizer, examples.train[0], examples.source_of("train", 0))
        log.show(report_table(examples.report))
    train_run = TrainRun(cfg, folder, stop)
    order = train_run.order_rows(len(examples.train), fingerprint_of(cfg, examples))
    model = load_start(cfg, source=own_base)
    _measure_before(model, examples, cfg, folder)
    model = make_trainable(model, cfg)
    wait_for_nodes(folder)
    trainer = build_trainer(
        cfg, train_run, {"model": model, "tokenizer": tokenizer, "examples": examples, "order": order}
    )
    if log.is_main():
        parameters = describe_parameters(trainer.model)
        write_manifest(cfg, folder, examples, parameters | {"steps": train_run.steps, "order": train_run.order_hash})
        _announce(cfg, train_run, parameters)
    outcome = train_run.train(trainer)
    weights = whole_weights(trainer) if outcome.stop_signal == 0 else None
    part()
    if outcome.stop_signal == 0 and log.is_main():
        based = cfg.with_values({"model.name": own_base, "model.revision": None}, "merged") if own_base else cfg
        base = locate(based.model.name)
        result = save_result(trainer.model, tokenizer, based, folder, base=base, weights=weights)
        log.say(f"result: {result}")
        if cfg.eval.after:
            evaluate(_whole_model(trainer, cfg, folder), examples, cfg, folder.eval / "after.json")
    return outcome


def prepare(cfg: RunConfig, *, fetches: bool) -> tuple[Any, Examples]:
    """Tokenizer and rows, from the cache where they lie there; the model's files too, where this rank `fetches` them.

    Raises:
        DataError: no example keeps a trainable token, or held-out rows are asked for and there are none.
        MachineError: the tokenizer cannot be opened.
    """
    tokenizer = load_tokenizer(cfg.model)
    examples = load_examples(cfg, tokenizer)
    _check_held_out(cfg, examples)
    tokenizer.chat_template = examples.renderer.template
    if fetches:
        fetch_weights(cfg.model.name, cfg.model.revision)
    return tokenizer, examples


def _measure_before(model: Any, examples: Examples, cfg: RunConfig, folder: RunFolder) -> None:
    path = folder.eval / "before.json"
    if not cfg.eval.before or path.exists():
        return
    if log.is_main():
        evaluate(model, examples, cfg, path)
    else:
        wait_for_main(path, folder)


def make_trainable(model: Any, cfg: RunConfig) -> Any:
    """`model` with the adapter that trains, where one does, and all that never trains frozen."""
    if cfg.tuning.mode != "full" and not hasattr(model, "peft_config"):  # else it goes on with the one it has
        model = start_adapter(model, cfg)
    if frozen := freeze_beside_text(model):
        log.say(f"note: {format_count(frozen)} weights beside the text model stay as they are: rows are text only")
    return model


def _whole_model(trainer: Run, cfg: RunConfig, folder: RunFolder) -> Any:
    """The tuned model, all of it on this rank; one of which it has a part only cannot answer by itself."""
    if not is_split(trainer):
        return trainer.model
    unset_hf_deepspeed_config()  # else transformers would split what it loads, and wait for the other ranks
    return load_result(cfg, folder.path)


def _check_held_out(cfg: RunConfig, examples: Examples) -> None:
    train, measured = cfg.train, cfg.eval
    wishes = {
        "eval.before": measured.before,
        "eval.after": measured.after,
        "train.best_metric": train.best_metric,
        "train.early_stopping": train.early_stopping,
        "train.eval_steps": train.eval_steps,
    }
    wished = [key for key, value in wishes.items() if value]
    if wished and examples.held_out is None:
        raise DataError(
            f"{', '.join(wished)} needs held-out rows, but none were held out",
            where=cfg.data.val_path or cfg.data.train_path,
            fix="raise data.split or give data.val_path",
        )


def build_trainer(cfg: RunConfig, train_run: TrainRun, parts: dict[str, Any]) -> Run:
    """The trainer of a run; `parts` are its model, tokenizer, examples and order of rows."""
    examples: Examples = parts["examples"]
    held_out = examples.held_out
    if held_out is not None and train_run.world_size > 1:
        held_out = even_out(held_out, int(cfg.train.batch_size) * train_run.world_size)
    arguments = train_run.arguments(has_held_out=held_out is not None)
    config = SFTConfig(
        **arguments,
        loss_type=HEADS[str(cfg.train.loss_head)],
        use_liger_kernel=cfg.train.loss_head == "liger",
        packing=False,  # rows are packed inside the window, so that a step keeps its rows
        max_length=cfg.model.max_seq_len,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    if cfg.tuning.backend == "unsloth":
        check_arguments(arguments, config)
    # TRL makes a 4-bit base's adapter bf16.
    with trained_weights_kept(parts["model"]) if cfg.tuning.mode != "full" else nullcontext():
        trainer = Run(
            model=parts["model"],
            processing_class=parts["tokenizer"],
            args=config,
            train_dataset=examples.train.select(parts["order"]),
            eval_dataset=held_out,
            data_collator=Collator(parts["tokenizer"].pad_token_id),
            callbacks=[*train_run.callbacks(), GroupTimeout(cfg.cluster.timeout, train_run.folder.logs)],
        )
    per_row = _labels_per_row(held_out)
    trainer.prepare(train_run.micro_batcher(), held_out_labels_per_row=per_row, replay=train_run.replay)
    return trainer


def even_out(rows: Dataset, share: int) -> Dataset:
    """`rows` and, behind them, as many without a label as make their number divisible by `share`.

    Where the last batches of several processes are not full, accelerate fills them with rows from the beginning, whose
    loss would count twice.
    """
    if len(rows) % share == 0:
        return rows
    filler = {**rows[0], "labels": [IGNORED] * len(rows[0]["labels"])}
    return concatenate_datasets([rows, Dataset.from_list([filler] * (-len(rows) % share), features=rows.features)])


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
    if train_run.steps < FEW_STEPS:
        log.say(
            f"note: {train_run.steps} steps in all are few to learn from; more epochs, or a smaller effective batch"
        )

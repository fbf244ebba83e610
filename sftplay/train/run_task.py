"""The steps that every task shares, from the resolved config to the saved result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.errors import DataError
from sftplay.launch.run_folder import RunFolder
from sftplay.model.adapter import describe_parameters, freeze_outside_text
from sftplay.model.load import load_result, load_start, start_adapter, stored_base
from sftplay.model.source import fetch_weights, locate
from sftplay.model.start_point import resolve_names
from sftplay.model.tokenizer import load_tokenizer
from sftplay.plan.memory.memory_setup import OPENED
from sftplay.train.fingerprint import compute_fingerprint, write_manifest
from sftplay.train.guards import StopOnSignal
from sftplay.train.preflight import has_sharded_weights
from sftplay.train.random_numbers import random_numbers_kept
from sftplay.train.rank_sync import first_of_node, wait_for_main, wait_for_nodes
from sftplay.train.save import gather_weights, leave_process_group, save_result
from sftplay.train.setup import describe_capacity, describe_rate, make_setup
from sftplay.train.task import Rows, Task
from sftplay.train.train_run import TrainResult, TrainRun
from sftplay.units import format_count

FEW_STEPS = 50  # below this a run hardly leaves its warm-up


def run_task(task: Task, cfg: RunConfig, *, folder: RunFolder, stop: StopOnSignal) -> TrainResult:
    """Prepare, measure before, train, save the adapter or model in the run folder, measure after.

    Raises:
        DataError: there is no row to train on, or no held-out row where the config needs some.
        MachineError: model or tokenizer cannot be opened.
        RunError: the run could not continue.
    """
    cfg = resolve_names(cfg)
    with first_of_node(folder) as is_first:
        tokenizer, new_tokens = load_tokenizer(cfg.model), list[Any]()
        if cfg.tuning.new_tokens.is_on:
            from sftplay.model.new_tokens.tokens import extend_for_run

            new_tokens = extend_for_run(tokenizer, cfg, folder=folder)
        rows = task.load_rows(cfg, tokenizer)
        check_held_out(cfg, rows)
        if is_first:
            fetch_weights(cfg.model.name, cfg.model.revision)
        extended_base = stored_base(cfg, folder.path, new_tokens=new_tokens)
    if log.is_main():
        folder.write_json("data_report.json", rows.report)
        task.report_rows(rows, tokenizer, folder=folder)
    fingerprint = compute_fingerprint(cfg, rows, new_tokens=new_tokens)
    set_seed(cfg.seed)
    model = load_start(cfg, source=extended_base, is_on_host=folder.read_json("plan.json").get(OPENED) == "host")
    measure_before(task, model, rows=rows, cfg=cfg, folder=folder)
    model = make_trainable(model, cfg, new_ids=[token.id for token in new_tokens])
    wait_for_nodes(folder)
    setup = make_setup(cfg, folder, n_rows=len(rows.train), known=rows.order)
    train_run = TrainRun(setup, model, stop=stop, fingerprint=fingerprint)
    trainer = task.build_trainer(train_run.trainer_parts(tokenizer, rows))
    others: dict[str, Any] = getattr(trainer, "other_models", {})
    if log.is_main():
        note_head(folder, off=getattr(trainer, "label_head_off", ""))
        parameters = describe_parameters(nn.ModuleList([trainer.model, *others.values()]))
        write_manifest(setup, rows, parameters=parameters, task=getattr(trainer, "facts", {}))
        announce(train_run, parameters, rows=rows)
    result = train_run.train(trainer)
    weights = gather_weights(trainer) if result.stop_signal == 0 else None
    leave_process_group()
    if log.is_main() and rows.final_report:
        folder.write_json("data_report.json", rows.final_report())
    if result.stop_signal == 0 and log.is_main():
        if extended_base:
            cfg = cfg.with_values({"model.name": extended_base, "model.revision": None}, "merged")
        base = locate(cfg.model.name)
        save_result(trainer.model, tokenizer, cfg=cfg, folder=folder, base=base, weights=weights, others=others)
        if cfg.eval.after:
            model = trainer.model
            if has_sharded_weights(trainer):  # a rank that holds a shard cannot answer by itself
                unset_hf_deepspeed_config()  # otherwise transformers would shard what it loads, and wait for the others
                model = load_result(setup.cfg, folder.path)
            task.measure(model, rows, cfg=setup.cfg, path=folder.eval / "after.json")
    return result


def note_head(folder: RunFolder, *, off: str) -> None:
    """Say that scores are computed at every position, and why, also in plan.json, which counts those at labels only."""
    if off:
        what = f"scores are computed at every position, not only at labels: {off}"
        log.say(f"note: {what}")
        plan = folder.read_json("plan.json")
        folder.write_json("plan.json", {**plan, "label_head_off": off, "notes": [*plan.get("notes", []), what]})


def check_held_out(cfg: RunConfig, rows: Rows) -> None:
    """Raise the DataError about keys that need held-out rows, where none are held out."""
    needing = ("eval.before", "eval.after", "train.best_metric", "train.early_stopping", "train.eval_steps")
    keys = [key for key in needing if cfg.get_value(key)]
    if keys and rows.held_out is None:
        raise DataError(
            f"{', '.join(keys)} needs held-out rows, but none were held out",
            where=cfg.data.val_path or cfg.rows_path,
            fix="raise data.split or give data.val_path",
        )


def measure_before(task: Task, model: Any, *, rows: Rows, cfg: RunConfig, folder: RunFolder) -> None:
    """Measure the untrained model on the main rank, once a run; the other ranks wait."""
    path = folder.eval / "before.json"
    if not cfg.eval.before or path.exists():
        return
    if log.is_main():
        with random_numbers_kept():
            task.measure(model, rows, cfg=cfg, path=path)
    else:
        wait_for_main(path, folder)


def make_trainable(model: Any, cfg: RunConfig, *, new_ids: Sequence[int] = ()) -> Any:
    """Return `model` with the adapter that trains, where one does; everything that never trains is frozen.

    The rows of the tokens `new_ids` train with an adapter.
    """
    if cfg.tuning.mode != "full" and not hasattr(model, "peft_config"):  # otherwise it continues with the one it has
        model = start_adapter(model, cfg, new_ids=new_ids)
    if frozen := freeze_outside_text(model):
        log.say(f"note: {format_count(frozen)} weights next to the text model stay as they are: rows are text only")
    return model


def announce(train_run: TrainRun, parameters: dict[str, Any], *, rows: Rows) -> None:
    """Say what trains, how, and for how long."""
    cfg, steps = train_run.cfg, train_run.setup.steps
    trainable, total = parameters["trainable_parameters"], parameters["parameters"]
    four_bit = f", {parameters['four_bit_layers']} layers in 4 bits" if parameters["four_bit_layers"] else ""
    log.say(
        f"{cfg.tuning.mode}: {format_count(trainable)} of {format_count(total)} weights train"
        f" ({trainable / total:.1%}){four_bit}"
    )
    if cfg.tuning.mode != "full" and (line := describe_capacity(trainable, rows.learned_tokens)):
        log.say(line)
    log.say(describe_rate(cfg, train_run.setup.folder.read_json("plan.json")))
    kind = {"lora": "LoRA", "qlora": "QLoRA", "full": "full"}[cfg.tuning.mode]
    kind += " (unsloth)" if cfg.tuning.backend == "unsloth" else ""
    log.say(
        f"Starting {'new' if train_run.checkpoint is None else 'continued'} {kind} run with "
        f"{cfg.train.precision} precision on {log.world_size()} process(es): {steps} steps"
    )
    if steps < FEW_STEPS:
        log.say(f"note: {steps} steps in all are few to learn from; more epochs, or a smaller effective batch")

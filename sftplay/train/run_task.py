"""The steps that every task shares, from the resolved config to the saved result."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from sftplay import log
from sftplay.atomic import whole_folder
from sftplay.config.cluster import ZERO_STAGES
from sftplay.config.run import RunConfig
from sftplay.errors import ConfigError, DataError
from sftplay.export.adapter_card import write_adapter_card
from sftplay.generate.generate import learned_positions
from sftplay.launch.run_folder import RunFolder
from sftplay.model.adapter import describe_experts, describe_parameters, freeze_outside_text
from sftplay.model.hub import fetch_weights
from sftplay.model.load import load_result, load_start, start_adapter, stored_base
from sftplay.model.source import BUILTIN, locate
from sftplay.model.start_point import resolve_names
from sftplay.model.tokenizer import load_tokenizer, set_end_tokens
from sftplay.train.checkpointing import compute_fingerprint
from sftplay.train.eval_mode import random_numbers_kept
from sftplay.train.guards import StopOnSignal
from sftplay.train.preflight import first_of_node, has_sharded_weights, wait_for_main, wait_for_nodes
from sftplay.train.task import Rows, Task
from sftplay.train.train_run import TrainResult, TrainRun, describe_capacity, describe_rate, make_setup, write_manifest
from sftplay.train.upstream import gather_zero3_weights, skip_inference_operator
from sftplay.units import format_count, plural


def gather_weights(trainer: Any) -> dict[str, dict[str, torch.Tensor]] | None:
    """Gather the weights to save from all ranks, which must all call it; only the main one gets them, by model, "" for
    the trainer's. None where every rank holds them whole.
    """
    if hasattr(trainer, "whole_weights"):
        weights = trainer.whole_weights()
        return weights if trainer.accelerator.is_main_process else None
    if trainer.is_fsdp_enabled:
        weights = trainer.accelerator.get_state_dict(trainer.model)
    elif trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        # Frozen weights are left out. With an adapter these are all the others.
        weights = gather_zero3_weights(trainer, leaves_out_frozen=hasattr(trainer.model, "peft_config"))
    else:
        return None
    return {"": weights} if trainer.accelerator.is_main_process else None


def leave_process_group() -> None:
    """End the process group on all ranks at once; only the main rank continues. Otherwise gloo's threads may abort a
    rank's process at its end (torch 2.13), and the launcher then ends the main rank too.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def save_result(
    model: Any,
    tokenizer: Any,
    *,
    cfg: RunConfig,
    folder: RunFolder,
    base: str,
    weights: Mapping[str, dict[str, torch.Tensor]] | None = None,
    others: Mapping[str, Any] | None = None,
) -> Path:
    """Save `adapter/` or `model/`, whole or not at all; one that an earlier attempt left is replaced.

    `weights` are the models' by name, "" for `model`, where a model holds only a part of them; `others` are further
    models, each saved below the result. A builtin `base` is copied to `base/`, a local one named by its absolute path,
    so that plain PEFT finds it.
    """
    is_full = cfg.tuning.mode == "full"
    target = folder.path / ("model" if is_full else "adapter")
    # Training holds fp32 weights; the result of a 16-bit run has the format in which it was computed.
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(cfg.train.precision), torch.float32)
    if not is_full and cfg.model.name.startswith(BUILTIN):
        base = str(shutil.copytree(base, folder.path / "base", dirs_exist_ok=True))
    if not is_full and Path(base).is_dir():
        base = str(Path(base).resolve())
    with whole_folder(target, replaces=True) as scratch:
        for name, part in {"": model, **(others or {})}.items():
            state = weights.get(name) if weights else None
            if not is_full:
                # The adapter that KL is measured against is no part of it. PEFT gives all but the first a folder.
                names = [adapter for adapter in ("default", "guide") if adapter in part.peft_config]
                for adapter in names:
                    part.peft_config[adapter].base_model_name_or_path = base
                    part.peft_config[adapter].revision = cfg.model.revision
                part.save_pretrained(scratch, state_dict=state, selected_adapters=names)
                continue
            if state is None:
                part.to(dtype)
            else:
                rounded = {id(tensor): tensor.to(dtype) for tensor in state.values()}
                state = {key: rounded[id(tensor)] for key, tensor in state.items()}  # tied weights stay one tensor
            part.config.use_cache = True
            if part.can_generate():  # the base's own end token is not always the one its chats end with
                set_end_tokens(part.generation_config, tokenizer)
            part.save_pretrained(scratch / name, state_dict=state)
            tokenizer.save_pretrained(scratch / name)
        if not is_full:
            tokenizer.save_pretrained(scratch)
            on_hub = None if Path(base).is_dir() else base
            write_adapter_card(scratch / "README.md", name=folder.path.resolve().name, base=on_hub)
    if is_full:
        shutil.rmtree(folder.path / "base", ignore_errors=True)  # one with rows for new tokens; the result has them
    log.say(f"result: {target}")
    return target


def run_task(task: Task, cfg: RunConfig, *, folder: RunFolder, stop: StopOnSignal) -> TrainResult:
    """Prepare, measure before, train, save the adapter or model in the run folder, measure after.

    Raise DataError without rows to train on or to hold out, MachineError where model or tokenizer cannot be opened,
    RunError where the run could not continue.
    """
    cfg = resolve_names(cfg)
    with first_of_node(folder) as is_first:
        opened = folder.at_base_commit(cfg)
        tokenizer, new_tokens = load_tokenizer(opened.model), list[Any]()
        # A run of an older release may have a list without a file of terms.
        if cfg.tuning.new_tokens.is_on or (folder.path / "new_tokens.json").is_file():
            from sftplay.model.new_tokens import extend_for_run

            new_tokens = extend_for_run(tokenizer, cfg, folder=folder)
        rows = task.load_rows(cfg, tokenizer)
        check_held_out(cfg, rows)
        if is_first:
            fetch_weights(opened.model.name, opened.model.revision)
        extended_base = stored_base(opened, folder.path, new_tokens=new_tokens)
    if log.is_main():
        folder.write_json("data_report.json", rows.report)
        task.report_rows(rows, tokenizer, folder=folder)
    fingerprint = compute_fingerprint(cfg, rows, new_tokens=new_tokens)
    set_seed(cfg.seed)
    model = load_start(
        opened, source=extended_base, is_on_host=folder.read_json("plan.json").get("model_opened_on") == "host"
    )
    if cfg.task.reads_text:
        check_vocabulary(cfg, model, tokenizer, rows=rows)
        check_positions(cfg, model, rows.report)
    if hasattr(task, "reshape_model"):
        model = task.reshape_model(model, tokenizer, cfg=cfg)
    before = folder.eval / "before.json"
    if cfg.eval.before and not before.exists():
        if log.is_main():
            with random_numbers_kept():
                task.measure(model, rows, cfg=cfg, path=before)
        else:
            wait_for_main(before, folder)
    model = make_trainable(model, cfg, new_ids=[token.id for token in new_tokens])
    if cfg.cluster.strategy in ZERO_STAGES:
        skip_inference_operator()
    wait_for_nodes(folder)
    setup = make_setup(cfg, folder, n_rows=len(rows.train), known=rows.order)
    train_run = TrainRun(setup, model, stop=stop, fingerprint=fingerprint)
    trainer = task.build_trainer(train_run.trainer_parts(tokenizer, rows))
    others: dict[str, Any] = getattr(trainer, "other_models", {})
    if log.is_main():
        if off := getattr(trainer, "label_head_off", ""):  # the plan counts scores at labels only
            what = f"scores are computed at every position, not only at labels: {off}"
            log.say(f"note: {what}")
            plan = folder.read_json("plan.json")
            folder.write_json("plan.json", {**plan, "label_head_off": off, "notes": [*plan.get("notes", []), what]})
        parameters = describe_parameters(nn.ModuleList([trainer.model, *others.values()]))
        write_manifest(setup, rows, parameters=parameters, task=getattr(trainer, "facts", {}))
        announce(train_run, parameters, rows=rows)
    result = train_run.train(trainer)
    weights = gather_weights(trainer) if result.stop_signal == 0 else None
    leave_process_group()
    if result.stop_signal == 0 and log.is_main():
        if extended_base:
            cfg = cfg.with_values({"model.name": extended_base, "model.revision": None}, "merged")
        base = locate(cfg.model.name)
        save_result(trainer.model, tokenizer, cfg=cfg, folder=folder, base=base, weights=weights, others=others)
        if cfg.eval.after:
            model = trainer.model
            if has_sharded_weights(trainer):  # a rank that holds a shard cannot answer by itself
                unset_hf_deepspeed_config()  # otherwise transformers would shard what it loads, and wait for the others
                model = getattr(task, "load_result", load_result)(opened, folder.path)
            task.measure(model, rows, cfg=setup.cfg, path=folder.eval / "after.json")
    return result


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


def check_vocabulary(cfg: RunConfig, model: Any, tokenizer: Any, *, rows: Rows) -> None:
    """Raise ConfigError where the token that pads, or one of the rows of a trained text, has no embedding."""
    known, tokens = getattr(model.config.get_text_config(), "vocab_size", None), {tokenizer.pad_token_id}
    if not known or len(tokenizer) <= known:
        return
    if not cfg.task.learns_from_rewards:
        tokens |= {max(row["input_ids"]) for part in (rows.train, rows.held_out or ()) for row in part}
    if (highest := max(map(int, tokens))) >= known:
        text = tokenizer.convert_ids_to_tokens(highest)
        raise ConfigError(
            f"token {highest} ({text!r}) has no embedding: {cfg.model.name} has {known:,}, its tokenizer knows"
            f" {len(tokenizer):,} tokens",
            where=cfg.describe_origin("model.name", unset="the config"),
            fix="give it the tokenizer that it was trained with, or embeddings for the tokens that were added:"
            " model.resize_token_embeddings(len(tokenizer)) of transformers, and save both",
        )


def check_positions(cfg: RunConfig, model: Any, report: Mapping[str, Any]) -> None:
    """Say that the rows of a data report are longer than the positions that the model was made for. Raise ConfigError
    where it has learned a vector for each position, and so none for what lies behind the last.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int):
        return
    key, tokens = "cpt.block_size" if cfg.cpt.block_size else "model.max_seq_len", cfg.row_tokens
    if not cfg.learns_documents:
        completion = tokens - cfg.prompt_tokens if cfg.task.learns_from_rewards else 0
        tokens = min(report.get("longest_tokens", 0), tokens - completion) + completion
        key = "grpo.max_completion_length" if cfg.task.turns == 1 else key
    if tokens <= most:
        return
    fix = f"write {key}: {most}"
    if cfg.task.turns == 1:
        fix = f"let grpo.max_prompt_length and {key} be at most {most} together"
    if learned_positions(model):
        what = f"rows of up to {tokens:,} tokens do not fit the {most:,} positions that {cfg.model.name} has"
        raise ConfigError(what, where=cfg.describe_origin(key, unset="the config"), fix=fix)
    log.say(
        f"note: rows of up to {tokens:,} tokens are longer than the {most:,} positions that {cfg.model.name} was made"
        f" for; to keep to them {fix}"
    )


def make_trainable(model: Any, cfg: RunConfig, *, new_ids: Sequence[int] = ()) -> Any:
    """Return `model` with the adapter that trains, where one does, and the rows of the tokens `new_ids`; all else is
    frozen.
    """
    if cfg.tuning.mode != "full" and not hasattr(model, "peft_config"):  # otherwise it continues with the one it has
        model = start_adapter(model, cfg, new_ids=new_ids)
    if cfg.tuning.mode != "full" and (experts := describe_experts(model)):
        log.say(f"note: {experts}")
    if frozen := freeze_outside_text(model):
        log.say(f"note: {format_count(frozen)} weights next to the text model stay as they are: rows are text only")
    return model


def announce(train_run: TrainRun, parameters: dict[str, Any], *, rows: Rows) -> None:
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
        f"{cfg.train.precision} precision on {log.world_size()} process(es): {plural(steps, 'step')}"
    )
    if steps < 50:  # such a run hardly leaves its warm-up
        log.say(f"note: {steps} steps in all are few to learn from; more epochs, or a smaller effective batch")
    if steps == 1 and cfg.train.warmup_ratio and not cfg.train.min_lr_ratio and cfg.train.lr_scheduler != "constant":
        log.say("warning: the only step is warm-up at rate 0 and changes nothing; train.warmup_ratio: 0 lets it learn")

"""Reinforcement learning from rewards (GRPO): the model draws completions of prompts and learns from their rewards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.load import prepare_prompts, prompts_table
from sftplay.evaluate.rewarded import evaluate_prompts, spread
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.grpo.arguments import grpo_arguments
from sftplay.tasks.grpo.dynamic_sampling import KeepDraws
from sftplay.tasks.grpo.evaluation import EvaluatePrompts
from sftplay.tasks.grpo.logprob_check import send_copies
from sftplay.tasks.grpo.prompts import PromptRows, run_order
from sftplay.tasks.grpo.rollouts import Rollouts, avoid_triton
from sftplay.tasks.grpo.sampling import Drawing
from sftplay.tasks.grpo.scoring import Judge
from sftplay.tasks.grpo.watch import SignalHealth, WatchBaseWeights
from sftplay.train.fingerprint import recipe_of
from sftplay.train.setup import on_one_gpu
from sftplay.train.task import Rows, TrainerParts


class PromptTrainer(Drawing, Rollouts, GRPOTrainer):
    """TRL's trainer with the kit's prompts and rewards."""


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """The prompts in `cfg.data`. Gives the tokenizer the chat template that asks them.

    Raises:
        DataError: no prompt is left.
    """
    prompts = prepare_prompts(cfg, tokenizer, called="prompts")
    order, known = run_order(cfg, prompts)
    return Rows(
        train=PromptRows(prompts.train, order),
        held_out=PromptRows(prompts.held_out) if len(prompts.held_out) else None,
        report=prompts.report,
        recipe=recipe_of(prompts.renderer),
        source=prompts,
        order=known,
        trainer_evaluates=False,
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    """Show the table of the data report."""
    log.show(prompts_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Greedy answers to the held-out prompts, scored by the rewards of the run."""
    evaluate_prompts(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> PromptTrainer:
    """A trainer that draws completions of the prompts in their order."""
    avoid_triton()
    cfg, judge = parts.cfg, Judge(parts.cfg, parts.rows.report["columns"])
    ends = stop_at(parts.model, parts.rows.source.renderer.end_token_ids)
    arguments = {**parts.arguments, **grpo_arguments(cfg)}
    if cfg.grpo.generation.startswith("vllm"):  # which reads its own copy of the model's settings
        arguments["generation_kwargs"] = {"stop_token_ids": ends, **(arguments.get("generation_kwargs") or {})}
    config = GRPOConfig(**arguments, reward_weights=list(judge.learned.values()))
    frozen = [WatchBaseWeights(parts.folder)] if cfg.tuning.mode != "full" else []
    trainer = PromptTrainer(
        parts.step,
        cfg=cfg,
        run_folder=parts.folder.path,
        judge=judge,
        questions=parts.rows.source.train,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=on_one_gpu(config),
        # TRL takes a `datasets.Dataset` only. Columns of any kind would not survive in one.
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        # First, so that a step whose base has changed leaves no complete checkpoint.
        callbacks=[*frozen, *parts.callbacks, SignalHealth(cfg), KeepDraws()],
    )
    trainer.train_dataset = parts.train
    if trainer.use_vllm and frozen:
        send_copies(trainer.vllm_generation)
    if parts.rows.held_out is not None:
        trainer.add_callback(evaluation_of(parts, judge))
    return trainer


def evaluation_of(parts: TrainerParts, judge: Judge) -> EvaluatePrompts:
    """What answers the held-out prompts while the run trains."""
    cfg, rows = parts.cfg, parts.rows
    assert rows.order is not None
    return EvaluatePrompts(
        cfg,
        spread(rows.source.held_out, cfg.eval.limit),
        judge=judge,
        folder=parts.folder.eval,
        every=cfg.train.eval_steps or rows.order.steps_per_epoch,
        prompt_version=rows.source.renderer.template_hash,
    )


def stop_at(model: Any, end_token_ids: Sequence[int]) -> list[int]:
    """Let completions also end where the chat template ends a turn, as answers do; all tokens that end them.

    TRL reads the model's own ends.
    """
    shipped = model.generation_config.eos_token_id or []
    ends = {*end_token_ids, *([shipped] if isinstance(shipped, int) else shipped)}
    model.generation_config.eos_token_id = sorted(ends)
    return sorted(ends)

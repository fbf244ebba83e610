"""Reinforcement learning from rewards (GRPO): the model samples completions and learns from their rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.prompts.load import prepare_prompts, prompts_table
from sftplay.evaluate.evaluate import evenly_spaced
from sftplay.evaluate.rewarded import evaluate_prompts
from sftplay.launch.run_folder import RunFolder
from sftplay.tasks.grpo.arguments import grpo_arguments
from sftplay.tasks.grpo.dynamic_sampling import KeepDraws
from sftplay.tasks.grpo.evaluation import EvaluatePrompts
from sftplay.tasks.grpo.logprob_check import send_copies
from sftplay.tasks.grpo.prompts import PromptRows, find_run_order
from sftplay.tasks.grpo.sampling import SamplingMixin
from sftplay.tasks.grpo.scoring import RewardScorer
from sftplay.tasks.grpo.watch import SignalHealth, WatchBaseWeights
from sftplay.train.fingerprint import describe_renderer
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.upstream import avoid_triton, on_one_gpu


class PromptTrainer(SamplingMixin, GRPOTrainer):
    """TRL's trainer with the kit's prompts and rewards."""


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the prompts in `cfg.data`, and set the tokenizer's chat template.

    Raises:
        DataError: no prompt is left.
    """
    prompts = prepare_prompts(cfg, tokenizer, called="prompts")
    order, known = find_run_order(cfg, prompts)
    return Rows(
        train=PromptRows(prompts.train, order),
        held_out=PromptRows(prompts.held_out) if len(prompts.held_out) else None,
        report=prompts.report,
        recipe=describe_renderer(prompts.renderer),
        source=prompts,
        order=known,
        trainer_evaluates=False,
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    """Show the table of the data report."""
    log.show(prompts_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Answer the held-out prompts greedily, and score the answers by the rewards of the run."""
    evaluate_prompts(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> PromptTrainer:
    """Build the trainer that samples completions of the prompts in training order."""
    avoid_triton()
    cfg, scorer = parts.cfg, RewardScorer(parts.cfg, parts.rows.report["columns"])
    # Completions also end with the chat template's end tokens. TRL reads them from the model's generation config.
    model_ends = parts.model.generation_config.eos_token_id or []
    model_ends = [model_ends] if isinstance(model_ends, int) else model_ends
    ends = sorted({*parts.rows.source.renderer.end_token_ids, *model_ends})
    parts.model.generation_config.eos_token_id = ends
    arguments = {**parts.arguments, **grpo_arguments(cfg)}
    if cfg.grpo.generation.startswith("vllm"):  # vLLM reads its own copy of the model's generation config
        arguments["generation_kwargs"] = {"stop_token_ids": ends, **(arguments.get("generation_kwargs") or {})}
    config = GRPOConfig(**arguments, reward_weights=list(scorer.training_weights.values()))
    frozen = [WatchBaseWeights(parts.folder)] if cfg.tuning.mode != "full" else []
    trainer = PromptTrainer(
        parts.step,
        cfg=cfg,
        run_folder=parts.folder.path,
        scorer=scorer,
        questions=parts.rows.source.train,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=on_one_gpu(config),
        # TRL takes only a `datasets.Dataset`, which does not keep columns of any type.
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        # The watch is first, so that a step with a changed base leaves no complete checkpoint.
        callbacks=[*frozen, *parts.callbacks, SignalHealth(cfg), KeepDraws()],
    )
    trainer.train_dataset = parts.train
    if trainer.use_vllm and frozen:
        send_copies(trainer.vllm_generation)
    if parts.rows.held_out is not None:
        assert parts.rows.order is not None
        evaluation = EvaluatePrompts(
            cfg,
            evenly_spaced(parts.rows.source.held_out, cfg.eval.limit),
            scorer=scorer,
            folder=parts.folder.eval,
            every_steps=cfg.train.eval_steps or parts.rows.order.steps_per_epoch,
            prompt_version=parts.rows.source.renderer.template_hash,
        )
        trainer.add_callback(evaluation)
    return trainer

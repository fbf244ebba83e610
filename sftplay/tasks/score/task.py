"""The functions of task mode score: two-turn self-correction with a guide (BiLevel SCoRe)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.data.load_prompts import prepare_prompts, prompts_table
from sftplay.evaluate.evaluate import evenly_spaced
from sftplay.launch.run_folder import RunFolder
from sftplay.model.recomputation import recompute
from sftplay.tasks.score.evaluation import EvaluateEpisodes, RewardScorer
from sftplay.tasks.score.finished import FinishedRoleModels, measure_ablation, open_role_models
from sftplay.tasks.score.role_models import ADAPTER_NAMES, RoleModels
from sftplay.tasks.score.sample_episodes import EpisodeSampler
from sftplay.tasks.score.spec import resolve_layout
from sftplay.tasks.score.trainer import EpisodeTrainer, ShardedEpisodeTrainer, collate, create_run_order
from sftplay.tasks.score.update import check_output_head
from sftplay.train.checkpointing import describe_renderer
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.upstream import on_one_gpu


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the problems in `cfg.data`, and set the tokenizer's chat template. Raise DataError where none is left."""
    prompts = prepare_prompts(cfg, tokenizer, called="problems")
    train, known = create_run_order(cfg, prompts)
    # Without held-out problems the evaluation uses the training problems.
    measured = prompts.held_out if len(prompts.held_out) else prompts.train
    return Rows(
        train=train,
        held_out=range(len(measured)),
        report=prompts.report,
        recipe=describe_renderer(prompts.renderer),
        source=prompts,
        order=known,
        trainer_evaluates=False,
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    log.show(prompts_table(rows.report))


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Measure both turns of the held-out problems, with each source of hints."""
    # A separate guide lies in the run folder and is not part of `model`.
    is_guide_elsewhere = path.stem == "after" and ADAPTER_NAMES["guide"] not in getattr(model, "peft_config", {})
    if is_guide_elsewhere and cfg.score.guidance in ("model", "model_trained"):
        role_models = open_role_models(cfg, RunFolder(path.parents[1]))
    else:
        role_models = FinishedRoleModels(model)
    measure_ablation(role_models, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> EpisodeTrainer:
    """Build the trainer that samples episodes of the problems in their order."""
    cfg, score, prompts = parts.cfg, parts.cfg.score, parts.rows.source
    if score.alpha * score.turn_discount > 1:
        log.say("warning: score.alpha x score.turn_discount is above 1: turn 1 is punished for being right", "score")
    # The models that the config asks for, and no others, on the GPUs that this process sees.
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    placement: Any = "shared" if score.placement == "auto" else score.placement
    layout = resolve_layout(cfg, placement=placement, gpus=gpus, processes=log.world_size())
    role_models = RoleModels(
        parts.model,
        has_guide=score.guidance in ("model", "model_trained"),
        guide_learns=score.guidance == "model_trained",
        has_value=score.has_value,
        value_is_separate=score.value == "separate",
        critic=score.critic if score.advantage == "critic" else None,
        layout=layout,
    )
    check_output_head(parts.model)
    # Other visible GPUs hold other parts.
    arguments = on_one_gpu(TrainingArguments(**{**parts.arguments, "eval_strategy": "no", "eval_steps": None}))
    # transformers would require its evaluation; the task's evaluation selects the best checkpoint.
    arguments.load_best_model_at_end = cfg.train.best_metric is not None
    arguments.metric_for_best_model, arguments.greater_is_better = cfg.train.best_metric, True
    trainer = (ShardedEpisodeTrainer if score.placement == "sharded" else EpisodeTrainer)(
        parts.step,
        cfg=cfg,
        run_folder=parts.folder.path,
        role_models=role_models,
        episode_sampler=EpisodeSampler(cfg, role_models, renderer=prompts.renderer),
        reward_scorer=RewardScorer(cfg, columns=parts.rows.report["columns"], tokenizer=prompts.renderer.tokenizer),
        questions=prompts.train,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=arguments,
        train_dataset=parts.train,
        data_collator=collate,
        callbacks=parts.callbacks,
    )
    if trainer.args.gradient_checkpointing and role_models.is_separate:
        recompute(role_models.models["guide"])  # as the Trainer does for the solver
    assert parts.rows.order is not None
    measured = evenly_spaced(prompts.held_out if len(prompts.held_out) else prompts.train, cfg.eval.limit)
    every = cfg.train.eval_steps or parts.rows.order.steps_per_epoch
    trainer.add_callback(
        EvaluateEpisodes(cfg, measured, folder=parts.folder.eval, every=every, extra_step=score.stage1_steps)
    )
    return trainer

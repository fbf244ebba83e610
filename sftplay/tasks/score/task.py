"""Two-turn self-correction with a guide (BiLevel SCoRe): the functions of task mode score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.data.prompts.load import prepare_prompts, prompts_table
from sftplay.evaluate.rewarded import spread
from sftplay.launch.run_folder import RunFolder
from sftplay.plan.devices.layout import Layout, layout_of
from sftplay.tasks.score.episode_rewards import EpisodeJudge
from sftplay.tasks.score.evaluation import EvaluateEpisodes
from sftplay.tasks.score.finished import FinishedCast, measure_ablation, open_cast
from sftplay.tasks.score.problems import EpisodeRows, collate, run_order
from sftplay.tasks.score.role_models import ADAPTERS, Cast
from sftplay.tasks.score.sample_episodes import Player
from sftplay.tasks.score.scoring import check_scores
from sftplay.tasks.score.sharded_trainer import ShardedEpisodeTrainer
from sftplay.tasks.score.trainer import EpisodeTrainer
from sftplay.train.fingerprint import recipe_of
from sftplay.train.setup import on_one_gpu
from sftplay.train.task import Rows, TrainerParts


def layout_of_run(cfg: RunConfig) -> Layout:
    """Which device holds which part, for the GPUs that this process sees."""
    placement: Any = "shared" if cfg.score.placement == "auto" else cfg.score.placement
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return layout_of(cfg, placement=placement, gpus=gpus, processes=log.world_size())


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """The problems in `cfg.data`. Gives the tokenizer the chat template that asks them.

    Raises:
        DataError: no problem is left.
    """
    prompts = prepare_prompts(cfg, tokenizer, called="problems")
    train, known = run_order(cfg, prompts)
    # Where nothing is held out, the evaluation plays the training problems.
    measured = prompts.held_out if len(prompts.held_out) else prompts.train
    return Rows(
        train=train,
        held_out=EpisodeRows(range(len(measured)), each=1),
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
    """Both turns of the held-out problems, with each kind of hint."""
    has_guide = cfg.score.guidance in ("model", "model_trained")
    is_elsewhere = has_guide and path.stem == "after" and ADAPTERS["guide"] not in getattr(model, "peft_config", {})
    # A guide with a model of its own has been saved, but is no part of `model`.
    cast = open_cast(cfg, RunFolder(path.parents[1])) if is_elsewhere else FinishedCast(model)
    measure_ablation(cast, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> EpisodeTrainer:
    """A trainer that plays the problems in their order."""
    cfg, score, prompts = parts.cfg, parts.cfg.score, parts.rows.source
    if score.alpha * score.turn_discount > 1:
        log.say("warning: score.alpha x score.turn_discount is above 1: turn 1 is punished for being right", "score")
    cast = _cast(parts.model, cfg)
    check_scores(parts.model)
    player = Player(cfg, cast, renderer=prompts.renderer)
    trainer = (ShardedEpisodeTrainer if score.placement == "sharded" else EpisodeTrainer)(
        parts.step,
        cfg=cfg,
        run_folder=parts.folder.path,
        cast=cast,
        player=player,
        judge=EpisodeJudge(cfg, columns=parts.rows.report["columns"], tokenizer=prompts.renderer.tokenizer),
        questions=prompts.train,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=_arguments(parts),
        train_dataset=parts.train,
        data_collator=collate,
        callbacks=parts.callbacks,
    )
    if trainer.args.gradient_checkpointing:
        cast.recompute_guide()
    assert parts.rows.order is not None
    measured = prompts.held_out if len(prompts.held_out) else prompts.train
    trainer.add_callback(
        EvaluateEpisodes(
            cfg,
            spread(measured, cfg.eval.limit),
            folder=parts.folder.eval,
            every=cfg.train.eval_steps or parts.rows.order.steps_per_epoch,
        )
    )
    return trainer


def _arguments(parts: TrainerParts) -> TrainingArguments:
    # Where several GPUs are visible, the others hold other parts.
    arguments = on_one_gpu(TrainingArguments(**{**parts.arguments, "eval_strategy": "no", "eval_steps": None}))
    # transformers would ask for evaluations of its own; those of the task say which checkpoint is the best.
    arguments.load_best_model_at_end = parts.cfg.train.best_metric is not None
    arguments.metric_for_best_model, arguments.greater_is_better = parts.cfg.train.best_metric, True
    return arguments


def _cast(model: Any, cfg: RunConfig) -> Cast:
    """The parts that the config asks for, and no others."""
    score = cfg.score
    has_guide = score.guidance in ("model", "model_trained")
    return Cast(
        model,
        has_guide=has_guide,
        guide_learns=score.guidance == "model_trained",
        has_value=score.has_value,
        value_is_separate=score.value == "separate",
        critic=score.critic if score.advantage == "critic" else None,
        layout=layout_of_run(cfg),
    )

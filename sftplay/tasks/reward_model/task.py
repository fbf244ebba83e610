"""The reward model: a score for answers, learned from pairs of which one was chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import RewardConfig

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.launch.run_folder import RunFolder
from sftplay.report.sample import write_masked_sample
from sftplay.reward.model_reward import find_score_model, open_score_model
from sftplay.tasks.preference.load_pairs import load, pairs_table
from sftplay.tasks.preference.shared_prompt import PairCollator
from sftplay.tasks.reward_model import measuring
from sftplay.tasks.reward_model.score_head import to_score_model
from sftplay.tasks.reward_model.trainer import RewardModelTrainer
from sftplay.train.checkpointing import describe_renderer
from sftplay.train.task import Rows, TrainerParts
from sftplay.train.upstream import on_one_gpu


def load_rows(cfg: RunConfig, tokenizer: Any) -> Rows:
    """Load the pairs of `cfg.data`; the tokenizer gets the chat template that their masks are proven for.

    Raises:
        DataError: no pair is left to train on.
    """
    log.status(f"preparing the pairs of {cfg.rows_path}", "data")
    pairs = load(cfg, tokenizer)
    tokenizer.chat_template = pairs.renderer.template
    return Rows(
        train=pairs.train,
        held_out=pairs.held_out,
        report=pairs.report,
        recipe=describe_renderer(pairs.renderer),
        source=pairs,
        learned_tokens=int(pairs.report["sources"].get("train", pairs.report)["trainable_tokens"]),
    )


def report_rows(rows: Rows, tokenizer: Any, *, folder: RunFolder) -> None:
    """Show the table of the data report, and keep one pair with the tokens that are compared."""
    write_masked_sample(folder, tokenizer, example=rows.train[0], source=rows.source.find_source("train", 0))
    log.show(pairs_table(rows.report))


def reshape_model(model: Any, tokenizer: Any, *, cfg: RunConfig) -> Any:
    """Return a model with a new head of one score on the weights of the causal `model`.

    Raises:
        ConfigError: transformers has no class for it.
    """
    return to_score_model(model, pad_token_id=tokenizer.pad_token_id, seed=cfg.seed)


def load_result(cfg: RunConfig, path: Path) -> Any:
    """Open the result in a run's folder."""
    model, _ = open_score_model(find_score_model(str(path), cfg.output_dir))
    return model


def measure(model: Any, rows: Rows, *, cfg: RunConfig, path: Path) -> None:
    """Measure how many held-out pairs are in the right order, and how sure the model may be."""
    measuring.measure(model, rows.source, cfg=cfg, path=path)


def build_trainer(parts: TrainerParts) -> RewardModelTrainer:
    """Build the trainer for rows of pairs."""
    config = RewardConfig(**parts.arguments)
    pairs = parts.rows.source
    callbacks = [measuring.EvaluateScores(parts.cfg, pairs, folder=parts.folder.eval)] if pairs.held_out else []
    return RewardModelTrainer(
        parts.step,
        cfg=parts.cfg,
        model=parts.model,
        processing_class=parts.tokenizer,
        args=on_one_gpu(config),
        train_dataset=parts.train,
        eval_dataset=parts.held_out,
        data_collator=PairCollator(parts.tokenizer.pad_token_id),
        callbacks=[*parts.callbacks, *callbacks],
    )

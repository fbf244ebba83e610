"""Figures of held-out pairs: how many are in the right order, by how much, and how sure the model may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import EvalLoopOutput

from sftplay import log
from sftplay.config.run import RunConfig
from sftplay.evaluate.evaluate import evenly_spaced, ready_to_answer
from sftplay.model.out_of_memory import AdaptiveBatches, gather_objects
from sftplay.tasks.preference.shared_prompt import PairCollator
from sftplay.tasks.reward_model.scores import describe_scores, pair_scores
from sftplay.train.eval_mode import eval_mode
from sftplay.train.exact_batch import ADVICE
from sftplay.train.metrics import Observer, write_measured

SHOWN = ("loss", "accuracy", "stderr", "margin", "rewards/chosen", "rewards/rejected", "calibration_error")
"""Held-out figures that trackers show as curves."""


def measure(model: Any, pairs: Any, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on all held-out pairs; write `path` (.json), and `eval.limit` of them with scores (.jsonl)."""
    rows, pad = pairs.held_out, model.config.get_text_config().pad_token_id
    log.say(f"measuring the model ({path.stem}) on {len(rows):,} held-out pairs", "eval")
    batches = AdaptiveBatches(cfg.eval.batch_size, "the evaluation")
    with ready_to_answer(model, cfg), torch.no_grad():
        scores = torch.cat(list(batches.map(len(rows), partial(_score, model, rows, pad=pad))))
    return write_figures(scores, pairs, cfg=cfg, path=path)


def _score(model: Any, rows: Any, part: slice, *, pad: int) -> Tensor:
    numbers = range(*part.indices(len(rows)))
    batch = PairCollator(pad)([rows[number] for number in numbers])
    device = model.get_input_embeddings().weight.device
    return pair_scores(model, {key: value.to(device) for key, value in batch.items()}, shares=False).cpu()


def write_figures(
    scores: Tensor, pairs: Any, *, cfg: RunConfig, path: Path, more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the figures of scores [held-out pairs, 2], and pairs for people next to them."""
    rows = pairs.held_out
    margin = torch.tensor(rows["margin"][:], dtype=torch.float64) if cfg.reward_model.margin else None
    figures = {**(more or {}), **describe_scores(scores, margin, cfg=cfg, rows=rows["row"][:])}
    write_measured(path, figures, lines=list(_describe_pairs(scores, pairs, limit=cfg.eval.limit)))
    log.say(f"{path.stem}: {format_summary(figures)}", "eval")
    return figures


def _describe_pairs(scores: Tensor, pairs: Any, *, limit: int | None) -> Iterator[dict[str, Any]]:
    texts = pairs.records("held_out")
    for number in evenly_spaced(range(len(scores)), limit):
        read, (chosen, rejected) = texts[number], scores[number].tolist()
        yield {
            "row": pairs.held_out[number]["row"],
            "prompt": read.beginning or read.prompt[-1].content,
            "chosen": read.chosen,
            "rejected": read.rejected,
            "scores": [chosen, rejected],
            "margin": chosen - rejected,
            "correct": chosen > rejected,
        }


def format_summary(figures: Mapping[str, Any]) -> str:
    """Format the figures that say most, for a line."""
    right = f"{figures['accuracy']:.1%} +- {figures['stderr']:.1%} right"
    sure = f"calibration error {figures['calibration_error']:.3f}"
    return f"loss {figures['loss']:.4f}  {right}  margin {figures['margin']:.4f}  {sure}  (n {figures['n']})"


class EvaluateScores(Observer):
    """Measures the held-out pairs while a run trains; writes eval/step-N.json and .jsonl.

    It takes the place of the Trainer's loop over held-out rows, which keeps no figure of a row.
    """

    def __init__(self, cfg: RunConfig, pairs: Any, *, folder: Path) -> None:
        """`folder` is the run's eval/."""
        self.cfg, self.pairs, self.folder = cfg, pairs, folder
        self._scores: Tensor | None = None

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        trainer.evaluation_loop = self.evaluation_loop

    def evaluation_loop(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        """Return the figures of the held-out pairs in the form of the Trainer's loop. Every rank must call it."""
        self._scores = scores = self._score_all()
        margin = torch.tensor(self.pairs.held_out["margin"][:]).double() if self.cfg.reward_model.margin else None
        figures = describe_scores(scores, margin, cfg=self.cfg, rows=self.pairs.held_out["row"][:])
        metrics = {f"{metric_key_prefix}_{name}": figures[name] for name in SHOWN}
        return EvalLoopOutput(predictions=(), label_ids=None, metrics=metrics, num_samples=len(scores))

    @torch.no_grad()
    def _score_all(self) -> Tensor:
        """Score the held-out pairs, each on one rank; every rank scores as many, the last ones again if need be."""
        trainer, rows = self.trainer, self.pairs.held_out
        is_sharded = trainer.micro_batcher is None
        model = trainer.model_wrapped if is_sharded else trainer.model
        pad, device = trainer.processing_class.pad_token_id, trainer.args.device
        share = -(-len(rows) // log.world_size())
        numbers = [min(number, len(rows) - 1) for number in range(log.rank() * share, (log.rank() + 1) * share)]

        def score(part: slice) -> Tensor:
            trainer.heartbeat.enter("evaluation")
            batch = PairCollator(pad)([rows[number] for number in numbers[part]])
            batch = {key: value.to(device) for key, value in batch.items()}
            return pair_scores(model, batch, shares=trainer.shares_prompt).float().cpu()

        size = trainer.args.per_device_eval_batch_size
        batches = AdaptiveBatches(size, "the evaluation", fix=ADVICE if is_sharded else "")
        with eval_mode(trainer.model_wrapped), trainer.compute_loss_context_manager():
            found = torch.cat(list(batches.map(share, score)))
        gathered = gather_objects(found, trainer.heartbeat)
        return torch.cat(gathered)[: len(rows)]

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._scores is None:
            return
        scores, self._scores = self._scores, None
        if log.is_main():
            path = self.folder / f"step-{state.global_step}.json"
            write_figures(scores, self.pairs, cfg=self.cfg, path=path, more={"step": state.global_step})

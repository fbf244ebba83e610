"""Figures of held-out pairs: how many are right and by how much, and answers to their prompts; before, while and after
a run trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_utils import EvalLoopOutput

from sftplay import log
from sftplay.atomic import read_object
from sftplay.config.run import RunConfig
from sftplay.evaluate.evaluate import evenly_spaced, ready_to_answer
from sftplay.generate.generate import Generator, answer_all
from sftplay.tasks.preference.losses import compute_rewards, kto_losses, pair_losses, reference_point
from sftplay.tasks.preference.reference import (
    FILE,
    ReferenceKind,
    RowLogps,
    compute_logps,
    find_shares,
    open_reference,
    pass_settings,
    read_tables,
)
from sftplay.tasks.preference.spec import find_beta, uses_reference
from sftplay.train.eval_mode import eval_mode
from sftplay.train.metrics import Observer, write_measured
from sftplay.units import plural

FALLEN_NATS = 1.0
"""Fall of the mean log-probability of a chosen answer that is warned of: it has become less than half as likely."""


def measure(model: Any, pairs: Any, *, cfg: RunConfig, path: Path, reference: Tensor | None = None) -> dict[str, Any]:
    """Measure `model` on the held-out rows; write `path` (.json), and answers to `eval.limit` prompts (.jsonl).

    `reference` are the reference's log-probabilities, fp32 [rows, 2]. None: those in the run folder, which is above
    that of `path`; before a run those that it will have, as the model is still the one that it starts from.
    """
    tag, held_out, tokenizer = path.stem, pairs.held_out, pairs.renderer.tokenizer
    log.say(f"measuring the model ({tag}) on {plural(len(held_out), 'held-out row')}", "eval")
    settings = {"pad_token_id": tokenizer.pad_token_id, "batch_size": cfg.eval.batch_size}
    with ready_to_answer(model, cfg):
        found = compute_logps(model, held_out, shares=find_shares(cfg, model), **settings)
        if reference is None and uses_reference(cfg):
            kept = path.parent.parent / FILE
            reference = read_held_out(kept, pairs) if kept.is_file() else None
            if reference is None:
                reference = _reference_before(model, held_out, cfg=cfg, found=found, settings=settings)
        chosen = pick_prompts(held_out, cfg.eval.limit)
        generator = Generator(model, tokenizer, pairs.renderer.end_token_ids, cfg.eval.max_new_tokens)
        records = pairs.records("held_out")
        prompts = [records[number].prompt_ids(pairs.renderer) for number in chosen]
        answers = answer_all(generator, prompts, batch_size=cfg.eval.batch_size)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in answers]
    figures = describe_rows(cfg, held_out, found=found, reference=reference)
    figures |= {"answers": len(answers), "answer_tokens": sum(lengths) / max(1, len(lengths))}
    lines = describe_lines(cfg, held_out, chosen, tokenizer=tokenizer, found=found, reference=reference)
    for line, text, length in zip(lines, answers, lengths, strict=True):
        line |= {"prediction": text, "prediction_tokens": length}
    write_measured(path, figures, lines=lines)
    log.say(f"{tag}: {format_summary(figures)}", "eval")
    return figures


def read_held_out(path: Path, pairs: Any) -> Tensor | None:
    """Read the reference's log-probabilities of the held-out rows of a run; None where they are of other rows."""
    counts = {"train": len(pairs.train), "held_out": len(pairs.held_out)}
    tables, problem = read_tables(path, facts={"rows": pairs.fingerprint}, counts=counts)
    if tables is None:
        log.say(f"note: {path} is not used, as it {problem}", "reference")
        return None
    return tables["held_out"]


def _reference_before(model: Any, rows: Any, *, cfg: RunConfig, found: RowLogps, settings: Mapping[str, Any]) -> Tensor:
    """Return the reference's log-probabilities before a run has computed them; the model has not been trained yet."""
    kind = ReferenceKind.find(cfg)
    if kind.name == "path":
        other = open_reference(cfg)
        return compute_logps(other, rows, shares=find_shares(cfg, other), **settings).sums
    if kind.name == "base" and hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            return compute_logps(model, rows, shares=find_shares(cfg, model), **settings).sums
    return found.sums


def describe_rows(cfg: RunConfig, rows: Any, *, found: RowLogps, reference: Tensor | None) -> dict[str, Any]:
    """Compute the figures of held-out rows from log-probabilities of the model and of the reference, fp32 [rows, 2].

    `accuracy` is the share of pairs whose chosen answer has the higher reward, and `logp_accuracy` the higher
    probability; ties count half, so that a model which is its own reference has 0.5. `stderr` is the standard error of
    a share. `kl` is the mean difference of log-probabilities to the reference.
    """
    sums, tokens = found.sums.double(), found.tokens
    compared = None if reference is None else reference.double()
    rewarded = compute_rewards(cfg, sums, tokens, compared)
    desirable = torch.as_tensor(rows["desirable"], dtype=torch.bool) if cfg.task.takes_answers else None
    if desirable is not None:
        return _describe_answers(cfg, rows, desirable, rewarded=rewarded, found=found, reference=compared)
    losses = pair_losses(cfg, sums, tokens, compared)
    n, accuracy = len(sums), share_right(rewarded)
    figures = {
        "n": n,
        "loss": float(losses.mean()),
        "accuracy": accuracy,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / n),
        "margin": float((rewarded[:, 0] - rewarded[:, 1]).mean()),
        "logp_accuracy": share_right(sums),
    }
    for side, name in enumerate(("chosen", "rejected")):
        figures |= {
            f"rewards/{name}": float(rewarded[:, side].mean()),
            f"logps/{name}": float(sums[:, side].mean()),
            f"tokens/{name}": float(tokens[:, side].double().mean()),
        }
    return figures | ({"kl": float((sums - compared).mean())} if compared is not None else {})


def _describe_answers(
    cfg: RunConfig, rows: Any, desirable: Tensor, *, rewarded: Tensor, found: RowLogps, reference: Tensor | None
) -> dict[str, Any]:
    """Compute the figures of single answers with a verdict (kto): those that are wanted are `chosen`.

    Answers that came in pairs are compared within their pairs. Others: `accuracy` is the share of all pairs of a
    wanted and an unwanted answer that are in the right order, with the standard error of Hanley and McNeil 1982.
    """
    sums, tokens = found.sums.double(), found.tokens
    ratios = sums if reference is None else sums - reference
    point = reference_point(ratios[:, 1].sum(), len(sums))
    wanted, others = desirable.nonzero().flatten(), (~desirable).nonzero().flatten()
    # The order in which answers of the same rows of the file come is that of the file.
    places = torch.as_tensor(rows["row"])
    in_pairs = len(wanted) == len(others) and torch.equal(places[wanted].sort().values, places[others].sort().values)
    in_pairs = in_pairs and len(places[wanted].unique()) == len(wanted)
    figures: dict[str, Any] = {
        "n": len(sums),
        "loss": float(kto_losses(cfg, ratios[:, 0], desirable, reference_point=point).mean()),
    }
    if in_pairs:
        first, second = (part[places[part].argsort()] for part in (wanted, others))
        right = torch.stack([rewarded[first, 0], rewarded[second, 0]], dim=1)
        accuracy, of_sums = share_right(right), share_right(torch.stack([sums[first, 0], sums[second, 0]], dim=1))
        figures |= {"pairs": len(first), "accuracy": accuracy}
        figures |= {"stderr": math.sqrt(accuracy * (1 - accuracy) / len(first)), "logp_accuracy": of_sums}
    elif len(wanted) and len(others):
        accuracy = order_share(rewarded[wanted, 0], rewarded[others, 0])
        figures |= {"accuracy": accuracy, "stderr": order_stderr(accuracy, len(wanted), len(others))}
        figures["logp_accuracy"] = order_share(sums[wanted, 0], sums[others, 0])
    for name, part in (("chosen", wanted), ("rejected", others)):
        if len(part):
            figures |= {
                f"rewards/{name}": float(rewarded[part, 0].mean()),
                f"logps/{name}": float(sums[part, 0].mean()),
                f"tokens/{name}": float(tokens[part, 0].double().mean()),
            }
    if len(wanted) and len(others):
        figures["margin"] = figures["rewards/chosen"] - figures["rewards/rejected"]
    return figures | {"kl": float(ratios[:, 0].mean()), "reference_point": float(point)}


def share_right(values: Tensor) -> float:
    """Return the share of rows of [rows, 2] whose first value is larger; equal ones count half."""
    ahead = values[:, 0] - values[:, 1]
    return float(((ahead > 0).double() + 0.5 * (ahead == 0).double()).mean())


def order_share(wanted: Tensor, others: Tensor) -> float:
    """Return the share of all pairs of one of each whose wanted one is larger; equal ones count half."""
    ranked, below = others.sort().values, torch.zeros(len(wanted), dtype=torch.float64)
    for is_right in (False, True):
        below += 0.5 * torch.searchsorted(ranked, wanted.contiguous(), right=is_right)
    return float(below.mean() / len(others))


def order_stderr(share: float, wanted: int, others: int) -> float:
    """Return the standard error of `order_share` (Hanley and McNeil 1982, Radiology 143, equation 1)."""
    first, second = share / (2 - share), 2 * share**2 / (1 + share)
    variance = share * (1 - share) + (wanted - 1) * (first - share**2) + (others - 1) * (second - share**2)
    return math.sqrt(max(0.0, variance) / (wanted * others))


def pick_prompts(rows: Any, limit: int | None) -> list[int]:
    """Return the numbers of at most `limit` rows with prompts that differ, evenly spaced over all."""
    seen: dict[tuple[int, ...], int] = {}
    for number, (ids, prompt) in enumerate(zip(rows["input_ids"], rows["prompt_tokens"], strict=True)):
        seen.setdefault(tuple(ids[:prompt]), number)
    return evenly_spaced(list(seen.values()), limit)


def describe_lines(
    cfg: RunConfig, rows: Any, numbers: Sequence[int], *, tokenizer: Any, found: RowLogps, reference: Tensor | None
) -> list[dict[str, Any]]:
    """Describe rows for people: prompt, the answers of the row, and the reward of each."""
    rewarded = compute_rewards(cfg, found.sums, found.tokens, reference).tolist()
    lines = []
    for number in numbers:
        row, names = rows[number], ["reference", "rejected"]
        ids, start, end = row["input_ids"], row["prompt_tokens"], row["prompt_tokens"] + row["chosen_tokens"]
        texts = [tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:start], ids[start:end], ids[end:])]
        line: dict[str, Any] = {"row": row["row"], "prompt": texts[0]}
        if cfg.task.takes_answers:  # the second answer belongs to another prompt
            names = ["reference" if row["desirable"] else "rejected"]
            line["desirable"] = row["desirable"]
        else:
            line["margin"] = rewarded[number][0] - rewarded[number][1]
        line |= dict(zip(names, texts[1:], strict=False))
        line |= {"rewards": rewarded[number][: len(names)], "logps": found.sums[number].tolist()[: len(names)]}
        lines.append(line | {"tokens": found.tokens[number].tolist()[: len(names)]})
    return lines


def format_summary(figures: Mapping[str, Any]) -> str:
    """Format the figures that say most, for a line."""
    right = f"  {figures['accuracy']:.1%} +- {figures['stderr']:.1%} right" if "accuracy" in figures else ""
    margin = f"  margin {figures['margin']:.4f}" if "margin" in figures else ""
    return f"loss {figures['loss']:.4f}{right}{margin}  (n {figures['n']})"


class EvaluateHeldOut(Observer):
    """Measures the held-out rows while a run trains; writes eval/step-N.json and .jsonl.

    It takes the place of the Trainer's loop over held-out rows, which keeps no figure of a row and counts the rows that
    fill the last batch. Figures also go to the next line of metrics.
    """

    def __init__(self, cfg: RunConfig, pairs: Any, *, folder: Path) -> None:
        """`pairs` are the rows of a run; `folder` is the run's eval/."""
        self.cfg, self.pairs, self.folder = cfg, pairs, folder
        self._measured: tuple[dict[str, Any], Any] | None = None

    def compute(self) -> tuple[dict[str, Any], Any]:
        """Return figures of all held-out rows, and what `describe` needs. Every rank calls it."""
        raise NotImplementedError

    def describe(self, computed: Any) -> list[dict[str, Any]]:
        """Describe held-out rows for people. The main rank calls it."""
        raise NotImplementedError

    def summarize(self, figures: Mapping[str, Any]) -> str:
        """Format the figures that say most, for a line."""
        return format_summary(figures)

    def attach(self, trainer: Any) -> None:
        super().attach(trainer)
        trainer.evaluation_loop = self.evaluation_loop

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give the first line behind a checkpoint the figures that were measured there."""
        figures = read_object(self.folder / f"step-{state.global_step}.json")
        self.trainer.held_out_figures = name_metrics(figures)

    def evaluation_loop(self, *_: Any, metric_key_prefix: str = "eval", **__: Any) -> EvalLoopOutput:
        """Return the figures of the held-out rows in the form of the Trainer's loop. Every rank must call it."""
        trainer, rows = self.trainer, self.pairs.held_out
        with eval_mode(trainer.model_wrapped), trainer.compute_loss_context_manager():
            self._measured = self.compute()
        metrics = name_metrics(self._measured[0], metric_key_prefix)
        trainer.held_out_figures = dict(metrics)
        return EvalLoopOutput(predictions=(), label_ids=None, metrics=metrics, num_samples=len(rows))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._measured is None:
            return
        (figures, computed), self._measured = self._measured, None
        if log.is_main():
            path = self.folder / f"step-{state.global_step}.json"
            write_measured(path, {"step": state.global_step, **figures}, lines=self.describe(computed))
        log.say(f"step {state.global_step}/{state.max_steps}  held-out {self.summarize(figures)}", "eval")


class EvaluatePairs(EvaluateHeldOut):
    """Measures held-out rows by log-probabilities, and says when chosen answers become unlikely."""

    _first_logps: float | None = None  # of chosen answers, where there is no reference to compare with
    _has_warned = False

    def compute(self) -> tuple[dict[str, Any], Any]:
        trainer, rows, reference = self.trainer, self.pairs.held_out, None
        found = compute_logps(rows=rows, **pass_settings(trainer))
        if uses_reference(self.cfg):
            reference = trainer.references.look_up("held_out", torch.arange(len(rows)))
        return describe_rows(self.cfg, rows, found=found, reference=reference), (found, reference)

    def describe(self, computed: Any) -> list[dict[str, Any]]:
        rows, tokenizer, (found, reference) = self.pairs.held_out, self.trainer.processing_class, computed
        numbers = pick_prompts(rows, self.cfg.eval.limit)
        return describe_lines(self.cfg, rows, numbers, tokenizer=tokenizer, found=found, reference=reference)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        figures = self._measured[0] if self._measured else None
        super().on_evaluate(args, state, control)
        if figures is not None:
            self._watch(figures, step=state.global_step, where="held-out")

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any) -> None:
        if self.pairs.held_out is None and "rewards/chosen" in logs:
            self._watch(logs, step=state.global_step, where="training")

    def _watch(self, figures: Mapping[str, Any], *, step: int, where: str) -> None:
        """Say once that chosen answers become unlikely while they get ahead of the rejected ones."""
        chosen, margin = figures.get("logps/chosen"), figures.get("margin", figures.get("rewards/margins"))
        if chosen is None or margin is None:
            return
        change = figures["rewards/chosen"] / find_beta(self.cfg) if uses_reference(self.cfg) else None
        if change is None:
            self._first_logps = chosen if self._first_logps is None else self._first_logps
            change = chosen - self._first_logps
        if self._has_warned or margin <= 0 or change > -FALLEN_NATS:
            return
        self._has_warned = True
        log.say(f"warning: step {step}: {describe_fall(self.cfg, change, where=where)}", "eval")


def name_metrics(figures: Mapping[str, Any], prefix: str = "eval") -> dict[str, float]:
    """Return those of the figures that a line of metrics has, by their names there."""
    return {f"{prefix}_{name}": value for name, value in figures.items() if isinstance(value, float)}


def describe_fall(cfg: RunConfig, change: float, *, where: str) -> str:
    """Say what it means that chosen answers have lost `change` nats, and what helps."""
    factor = f"{math.exp(-change):.3g}" if change > -20 else f"10^{-change / math.log(10):.0f}"
    since = "than under the reference" if uses_reference(cfg) else "than at first"
    what = f"chosen {where} answers are {factor} times less likely {since} ({change:+.1f} nats), though margins rise"
    if cfg.task_mode not in ("dpo", "ipo"):
        return f"{what}: rejected ones fall faster; a lower train.learning_rate, or fewer steps, keep them up"
    if cfg.preference.rpo_alpha:
        return f"{what}: rejected ones fall faster; a larger preference.rpo_alpha keeps them up"
    return f"{what}: rejected ones fall faster; preference.rpo_alpha: 1 adds their likelihood to the loss"

"""Measure answers on held-out rows: loss, perplexity, metrics of text, rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional

from sftplay import log
from sftplay.atomic import write_text
from sftplay.config.data import Metric
from sftplay.config.run import RunConfig
from sftplay.data.pipeline import Examples
from sftplay.data.records import IGNORE_INDEX, Chat
from sftplay.data.render.render import Renderer
from sftplay.generate.generate import Generator, answer_all
from sftplay.model.out_of_memory import AdaptiveBatches
from sftplay.model.recomputation import nothing_recomputed
from sftplay.units import plural


def score_answers(
    answers: Sequence[str], references: Sequence[str], *, metrics: Sequence[Metric]
) -> tuple[dict[str, float], list[bool]]:
    """Return the mean of each metric, between 0 and 1, and for each answer whether it equals its reference.

    White space around both is removed first. ROUGE-L is the F measure of rouge-score with stemming off; chrF is
    sacrebleu's sentence score, divided by 100.
    """
    pairs = [(answer.strip(), reference.strip()) for answer, reference in zip(answers, references, strict=True)]
    correct = [answer == reference for answer, reference in pairs]
    means: dict[str, float] = {}
    for metric in metrics:
        values: list[float] = list(map(float, correct))
        if metric == "rouge_l":
            from rouge_score.rouge_scorer import RougeScorer

            scorer = RougeScorer(["rougeL"])
            values = [scorer.score(reference, answer)["rougeL"].fmeasure for answer, reference in pairs]
        elif metric == "chrf":
            from sacrebleu.metrics import CHRF

            chrf = CHRF()
            values = [chrf.sentence_score(answer, [reference]).score / 100 for answer, reference in pairs]
        means[metric] = sum(values) / len(values) if values else 0.0
    return means, correct


def score_by_rewards(
    cfg: RunConfig, answers: Sequence[str], *, columns: Mapping[str, Sequence[Any]]
) -> dict[str, list[float | None]]:
    """Return name of a reward -> its value for each answer, None where unknown. `columns` are aligned with them.

    A shipped reward that reads another column is left out, and that is said.
    """
    if not cfg.rewards:
        return {}
    from sftplay.reward.reward_set import RewardSet  # brings the sandbox
    from sftplay.reward.table import missing_column

    measured = []
    for reward in cfg.rewards:
        if missing := missing_column(reward, columns):
            log.say(f"note: the reward {reward.name} is not measured: it reads the column {missing}", "eval")
        else:
            measured.append(reward)
    if not measured:
        return {}
    with RewardSet(cfg.model_copy(update={"rewards": measured})) as rewards:
        scored = rewards.score(answers, columns)
    for name, scores in scored.by_name.items():
        if count := scores.values.count(None):
            log.say(f"note: {name} gives no value for {plural(count, 'answer')}: {'; '.join(scores.reasons)}", "eval")
    return {name: scores.values for name, scores in scored.by_name.items()}


def mean_rewards(scores: dict[str, list[float | None]]) -> dict[str, float]:
    """Return `reward/NAME` -> mean of the values that are known; a reward without any is left out."""
    known = {name: [value for value in values if value is not None] for name, values in scores.items()}
    return {f"reward/{name}": sum(values) / len(values) for name, values in known.items() if values}


LOSS_TOKENS = 8192
"""Most tokens of one batch when the held-out loss is computed."""

SCORES_BYTES = 2**30
"""Most bytes of fp32 scores over the vocabulary in one batch; a single row may take more."""


@dataclass(frozen=True)
class HeldOutChats:
    """Rows that are held out, with columns `input_ids` and `labels`, and the chats behind them."""

    held_out: Dataset
    held_out_chats: Sequence[Chat]
    """The last turn of these is answered."""

    renderer: Renderer


def evaluate(model: Any, examples: Examples | HeldOutChats, *, cfg: RunConfig, path: Path) -> dict[str, Any]:
    """Measure `model` on `examples.held_out`, write `path` (.json) and every answer next to it (.jsonl).

    `loss` is the mean negative log likelihood of the label tokens in nats, `perplexity` its exponential; the other
    figures are means over the `n` prompts answered. Plain texts have no prompt: without a held-out chat `n` is 0 and
    there are no other figures.
    """
    tag, renderer, tokenizer = path.stem, examples.renderer, examples.renderer.tokenizer
    assert examples.held_out is not None
    log.say(f"measuring the model ({tag}) on {plural(len(examples.held_out), 'held-out row')}", "eval")
    with ready_to_answer(model, cfg):
        loss = held_out_loss(model, examples.held_out, pad_token_id=tokenizer.pad_token_id)
        chats = evenly_spaced(examples.held_out_chats, cfg.eval.limit)
        generator = Generator(model, tokenizer, renderer.end_token_ids, cfg.eval.max_new_tokens)
        prompts = [renderer.prompt_ids(chat.prompt, chat.tools) for chat in chats]
        answers = answer_all(generator, prompts, batch_size=cfg.eval.batch_size) if chats else []
    references = [read_reference(chat, renderer) for chat in chats]
    most = cfg.eval.max_new_tokens
    if too_long := sum(len(tokenizer(text, add_special_tokens=False)["input_ids"]) > most for text in references):
        what = f"note: {too_long} of {len(chats)} references have more tokens than eval.max_new_tokens ({most})"
        log.say(f"{what}: answers as long are cut, and what stands at their end is missed", "eval")
    means, correct = score_answers(answers, references, metrics=cfg.eval.metrics) if chats else ({}, [])
    rewards = dict[str, list[float | None]]()
    if chats and cfg.rewards:
        # What rewards read: `answer`, the reference, and the columns that all of these chats have.
        read = [json.loads(chat.columns) if chat.columns else {} for chat in chats]
        columns = {name: [row[name] for row in read] for name in sorted(set.intersection(*map(set, read)))}
        rewards = score_by_rewards(cfg, answers, columns=columns | {"answer": references})
        means |= mean_rewards(rewards)
    figures = {"n": len(chats), "loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, **means}
    rows = (
        {
            "row": n,
            "prompt": chat.prompt[-1].content if chat.prompt else "",
            "reference": references[n],
            "prediction": answers[n],
            "correct": correct[n],
            **({"rewards": {name: values[n] for name, values in rewards.items()}} if rewards else {}),
        }
        for n, chat in enumerate(chats)
    )
    write_measurement(path, figures, rows=rows)
    summary = "  ".join(f"{key} {value:.4f}" for key, value in figures.items() if key != "n")
    log.say(f"{tag}: {summary}  (n {figures['n']})", "eval")
    return figures


def write_measurement(path: Path, figures: Mapping[str, Any], *, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write every answer to `path` as .jsonl, then the figures to `path`: where they lie, nothing is measured again."""
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    write_text(path.with_suffix(".jsonl"), "".join(lines))
    write_text(path, json.dumps(figures, indent=1) + "\n")


def read_reference(chat: Chat, renderer: Renderer) -> str:
    """Return what the model should have answered in the chat's last turn, in the form in which its answers are read.

    A tool call is the text that the template writes for it, without special tokens, as answers are read.
    """
    last = chat.messages[-1]
    if not last.calls:
        return last.content
    ids = renderer.tokenizer(renderer.answer_text(chat), add_special_tokens=False)["input_ids"]
    return str(renderer.tokenizer.decode(ids, skip_special_tokens=True))


def figures_table(figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the numbers among the figures of a run, `before` and `after` training, side by side."""
    titles = {"before": "base", "after": "tuned"}
    numbers = {
        side: {key: value for key, value in found.items() if isinstance(value, int | float)}
        for side, found in figures.items()
    }
    keys = dict.fromkeys(key for found in numbers.values() for key in found)
    width = max(12, 2 + max(map(len, keys)))
    lines = [" " * width + "".join(f"{titles[side]:>12}" for side in figures)]
    for key in keys:
        values = [found.get(key, math.nan) for found in numbers.values()]
        cells = "".join(f"{value:{'12' if isinstance(value, int) else '12.4f'}}" for value in values)
        lines.append(f"{key:{width}}{cells}")
    return "\n".join(lines)


def evenly_spaced(rows: Any, limit: int | None) -> list[Any]:
    """Return at most `limit` of `rows`, which have a length and numbers, evenly spaced over all of them."""
    count = len(rows) if limit is None else min(limit, len(rows))
    return [rows[at * len(rows) // count] for at in range(count)]


@torch.no_grad()
def held_out_loss(model: Any, rows: Any, *, pad_token_id: int) -> float:
    """Return the mean negative log likelihood, in nats, over all label tokens of `rows`, each counting the same."""
    total, count, start = 0.0, 0, 0
    room = min(LOSS_TOKENS, SCORES_BYTES // (4 * model.config.get_text_config().vocab_size))
    batches = AdaptiveBatches(len(rows), "the held-out loss")
    pairs = list(zip(rows["input_ids"], rows["labels"], strict=True))
    pairs.sort(key=lambda pair: len(pair[0]), reverse=True)
    while start < len(pairs):
        batch = pairs[start : start + max(1, room // len(pairs[start][0]))]
        for loss, labels in batches.map(len(batch), partial(_sum_loss, model, batch=batch, pad_token_id=pad_token_id)):
            total, count = total + loss, count + labels
        start += len(batch)
    return total / count if count else math.nan


def _sum_loss(
    model: Any, part: slice, *, batch: Sequence[tuple[list[int], list[int]]], pad_token_id: int
) -> tuple[float, int]:
    """The sum of the label tokens' losses of a part of the rows, and their number."""
    batch, device = batch[part], next(model.parameters()).device
    width = max(len(ids) for ids, _ in batch)
    ids = torch.full((len(batch), width), pad_token_id)
    labels = torch.full((len(batch), width), IGNORE_INDEX)
    mask = torch.zeros_like(ids)
    for i, (row, targets) in enumerate(batch):
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, : len(targets)] = torch.tensor(targets)
        mask[i, : len(row)] = 1
    scores = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits[:, :-1]
    wanted = labels[:, 1:].to(device)
    loss = functional.cross_entropy(scores.flatten(0, 1).float(), wanted.flatten(), reduction="sum")
    return float(loss), int((wanted != IGNORE_INDEX).sum())


@contextmanager
def ready_to_answer(model: Any, cfg: RunConfig) -> Iterator[None]:
    """Put the model in evaluation mode with its cache on and no recomputation; restore it afterwards.

    fp32 weights of a run in 16 bits compute under autocast, as in training: an adapter's next to a 16-bit base, and all
    in full tuning. Flash attention takes no fp32.
    """
    was_training, had_cache = model.training, getattr(model.config, "use_cache", True)  # Gemma 4's has none
    model.eval()
    model.config.use_cache = True
    dtype = find_autocast(model, cfg)
    device = next(model.parameters()).device.type
    try:
        with (
            nothing_recomputed(model),
            torch.autocast(device, dtype=dtype or torch.bfloat16, enabled=dtype is not None),
        ):
            yield
    finally:
        model.config.use_cache = had_cache
        model.train(was_training)


def find_autocast(model: Any, cfg: RunConfig) -> torch.dtype | None:
    """Return the 16-bit dtype in which the model's fp32 weights compute in a run in 16 bits, None in any other."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(str(cfg.train.precision))
    half = next((dtype for dtype in (torch.bfloat16, torch.float16) if dtype in dtypes), wanted)
    return half if torch.float32 in dtypes else None

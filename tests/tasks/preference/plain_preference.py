"""Losses of preferences in plain torch, from the papers: one row at a time, over all scores of two forward passes."""

from __future__ import annotations

from typing import Any

import torch
from pair_rows import apart
from torch import Tensor

BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "orpo": 0.1, "simpo": 2.0}


def log_probabilities(model: Any, texts: list[dict[str, Any]]) -> tuple[list[Tensor], list[int]]:
    """The sum over the learned tokens of each text, and their number."""
    width = max(len(text["input_ids"]) for text in texts)
    ids = torch.tensor([text["input_ids"] + [0] * (width - len(text["input_ids"])) for text in texts])
    mask = torch.tensor([[int(at < len(text["input_ids"])) for at in range(width)] for text in texts])
    sums, counts = [], []
    for scores, text in zip(model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1), texts, strict=True):
        learned = [(at, token) for at, token in enumerate(text["labels"]) if token != -100]
        sums.append(scores[[at - 1 for at, _ in learned], [token for _, token in learned]].sum())
        counts.append(len(learned))
    return sums, counts


def sums_of(model: Any, rows: list[dict[str, Any]]) -> Tensor:
    """Of both texts of each row, [rows, 2]."""
    return torch.stack(log_probabilities(model, [text for row in rows for text in apart(row)])[0]).reshape(-1, 2)


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def pair_loss(settings: dict[str, Any], logps: list[Tensor], tokens: list[int], before: list[Tensor]) -> Tensor:
    """The loss of one pair; `settings` are those of the section `preference`, and `task`."""
    task, beta = settings["task"], settings.get("beta") or BETA[settings["task"]]
    ratios = [now - then for now, then in zip(logps, before, strict=True)]
    means = [logp / n for logp, n in zip(logps, tokens, strict=True)]
    likelihood = settings.get("rpo_alpha", 0.0) * means[0]
    if task == "dpo":
        margin, share, kind = beta * (ratios[0] - ratios[1]), settings.get("label_smoothing", 0.0), settings.get("loss")
        if kind == "hinge":
            return (1 - margin if margin < 1 else 0 * margin) - likelihood
        right, wrong = -torch.log(sigma(margin)), -torch.log(sigma(-margin))
        if kind == "robust":
            return ((1 - share) * right - share * wrong) / (1 - 2 * share) - likelihood
        return (1 - share) * right + share * wrong - likelihood
    if task == "ipo":
        return (ratios[0] / tokens[0] - ratios[1] / tokens[1] - 1 / (2 * beta)) ** 2 - likelihood
    if task == "orpo":
        odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
        return -means[0] - beta * torch.log(sigma(torch.log(odds[0] / odds[1])))
    return -torch.log(sigma(beta * (means[0] - means[1]) - settings.get("gamma", 1.0)))


def batch_loss(model: Any, rows: list[dict[str, Any]], settings: dict[str, Any], before: Tensor) -> Tensor:
    """The mean over the rows of a step; `before` are the reference's sums of all rows, by their number."""
    losses = []
    if settings["task"] == "kto":
        numbers = [row["index"] for row in rows]
        with torch.no_grad():
            others = torch.stack(log_probabilities(model, [apart(row)[1] for row in rows])[0])
            point = max(0.0, float((others - before[numbers, 1]).mean()))
        ratios = torch.stack(log_probabilities(model, [apart(row)[0] for row in rows])[0]) - before[numbers, 0]
        for row, ratio in zip(rows, ratios, strict=True):
            x = settings.get("beta", BETA["kto"]) * (ratio - point)
            wanted, unwanted = settings.get("desirable_weight", 1.0), settings.get("undesirable_weight", 1.0)
            losses.append(wanted * (1 - sigma(x)) if row["desirable"] else unwanted * (1 - sigma(-x)))
        return torch.stack(losses).mean()
    logps, counts = log_probabilities(model, [text for row in rows for text in apart(row)])
    for n, row in enumerate(rows):
        pair = slice(2 * n, 2 * n + 2)
        losses.append(pair_loss(settings, logps[pair], counts[pair], list(before[row["index"]])))
    return torch.stack(losses).mean()

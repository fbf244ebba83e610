"""Compares answers with references: exact match by ourselves, ROUGE-L and chrF by their libraries."""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.config.data import Metric


def score_answers(
    answers: Sequence[str], references: Sequence[str], *, metrics: Sequence[Metric]
) -> tuple[dict[str, float], list[bool]]:
    """Mean of each metric, between 0 and 1, and for each answer whether it equals its reference.

    White space around both is removed first. ROUGE-L is the F measure of rouge-score with stemming off; chrF is
    sacrebleu's sentence score, divided by 100.
    """
    pairs = [(answer.strip(), reference.strip()) for answer, reference in zip(answers, references, strict=True)]
    correct = [answer == reference for answer, reference in pairs]
    scorers = {"exact_match": _exact, "rouge_l": _rouge_l, "chrf": _chrf}
    means: dict[str, float] = {}
    for metric in metrics:
        values = scorers[metric](pairs)
        means[metric] = sum(values) / len(values) if values else 0.0
    return means, correct


def _exact(pairs: Sequence[tuple[str, str]]) -> list[float]:
    return [float(answer == reference) for answer, reference in pairs]


def _rouge_l(pairs: Sequence[tuple[str, str]]) -> list[float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    return [scorer.score(reference, answer)["rougeL"].fmeasure for answer, reference in pairs]


def _chrf(pairs: Sequence[tuple[str, str]]) -> list[float]:
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    return [chrf.sentence_score(answer, [reference]).score / 100 for answer, reference in pairs]

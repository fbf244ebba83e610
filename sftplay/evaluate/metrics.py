"""Compares answers with references: exact match by ourselves, ROUGE-L and chrF by their libraries."""

from __future__ import annotations

from collections.abc import Sequence

from sftplay.config.data import Metric


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

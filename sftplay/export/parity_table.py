"""What parity.json says, as rows of a table: which engines a run was held against, when, and with which figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

HEAD = ("engine", "served", "on", "same prompts", "same answers", "largest difference", "bound", "verdict")


def parity_rows(content: Mapping[str, Any], weights: str | None) -> list[list[str]]:
    """Return a row for each engine and kind of result in parity.json; those of other weights than `weights`, the
    digest of the run's present ones, say so. Nothing in the file raises.
    """
    results = content.get("results")
    found = [result for result in results.values() if isinstance(result, dict)] if isinstance(results, dict) else []
    return [_row(result, weights) for result in found]


def _row(result: Mapping[str, Any], weights: str | None) -> list[str]:
    def count(key: str) -> str:
        return f"{result[key]} of {result.get('n')}" if isinstance(result.get(key), int) else "not known"

    def number(key: str) -> str:
        value = result.get(key)
        return f"{value:.2g}" if isinstance(value, int | float) else "not known"

    verdict = str(result.get("verdict"))
    if result.get("adapter_changes_answers") is None and verdict == "ok":
        verdict += ", not told from the base"
    if result.get("cause"):
        verdict += f": {result['cause']}"
    if weights is not None and result.get("weights") != weights:
        verdict = f"of earlier weights ({verdict})"
    ties = f" and {result['ties']} ties" if result.get("ties") else ""
    served = str(result.get("against"))
    if served == "gguf" and isinstance(result.get("served"), str):
        served = PurePath(result["served"]).name
    figures = [number("max_logprob_diff"), number("bound")]
    if "divergence" in result:  # of all tokens' scores, where an export measured that
        figures = [f"KL {number('divergence')}", f"KL {number('divergence_bound')}"]
    return [
        str(result.get("version")), served, str(result.get("date"))[:10], count("same_prompt_ids"),
        count("same_answer_ids") + ties, *figures, verdict,
    ]  # fmt: skip

"""The episodes of each step with what they were paid, in samples/ of a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sftplay import log
from sftplay.atomic import write_text
from sftplay.tasks.score.episodes.judge import Verdict
from sftplay.tasks.score.episodes.play import Episode, text_of


def line_of(episode: Episode, verdict: Verdict, *, tokenizer: Any) -> dict[str, Any]:
    """An episode for people to read."""
    return {
        "row": episode.question.row,
        "problem": episode.question.question,
        "first": text_of(tokenizer, episode.first.ids),
        "hint": text_of(tokenizer, episode.hint_ids),
        "second": text_of(tokenizer, episode.second.ids),
        "rewards": [verdict.first, verdict.second],
        "correct": list(verdict.right),
        "leaks": verdict.leaks,
    }


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """One line of JSON for each."""
    path.parent.mkdir(exist_ok=True)
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def keep_episodes(
    episodes: Sequence[Episode],
    verdicts: Sequence[Verdict],
    *,
    run_folder: Path,
    step: int,
    gains: Mapping[str, Tensor | None],
    tokenizer: Any,
    limit: int | None,
) -> None:
    """Write the first episodes of the main rank with their advantages, `gains` by name: [episodes]."""
    if not log.is_main() or limit == 0:
        return
    lines = []
    for at, (episode, verdict) in enumerate(zip(episodes[:limit], verdicts, strict=False)):
        advantages = {name: None if gain is None else round(float(gain[at]), 6) for name, gain in gains.items()}
        lines.append({**line_of(episode, verdict, tokenizer=tokenizer), "advantages": advantages})
    write_lines(run_folder / "samples" / f"step-{step}.jsonl", lines)

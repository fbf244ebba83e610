"""A small run of task grpo: prompts, a reward that a random model gets different amounts of, few short completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import HANG_S
from small_run import WORDS, Inputs

REWARD = """
def variety(completions, answer, **_):
    return [1.0 if text == right else min(len(set(text)), 20) / 40 for text, right in zip(completions, answer)]
"""
"""Up to a half for different characters; 1 for the right answer, which a random model never gives."""


def variety_of(completion: str) -> float:
    """What the reward pays for a wrong completion."""
    return min(len(set(completion)), 20) / 40


def grpo_inputs(model: Path, folder: Path, *, prompts: int = 12) -> Inputs:
    """Prompts with the columns `answer` and `level`, and six that are held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, first, count in (("train", 0, prompts), ("held_out", 100, 6)):
        rows = [
            {"prompt": f"{WORDS[n % len(WORDS)]} {n}", "answer": WORDS[-n % len(WORDS)], "level": n}
            for n in range(first, first + count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return Inputs(model, folder / "train.jsonl", folder / "held_out.jsonl")


def grpo_options(inputs: Inputs, **changes: Any) -> dict[str, Any]:
    """Changes to the small run that make it one of task grpo."""
    return {
        "task_mode": "grpo",
        "tuning__mode": "full",
        "train__effective_batch_size": 8,
        "train__max_steps": 6,
        "train__learning_rate": 1e-3,
        "rewards": [{"name": "variety", "use": f"{inputs.train.parent / 'reward.py'}:variety", "deadline": HANG_S}],
        "grpo__num_generations": 4,
        "grpo__max_completion_length": 12,
        **changes,
    }

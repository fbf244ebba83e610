"""A small run of task score: the toy's problems and model, hardly trained, few episodes, few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from processes import HANG_S
from small_run import Inputs

from sftplay.model.builtin import DigitsRecipe, make_digits

PROMPTS = {
    "solve": "{problem}",
    "guide": "{problem}{attempt}?",
    "revise": "{problem}{attempt}?{hint}>",
    "static_hint": "0",
    "right_hint": "{answer}",
}


def score_inputs(folder: Path, *, steps: int = 20, recipe: DigitsRecipe | None = None) -> Inputs:
    """The model after `steps` steps of its warm-up, or of another recipe, and all 25 problems."""
    make_digits(folder / "model", recipe or DigitsRecipe(steps=steps), say=print)
    rows = [{"text": f"{a}+{b}=", "answer": str((a + b) % 5)} for a in range(5) for b in range(5)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Inputs(folder / "model", folder / "train.jsonl", folder / "train.jsonl")


def score_options(**changes: Any) -> dict[str, Any]:
    """Changes to the small run that make it one of task score."""
    return {
        "task_mode": "score",
        "model__max_seq_len": 32,
        "data__val_path": None,
        "data__split": 0,
        "train__effective_batch_size": 16,
        "train__batch_size": 8,
        "train__max_steps": 4,
        "train__eval_steps": 4,
        "eval__limit": 5,
        "rewards": [{"name": "answer", "use": "exact_match", "deadline": HANG_S}],
        "score__stage1_steps": 2,
        "score__stage2_steps": 2,
        "score__max_new_tokens": 2,
        "score__max_hint_tokens": 2,
        "score__min_hint_gain": 0,
        "score__prompts": PROMPTS,
        **changes,
    }

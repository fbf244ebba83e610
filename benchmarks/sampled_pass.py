"""How often the answers that a toy's checkpoint samples pass all tests, and how many tokens a run drew to get there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sftplay.config.load import load_config
from sftplay.reward.reward_set import RewardSet

SAMPLES = 24
"""Answers to each question; with 27 questions the standard error of pass@1 near 0.9 is 0.012."""


def tokens_until(goal: float, curve: Sequence[tuple[int, float, float]]) -> float | None:
    """Generated tokens until pass@1 is `goal`, between two measurements by a straight line; None: it never is."""
    before, known = (0.0, 0.0), False
    for _, tokens, now in curve:
        if now >= goal:
            part = (goal - before[1]) / (now - before[1]) if known else 1.0
            return before[0] + part * (tokens - before[0])
        before, known = (tokens, now), True
    return None


class SampledPass:
    """The judge of checkpoints: the toy's own reward, each different answer once. A context manager."""

    def __init__(self, config: Path, rows: Path, warm: Path) -> None:
        self.records = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        self.tokenizer = AutoTokenizer.from_pretrained(warm / "model", padding_side="left")
        self.rewards = RewardSet(load_config(str(config)))
        self.known: dict[tuple[int, str], bool] = {}

    def __enter__(self) -> SampledPass:
        return self

    def __exit__(self, *_: object) -> None:
        self.rewards.close()

    def curve(self, course: Any) -> list[tuple[int, float, float]]:
        """Step, generated tokens and pass@1 of each checkpoint."""
        steps = sorted(int(path.name.rpartition("-")[2]) for path in course.checkpoints.glob("checkpoint-*"))
        return [
            (step, course.generated_tokens[step - 1], self.of(course.checkpoints / f"checkpoint-{step}"))
            for step in steps
        ]

    @torch.no_grad()
    def of(self, checkpoint: Path) -> float:
        """Share of sampled answers that pass all tests, with the same random numbers for every checkpoint."""
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
        torch.manual_seed(0)
        chats = [record["messages"][:1] for record in self.records for _ in range(SAMPLES)]
        asked = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        drawn = model.generate(**asked, do_sample=True, top_k=0, max_new_tokens=24)
        texts = self.tokenizer.batch_decode(drawn[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        answers = [(n // SAMPLES, text) for n, text in enumerate(texts)]
        self._learn(sorted(set(answers) - self.known.keys()))
        return sum(self.known[each] for each in answers) / len(answers)

    def _learn(self, answers: list[tuple[int, str]]) -> None:
        if answers:
            columns = {key: [self.records[n][key] for n, _ in answers] for key in ("tests", "entry_point")}
            values = self.rewards.score([text for _, text in answers], columns).by_name["tests"].values
            self.known.update({each: value == 1 for each, value in zip(answers, values, strict=True)})

"""What data/step_sums and builtin:steps promise: right sums, and held-out problems that no warm trace has."""

from __future__ import annotations

import json
from itertools import accumulate

import torch
from test_demo_data import DATA, load_generator

from sftplay.model.toys import ALPHABET, StepsRecipe

FOLDER = DATA / "step_sums"


def rows(file: str) -> dict[str, str]:
    """Problem -> answer."""
    lines = (FOLDER / file).read_text("utf-8").splitlines()
    return {row["text"]: row["answer"] for row in map(json.loads, lines)}


def test_the_files_are_what_the_generator_writes_and_share_no_problem():
    for file, text in load_generator("step_sums").files().items():
        assert (FOLDER / file).read_text("utf-8") == text, file
    train, held_out = rows("train.jsonl"), rows("held_out.jsonl")
    assert (len(train), len(held_out), len(train | held_out)) == (500, 125, 625)
    for problem, answer in (train | held_out).items():
        sums = accumulate(map(int, problem.rstrip("=").split("+")))
        assert answer == "".join(str(total % 5) for total in list(sums)[1:])


def test_no_trace_of_the_warm_start_has_a_held_out_problem_and_all_others_occur():
    ids, targets = StepsRecipe(rows=20_000).traces(torch.Generator().manual_seed(0))
    problems = {"".join(ALPHABET[token] for token in row[:8]) for row in ids.tolist()}
    assert problems == set(rows("train.jsonl"))
    assert ids.shape == targets.shape == (20_000, 17)


def test_a_hint_of_the_warm_start_is_the_first_wrong_step_as_often_as_the_recipe_says():
    ids, _ = StepsRecipe(rows=20_000, blanks=0.0).traces(torch.Generator().manual_seed(0))
    n_right = 0
    for row in ids.tolist():
        words = [ALPHABET[token] for token in row]
        sums = [total % 5 for total in accumulate(int(word) for word in words[0:8:2])][1:]
        wrong = [
            step for step, (said, right) in enumerate(zip(words[8:11], sums, strict=True), 1) if int(said) != right
        ]
        n_right += int(words[12]) == (wrong[0] if wrong else 0)
    assert abs(n_right / 20_000 - (0.5 + 0.5 / 4)) < 0.02

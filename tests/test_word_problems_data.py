"""What data/word_problems promises: files that its generator writes, and answers that their own arithmetic gives."""

from __future__ import annotations

import json
import re

from test_demo_data import DATA, load_generator


def test_the_files_are_those_the_generator_writes_and_each_step_of_an_answer_is_right():
    questions = []
    for file, text in load_generator("word_problems").files().items():
        assert (DATA / "word_problems" / file).read_text("utf-8") == text, file
        for row in map(json.loads, text.splitlines()):
            questions.append(row["question"])
            steps = re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)", row["answer"])
            assert len(steps) == 2
            for left, sign, right, result, shown in steps:
                a, b = int(left), int(right)
                assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(result) == int(shown)
            assert row["answer"].endswith(f"\n#### {steps[-1][3]}")
    assert len(questions) == len(set(questions)) == 80

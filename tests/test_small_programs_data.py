"""What data/small_programs promises: files that its generator writes, and answers that pass their own tests."""

from __future__ import annotations

import json
from typing import Any

from test_demo_data import DATA, load_generator


def test_the_files_are_those_the_generator_writes_and_each_answer_passes_its_tests():
    n_rows = 0
    for file, text in load_generator("small_programs").files().items():
        assert (DATA / "small_programs" / file).read_text("utf-8") == text, file
        for row in map(json.loads, text.splitlines()):
            question, answer = (turn["content"] for turn in row["messages"])
            program = answer.removeprefix("```python\n").removesuffix("\n```")
            names: dict[str, Any] = {}
            exec(program, names)
            assert row["entry_point"] in names
            assert len(row["tests"]) == 3
            for test in row["tests"]:
                exec(test, names)
            assert [test in question for test in row["tests"]] == [True, False, False]
            n_rows += 1
    assert n_rows == 12

"""What data/mistaken_words promises: a wrong likeliest operator, a right one too, and unseen held-out numbers."""

from __future__ import annotations

from collections import Counter

import test_one_liners_data
from test_demo_data import DATA, load_generator

FOLDER = DATA / "mistaken_words"
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}


def rows(file: str) -> list[tuple[str, str, str]]:
    """Word, number and answer of each row."""
    found = test_one_liners_data.rows(file, folder=FOLDER)
    return [(*row["question"].split(), row["answer"]) for row in found]


def test_the_files_are_what_the_generator_writes():
    for file, text in load_generator("mistaken_words").files().items():
        assert (FOLDER / file).read_text("utf-8") == text, file


def test_the_right_line_passes_all_tests_and_any_other_one_at_most():
    lines = [f"def f(x): return x{operator}{number}" for operator in "+-*" for number in range(10, 100)]
    for row in test_one_liners_data.rows("held_out", folder=FOLDER)[::9]:
        passed = {line: test_one_liners_data.n_passed(line, row["tests"]) for line in lines}
        assert passed.pop(row["answer"]) == 3
        assert max(passed.values()) <= 1


def test_no_held_out_number_occurs_in_a_row_that_anything_learns_from():
    learned = {number for _, number, _ in [*rows("train"), *rows("noisy")]}
    learned |= {answer[19:] for _, _, answer in rows("noisy")}
    held_out = {number for _, number, _ in rows("held_out")}
    assert (len(rows("train")), len(rows("held_out")), len(held_out)) == (180, 90, 30)
    assert not held_out & learned


def test_the_likeliest_operator_of_each_word_is_wrong_and_the_right_one_occurs():
    for word, right in OPERATORS.items():
        counts = Counter(answer[18] for asked, _, answer in rows("noisy") if asked == word)
        likeliest, share = counts.most_common(1)[0]
        assert likeliest != right
        assert abs(share / counts.total() - 0.45) < 0.04
        assert abs(counts[right] / counts.total() - 0.35) < 0.04

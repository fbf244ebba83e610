"""Writes train.jsonl and held_out.jsonl: small programming problems with tests, each with a program that passes.

They are a stand-in: enough to try the rewards of configs/run_grpo_code.yaml before the real problems are there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sftplay.data.problem import Problem, format_question

HERE = Path(__file__).resolve().parent
HELD_OUT = 4

PROBLEMS = [
    Problem("1", "Write a function that returns the larger of two numbers.",
            ("assert larger(3, 5) == 5", "assert larger(9, 2) == 9", "assert larger(-4, -7) == -4"),
            "larger", "def larger(a, b):\n    return a if a > b else b", shown=1),
    Problem("2", "Write a function that counts the vowels a, e, i, o and u of a text, in either case.",
            ("assert count_vowels('Banana') == 3", "assert count_vowels('sky') == 0",
             "assert count_vowels('AEIOU') == 5"),
            "count_vowels", "def count_vowels(text):\n    return sum(c in 'aeiou' for c in text.lower())", shown=1),
    Problem("3", "Write a function that returns the words of a text in opposite order, separated by one space.",
            ("assert turn_words('one two three') == 'three two one'", "assert turn_words('alone') == 'alone'",
             "assert turn_words('  a   b ') == 'b a'"),
            "turn_words", "def turn_words(text):\n    return ' '.join(reversed(text.split()))", shown=1),
    Problem("4", "Write a function that returns the sum of the digits of a whole number that is not negative.",
            ("assert digit_sum(305) == 8", "assert digit_sum(0) == 0", "assert digit_sum(99999) == 45"),
            "digit_sum", "def digit_sum(n):\n    return sum(int(d) for d in str(n))", shown=1),
    Problem("5", "Write a function that removes repeated items of a list and keeps the first of each.",
            ("assert without_repeats([1, 2, 1, 3, 2]) == [1, 2, 3]", "assert without_repeats([]) == []",
             "assert without_repeats(['b', 'a', 'b']) == ['b', 'a']"),
            "without_repeats", "def without_repeats(items):\n    return list(dict.fromkeys(items))", shown=1),
    Problem("6", "Write a function that returns the greatest common divisor of two positive whole numbers.",
            ("assert common_divisor(12, 18) == 6", "assert common_divisor(7, 13) == 1",
             "assert common_divisor(100, 75) == 25"),
            "common_divisor",
            "def common_divisor(a, b):\n    while b:\n        a, b = b, a % b\n    return a", shown=1),
    Problem("7", "Write a function that says whether a text reads the same both ways; case and spaces do not count.",
            ("assert is_palindrome('Never odd or even')", "assert not is_palindrome('abc')",
             "assert is_palindrome('')"),
            "is_palindrome",
            "def is_palindrome(text):\n    t = text.replace(' ', '').lower()\n    return t == t[::-1]", shown=1),
    Problem("8", "Write a function that returns the n-th Fibonacci number; the first two are 1.",
            ("assert fibonacci(7) == 13", "assert fibonacci(1) == 1", "assert fibonacci(20) == 6765"),
            "fibonacci",
            "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
            shown=1),
    Problem("9", "Write a function that turns a list of lists into one list of their items.",
            ("assert flatten([[1, 2], [], [3]]) == [1, 2, 3]", "assert flatten([]) == []",
             "assert flatten([['x']]) == ['x']"),
            "flatten", "def flatten(lists):\n    return [item for each in lists for item in each]", shown=1),
    Problem("10", "Write a function that returns the longest word of a text, and the first one of equally long ones.",
            ("assert longest_word('a bird sings') == 'sings'", "assert longest_word('one two') == 'one'",
             "assert longest_word('Mississippi') == 'Mississippi'"),
            "longest_word", "def longest_word(text):\n    return max(text.split(), key=len)", shown=1),
    Problem("11", "Write a function that says whether a whole number is a prime number.",
            ("assert is_prime(29) is True", "assert is_prime(1) is False", "assert is_prime(91) is False"),
            "is_prime",
            "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))", shown=1),
    Problem("12", "Write a function that counts how often each letter occurs in a text and returns a dictionary.",
            ("assert letter_counts('aab') == {'a': 2, 'b': 1}", "assert letter_counts('') == {}",
             "assert letter_counts('zzz') == {'z': 3}"),
            "letter_counts",
            "def letter_counts(text):\n    return {c: text.count(c) for c in text}", shown=1),
]  # fmt: skip


def as_row(problem: Problem) -> dict[str, Any]:
    """The question as it is asked with a right answer, and what the rewards read."""
    return {
        "messages": [
            {"role": "user", "content": format_question(problem)},
            {"role": "assistant", "content": f"```python\n{problem.reference}\n```"},
        ],
        "tests": list(problem.tests),
        "entry_point": problem.entry_point,
        "shown": problem.shown,
    }


def files() -> dict[str, str]:
    """Name of a file -> its text."""
    lines = [json.dumps(as_row(problem)) + "\n" for problem in PROBLEMS]
    return {"train.jsonl": "".join(lines[:-HELD_OUT]), "held_out.jsonl": "".join(lines[-HELD_OUT:])}


if __name__ == "__main__":
    for name, text in files().items():
        (HERE / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{name}: {text.count(chr(10))} rows")

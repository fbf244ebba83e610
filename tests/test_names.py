"""Names and words of the kit: standard terms, and none of those that a reader of this field would stumble over."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "sftplay").rglob("*.py"))

GONE = {
    "_Hearing", "Abstentions", "ANYTHING", "begun", "Bench", "Cast", "Cause", "Credit", "Dealing", "dealt",
    "Drawing", "Drawn", "EpisodeJudge", "Execution", "exhausted", "filler", "filling", "Finding", "following",
    "free_name", "free_refused", "Fresh", "furniture", "gauge_steps", "hint_gain", "is_to_go_on", "Judge", "Judged",
    "leaks", "Lesson", "Outcome", "PARTS", "Place", "Player", "portions", "prove_masks", "Proven", "redraws",
    "Redraws", "Refusal", "Rehearse", "REMAINS", "RewardCall", "said_of", "Scored", "Scores", "skip_silent",
    "Speakers", "speaking", "SPINS", "spread", "Standing", "together", "told", "typed_specials", "Violation",
    "Window", "WORDS",
}  # fmt: skip
"""Names of classes, functions, keys and variables that have given way to standard terms."""

VAGUE = {"each", "its", "mine", "own", "theirs"}
"""What says nothing as the name of a variable."""

PHRASES = re.compile(r"\b(of which|in place of|beside)\b", re.I)
"""`that`, `instead of` and `next to` say the same in plain order."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_names(path: Path) -> Counter[str]:
    """Every name that a file gives to something: classes, functions, arguments, variables, attributes."""
    names: Counter[str] = Counter()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] += 1
        elif isinstance(node, ast.arg):
            names[node.arg] += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names[node.attr] += 1
    return names


def test_names_that_gave_way_to_standard_terms_are_not_defined_again():
    assert [
        f"{path.relative_to(ROOT)}: {name}" for path in FILES for name in sorted(GONE & set(defined_names(path)))
    ] == []


def test_a_function_is_called_by_a_verb_and_not_by_what_it_belongs_to():
    functions = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and re.search(r"[a-z0-9]_of$", node.name)
    ]
    assert functions == []


def test_variables_say_what_they_hold():
    found = [f"{path.relative_to(ROOT)}: {name}" for path in FILES for name in sorted(VAGUE & set(defined_names(path)))]
    assert found == []


def test_comments_and_texts_have_plain_word_order():
    found = []
    for path in FILES:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING) and (match := PHRASES.search(token.string)):
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]} {match[0]}")
    assert found == []

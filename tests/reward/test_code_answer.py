"""Which part of a completion is its program, and how it was found."""

import ast

import pytest

from sftplay.reward.code_answer import LONGEST_CODE, find_code, is_program

F = "def f(x):\n    return x\n"
G = "def g(x):\n    return x\n"


@pytest.mark.parametrize(
    ("text", "code", "how"),
    [
        (f"```python\n{F}```", F, "labelled"),
        (f"```\n{G}```\n```py\n{F}```", F, "labelled"),
        (f"```python\n{F}```\nbetter:\n```python\n{F}# 2\n```", F + "# 2\n", "labelled"),
        (f"```python\ndef f(x) return\n```\n```python\n{G}```", G, "labelled"),
        (f"```\n{F}```", F, "unlabelled"),
        (f"```python\n{F}", F, "unclosed"),
        (F, F, "whole_text"),
        (G, "", "none"),
        (f"````python\n{F}```\n````", F + "```\n", "labelled"),
        ("```python\n" + "x" * (LONGEST_CODE + 1) + "\n```", "", "none"),
    ],
)
def test_the_answer_s_program_is_found(text, code, how):
    found = find_code(text, "f")
    assert (found.code, found.how) == (code, how)


@pytest.mark.parametrize(
    ("code", "defines"),
    [("f = lambda: 1", True), ("import math as f", True), ("class f: pass", True), ("x.f = 1", False), ("f()", False)],
)
def test_a_program_defines_what_stands_at_its_top_level(code, defines):
    assert is_program(code, "f") is defines


@pytest.mark.parametrize("code", ["(" * 10_000, "-" * 100_000 + "1", "x = " + "9" * 50_000, "\0", "def"])
def test_text_that_the_parser_cannot_take_is_no_program(code):
    assert not is_program(code, "f")


@pytest.mark.parametrize("many", ["```python\n", "```python\nx(\n```\n", "x = (\n", "def f(:\n", "a = 1\nb b\n"])
def test_the_parser_is_asked_a_bounded_number_of_times(many, monkeypatch):
    asked, parse = [], ast.parse
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", lambda code, **named: asked.append(code) or parse(code, **named))
        find_code(many * 200, "f")
    assert len(asked) < 8_000

"""The program in a completion: which part of the text it is, and how it was found."""

from __future__ import annotations

import ast
import re
import warnings
from dataclasses import dataclass
from typing import Literal

from sftplay.reward.completions import Completion, text_of, without_reasoning

How = Literal["labelled", "unlabelled", "unclosed", "whole_text", "none"]

LONGEST_CODE = 64 << 10
"""Characters of a program; a longer one counts as none."""

PYTHON_LABELS = ("python", "py", "python3")

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+.-]*)[^\n]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fenced:
    """A fenced block of a Markdown text."""

    label: str
    code: str
    end: int
    """Where the text behind the block begins."""

    is_closed: bool


@dataclass(frozen=True, slots=True)
class CodeAnswer:
    """The program of a completion; empty where there is none."""

    code: str
    how: How


def find_code(completion: Completion, entry_point: str = "") -> CodeAnswer:
    """The program that the completion gives as its answer.

    Behind the reasoning, blocks labelled as Python go before unlabelled ones. Of them the last counts that parses and
    defines `entry_point`, else the last. Without a block the whole text counts, if it is such a program.

    >>> find_code("Here:\\n```python\\ndef f(): return 1\\n```", "f").how
    'labelled'
    """
    text = without_reasoning(text_of(completion))
    blocks = fenced_blocks(text)
    labelled = [block for block in blocks if block.label.lower() in PYTHON_LABELS]
    found = labelled or [block for block in blocks if not block.label]
    if found:
        best = next((block for block in reversed(found) if is_program(block.code, entry_point)), found[-1])
        how: How = "unclosed" if not best.is_closed else "labelled" if labelled else "unlabelled"
        return _bounded(best.code, how)
    return _bounded(text, "whole_text") if is_program(text, entry_point) and text.strip() else CodeAnswer("", "none")


def fenced_blocks(text: str) -> list[Fenced]:
    """The fenced blocks of a Markdown text; the last may lack its closing fence."""
    blocks: list[Fenced] = []
    opening: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opening is None:
            opening = fence
        elif fence[1][0] == opening[1][0] and len(fence[1]) >= len(opening[1]) and not fence[2]:
            blocks.append(Fenced(opening[2], text[opening.end() + 1 : fence.start()], fence.end(), True))
            opening = None
    if opening is not None:
        blocks.append(Fenced(opening[2], text[opening.end() + 1 :], len(text), False))
    return blocks


def is_program(code: str, entry_point: str = "") -> bool:
    """True for Python that parses and, where one is named, defines `entry_point` at its top level.

    >>> is_program("def f(): return 1", "f"), is_program("f = 1", "g")
    (True, False)
    """
    if "\0" in code or len(code) > LONGEST_CODE:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes and comparisons in the model's text
            tree = ast.parse(code)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return not entry_point or entry_point in _defined(tree)


def _defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in statement.names}
    return names


def _bounded(code: str, how: How) -> CodeAnswer:
    return CodeAnswer(code, how) if len(code) <= LONGEST_CODE and "\0" not in code else CodeAnswer("", "none")

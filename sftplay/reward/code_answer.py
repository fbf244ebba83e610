"""The program in a completion: which part of the text it is, and how it was found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from textwrap import dedent
from typing import Literal

from sftplay.reward.completions import Completion, read_text, without_reasoning
from sftplay.reward.reading.programs import complete, defined, find_definitions, from_session, parse_program

How = Literal["labelled", "unlabelled", "unclosed", "whole_text", "none"]

LONGEST_CODE = 64 << 10
"""Characters of a program; a longer one counts as none."""

PYTHON_LABELS = ("python", "py", "python3")
"""Labels that the reward `format` asks for."""

_PYTHON_LABEL = re.compile(r"(?:i?python|py|pycon|sage|jupyter|\S+\.py)[\d.]*(?:[-_]?(?:repl|code))?", re.IGNORECASE)
_NO_LANGUAGE = ("", "text", "txt", "plaintext", "plain", "code", "console", "repl", "none", "output", "markdown", "md")
_OPENING = re.compile(
    r"^(?P<before>[ \t>*+-]*|[ \t>]*\d+[.)][ \t]*|.*?(?=(?:`{3,}|~{3,})[ \t]*[\w.+-]*[ \t]*$))"
    r"(?P<fence>`{3,}|~{3,})[ \t]*\{?[ \t]*\.?(?P<label>[\w+.-]*)(?P<rest>[^\n`]*)$",
    re.MULTILINE,
)
_CLOSING = re.compile(r"(?P<before>^[ \t>]*)?(?P<fence>`{3,}|~{3,})(?P<rest>[^\n]*)$", re.MULTILINE)


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
    """Find the program that the completion gives as its answer.

    Behind the reasoning, blocks labelled as Python go before those without a language. Of them the last counts that
    parses and defines `entry_point`, else the last; functions that it calls and other blocks define come with it.
    Without a block the whole text counts, or its definitions between the prose.

    >>> find_code("Here:\\n```python\\ndef f(): return 1\\n```", "f").how
    'labelled'
    """
    text = without_reasoning(read_text(completion)).replace("\r\n", "\n").replace("\r", "\n")
    blocks = fenced_blocks(text)
    labelled = [block for block in blocks if _PYTHON_LABEL.fullmatch(block.label)]
    found = labelled + [block for block in blocks if block.label.lower() in _NO_LANGUAGE]
    if found:
        best, code = _best(labelled, entry_point) or _best(found, entry_point) or (None, "")
        if best is None:
            best = (labelled or found)[-1]
            code = best.code if best.is_closed else find_definitions(best.code, entry_point) or best.code
        code = complete(code, others=[block.code for block in found if block is not best], entry_point=entry_point)
        how: How = "unclosed" if not best.is_closed else "labelled" if best in labelled else "unlabelled"
        return _bounded(code, how)
    if blocks or len(text) > LONGEST_CODE or "\0" in text:
        return CodeAnswer("", "none")
    whole = text if text.strip() and is_program(text, entry_point) else find_definitions(text, entry_point)
    if not whole:
        return CodeAnswer("", "none")
    return _bounded(complete(whole, others=[], entry_point=entry_point), "whole_text")


def _best(blocks: list[Fenced], entry_point: str) -> tuple[Fenced, str] | None:
    """Find the last block that defines the function, else that imports it, else one with it in a `Solution`."""
    for imports, methods in ((False, False), (True, False), (True, True)):
        for block in reversed(blocks):
            tree = parse_program(block.code)
            if tree and (not entry_point or entry_point in defined(tree, imports=imports, methods=methods)):
                return block, block.code
    return None


def fenced_blocks(text: str) -> list[Fenced]:
    """Return the fenced blocks of a Markdown text, without the indentation and the quote marks around them.

    A fence ends a block of Python where what lies between is Python, so that one in a docstring ends nothing. The last
    block may lack its closing fence.
    """
    blocks: list[Fenced] = []
    at = 0
    while opening := _OPENING.search(text, at):
        # A model may write thousands of fences: after some blocks only the first end is tried.
        blocks.append(_read_block(text, opening, most_ends=20 if len(blocks) < 50 else 1))
        at = blocks[-1].end
    return blocks


def _read_block(text: str, opening: re.Match[str], *, most_ends: int) -> Fenced:
    begin, label = min(opening.end() + 1, len(text)), opening["label"]
    closings = (found for found in _CLOSING.finditer(text, begin) if found["fence"].startswith(opening["fence"]))
    near = list(islice(closings, 2 * most_ends))
    whole = [found for found in near if found["before"] is not None and not found["rest"].strip()]
    for closing in [*whole, *(found for found in near if found not in whole)]:
        code = _strip_marks(text[begin : closing.start()], opening)
        if parse_program(code):
            return Fenced(label, code, closing.end("fence"), True)
    end = whole[0].start() if whole else len(text)
    code = _strip_marks(text[begin:end], opening)
    return Fenced(label, code, whole[0].end("fence") if whole else end, bool(whole))


def _strip_marks(code: str, opening: re.Match[str]) -> str:
    """Return the lines of a block without what its place in the text put before them, and without prompts."""
    if quotes := opening["before"].count(">"):
        code = re.sub(rf"^(?:[ \t]*>[ ]?){{1,{quotes}}}", "", code, flags=re.MULTILINE)
    code = dedent(code)
    return code if parse_program(code) else from_session(code)


def is_program(code: str, entry_point: str = "") -> bool:
    """Say whether this is Python that parses and, where one is named, defines `entry_point` at its top level.

    >>> is_program("def f(): return 1", "f"), is_program("f = 1", "g")
    (True, False)
    """
    tree = parse_program(code) if len(code) <= LONGEST_CODE else None
    return tree is not None and (not entry_point or entry_point in defined(tree))


def _bounded(code: str, how: How) -> CodeAnswer:
    return CodeAnswer(code, how) if len(code) <= LONGEST_CODE and "\0" not in code else CodeAnswer("", "none")

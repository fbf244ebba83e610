"""Rewards for the form of a completion: blocks, tags, length, repetition. They say nothing about what is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from sftplay.config.section import Positive
from sftplay.reward.code_answer import PYTHON_LABELS, fenced_blocks, find_code, is_program
from sftplay.reward.completions import Completion, read_text, without_reasoning

Count = Annotated[int, Field(ge=0)]

Form = Literal["code_block", "reasoning", "answer_tag", "boxed", "hashes"]

_FORMS = {
    "reasoning": r"\s*<think>(?:(?!</?think>).)+</think>(?:(?!</?think>).)*\S(?:(?!</?think>).)*",
    "answer_tag": r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)*\S(?:(?!</?answer>).)*</answer>\s*",
    "boxed": r"(?:(?!\\boxed\{).)*\\boxed\{(?:(?!\\boxed\{).)+\}(?:(?!\\boxed\{)[^\n])*\s*",
    "hashes": r"(?:(?!####).)*####[ \t]*[^\s#][^\n#]*\s*",
}
"""Each allows its mark once."""

_EXAMPLES = {
    "code_block": "```python\n{}\n```", "reasoning": "<think>so it is</think>{}", "answer_tag": "<answer>{}</answer>",
    "boxed": "\\boxed{{{}}}", "hashes": "#### {}",
}  # fmt: skip


def has_form(completions: Sequence[Completion], *, form: Form = "code_block", **_: Any) -> list[float]:
    """1 where the completion has the form, else 0.

    code_block: exactly one fenced block, labelled as Python and closed, and only white space behind it. reasoning: one
    `<think>...</think>` at the beginning and an answer behind it. answer_tag: one `<answer>...</answer>` at the end.
    boxed: one `\\boxed{...}`, in the last line. hashes: one `#### answer` as the last line.

    >>> has_form(["So:\\n```python\\nx = 1\\n```", "x = 1"], form="code_block")
    [1.0, 0.0]
    """
    return [float(_is_of_form(read_text(completion), form)) for completion in completions]


def in_form(answer: str, *, form: Form = "code_block") -> str:
    """Return the answer in the form, which it may have already.

    >>> in_form("42", form="boxed")
    '\\\\boxed{42}'
    """
    return answer if _is_of_form(answer, form) else _EXAMPLES[form].format(answer.strip())


def is_code(completions: Sequence[Completion], *, entry_point: Sequence[str] | None = None, **_: Any) -> list[float]:
    """1 where the answer's program parses and defines the row's `entry_point` at its top level, else 0.

    >>> is_code(["```python\\ndef f(): pass\\n```"], entry_point=["f"])
    [1.0]
    """
    points = entry_point or [""] * len(completions)
    scores = []
    for completion, point in zip(completions, points, strict=True):
        code = find_code(completion, point or "").code
        scores.append(float(bool(code.strip()) and is_program(code, point or "")))
    return scores


def has_length(
    completions: Sequence[Completion], *, most: Positive, least: Count = 1, completion_ids: Any = None, **_: Any
) -> list[float]:
    """1 where the completion has `least` to `most` tokens, else 0. Without `completion_ids` words are counted.

    >>> has_length(["one two three", ""], most=3)
    [1.0, 0.0]
    """
    return [float(least <= n <= most) for n in _lengths(completions, completion_ids)]


def not_overlong(
    completions: Sequence[Completion], *, most: Positive, soft: Count, completion_ids: Any = None, **_: Any
) -> list[float]:
    """0 up to `most` - `soft` tokens, falling in a line to -1 at `most`, -1 beyond (DAPO, arXiv 2503.14476, eq. 13).

    >>> not_overlong(["a a", "a a a", "a a a a", "a a a a a"], most=4, soft=2)
    [0.0, -0.5, -1.0, -1.0]
    """
    free = most - soft
    return [max(-1.0, min(0.0, (free - n) / soft)) if soft else -float(n > most) for n in _lengths(
        completions, completion_ids)]  # fmt: skip


def not_repetitive(completions: Sequence[Completion], *, words: Positive = 3, **_: Any) -> list[float]:
    """0 where no run of `words` words comes twice, down to -1: minus the share of runs that came before.

    >>> not_repetitive(["a b c d", "a b a b a b"], words=2)
    [0.0, -0.6]
    """
    scores = []
    for completion in completions:
        found = read_text(completion).lower().split()
        runs = [tuple(found[at : at + words]) for at in range(len(found) - words + 1)]
        scores.append(-(1 - len(set(runs)) / len(runs)) if runs else 0.0)
    return [round(score, 12) + 0.0 for score in scores]


def _is_of_form(text: str, form: Form) -> bool:
    if form != "code_block":
        return re.fullmatch(_FORMS[form], text, re.DOTALL) is not None
    answer = without_reasoning(text)
    blocks = fenced_blocks(answer)
    if len(blocks) != 1 or answer[blocks[0].end :].strip():
        return False
    return blocks[0].is_closed and blocks[0].label.lower() in PYTHON_LABELS and bool(blocks[0].code.strip())


def _lengths(completions: Sequence[Completion], completion_ids: Any) -> list[int]:
    if completion_ids is not None:
        return [len(ids) for ids in completion_ids]
    return [len(read_text(completion).split()) for completion in completions]

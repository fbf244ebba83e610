"""Rewards of text: its form, its length, and what it matches."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from sftplay.config.section import Positive
from sftplay.reward.code_rewards import (
    PYTHON_LABELS,
    Completion,
    fenced_blocks,
    find_code,
    is_program,
    read_text,
    without_reasoning,
)
from sftplay.reward.math_rewards import last_box


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"it is no pattern, {error}") from error
    return pattern


def _is_schema(schema: Any) -> Any:
    from jsonschema import SchemaError, validators

    try:
        written = json.loads(schema) if isinstance(schema, str) else schema
        validators.validator_for(written).check_schema(written)
    except (SchemaError, ValueError) as error:
        raise ValueError(f"it is no JSON schema, {getattr(error, 'message', error)}") from error
    return schema


Pattern = Annotated[str, AfterValidator(_compiles)]
Schema = Annotated[Mapping[str, Any] | str, AfterValidator(_is_schema)]


def exact_match(
    completions: Sequence[Completion], *, answer: Sequence[str], after: str = "", ignore_case: bool = False, **_: Any
) -> list[float]:
    """1 where the answer is the row's `answer` to the character, but for white space around it; else 0.

    The answer is the text behind the reasoning; with `after`, only what stands behind the last such mark, and nothing
    where the mark is missing.

    >>> exact_match(["6 x 7 = 42 #### 42", "42"], answer=["42", "42"], after="####")
    [1.0, 0.0]
    """
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = without_reasoning(read_text(completion))
        begin = text.rfind(after) if after else 0
        given, right = text[begin + len(after) :].strip() if begin >= 0 else "", str(wanted).strip()
        if ignore_case:
            given, right = given.casefold(), right.casefold()
        scores.append(float(given == right and bool(right)))
    return scores


def matches(completions: Sequence[Completion], *, pattern: Pattern, whole: bool = True, **_: Any) -> list[float]:
    """1 where the text behind the reasoning matches `pattern` (Python's `re`), else 0. `whole`: all of it must.

    >>> matches(["yes", "yes and no"], pattern="yes|no")
    [1.0, 0.0]
    """
    compiled = re.compile(pattern)
    find = compiled.fullmatch if whole else compiled.search
    return [float(find(without_reasoning(read_text(text)).strip()) is not None) for text in completions]


def fits_schema(completions: Sequence[Completion], *, schema: Schema, **_: Any) -> list[float]:
    """1 where the answer is one JSON value that fits the JSON schema, else 0.

    The answer is the text behind the reasoning, or its only fenced block. It must be JSON to the letter: no NaN, no
    second value for a name, nothing around it. `schema` may be JSON as text.

    >>> fits_schema(['{"age": 3}', '{"age": "3"}'], schema={"properties": {"age": {"type": "integer"}}})
    [1.0, 0.0]
    """
    from jsonschema import validators

    def single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a name comes twice")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    wanted, scores = json.loads(schema) if isinstance(schema, str) else schema, []
    checker = validators.validator_for(wanted)(wanted)
    for completion in completions:
        text = without_reasoning(read_text(completion)).strip()
        blocks = fenced_blocks(text)
        is_block = len(blocks) == 1 and blocks[0].is_closed and blocks[0].end == len(text)
        if is_block and text.startswith(("```", "~~~")) and blocks[0].label.lower() in ("", "json"):
            text = blocks[0].code
        try:
            value = json.loads(text, object_pairs_hook=single, parse_constant=refuse)
        except (ValueError, RecursionError):
            scores.append(0.0)
        else:
            scores.append(float(checker.is_valid(value)))
    return scores


Count = Annotated[int, Field(ge=0)]

Form = Literal["code_block", "reasoning", "answer_tag", "boxed", "hashes"]

_FORMS = {
    "reasoning": r"\s*<think>(?:(?!</?think>).)+</think>\s*(?=\S)(?:(?!</?think>).)+",
    "answer_tag": r"(?:(?!</?answer>).)*<answer>\s*(?=\S)(?:(?!</?answer>).)+</answer>\s*",
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
    boxed: one closed `\\boxed{...}` with something in it, in the last line. hashes: one `#### answer` as the last line.

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
    return [overlong_penalty(n, most=most, soft=soft) for n in _lengths(completions, completion_ids)]


def overlong_penalty(tokens: int, *, most: int, soft: int) -> float:
    """Return the penalty for a completion of so many tokens, as `not_overlong` has it."""
    return max(-1.0, min(0.0, (most - soft - tokens) / soft)) if soft else -float(tokens > most)


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
        is_filled = form != "boxed" or bool(last_box(text))
        return is_filled and re.fullmatch(_FORMS[form], text, re.DOTALL) is not None
    answer = without_reasoning(text)
    blocks = fenced_blocks(answer)
    if len(blocks) != 1 or answer[blocks[0].end :].strip():
        return False
    return blocks[0].is_closed and blocks[0].label.lower() in PYTHON_LABELS and bool(blocks[0].code.strip())


def _lengths(completions: Sequence[Completion], completion_ids: Any) -> list[int]:
    if completion_ids is not None:
        return [len(ids) for ids in completion_ids]
    return [len(read_text(completion).split()) for completion in completions]


def of_environment(
    completions: Sequence[str], environment_reward: Sequence[float | None], **_: Any
) -> list[float | None]:
    """Return what the environment gave in the turns of each completion, in sum (`grpo.environment`)."""
    return list(environment_reward)

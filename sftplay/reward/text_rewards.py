"""Rewards that compare a completion's text with what its row asks for: exactly, by a pattern, by a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator

from sftplay.reward.code_answer import fenced_blocks
from sftplay.reward.completions import Completion, read_text, without_reasoning


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"it is no pattern, {error}") from error
    return pattern


def _is_schema(schema: Any) -> Any:
    from jsonschema import SchemaError, validators

    try:
        if isinstance(schema, Mapping):
            validators.validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"it is no JSON schema, {error.message}") from error
    return schema


Pattern = Annotated[str, AfterValidator(_compiles)]
Schema = Annotated[Mapping[str, Any] | str | Sequence[Mapping[str, Any] | str], AfterValidator(_is_schema)]


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
    second value for a name, nothing around it. `schema` is one for all rows, or a column with one for each.

    >>> fits_schema(['{"age": 3}', '{"age": "3"}'], schema={"properties": {"age": {"type": "integer"}}})
    [1.0, 0.0]
    """
    from jsonschema import validators

    schemas = [schema] * len(completions) if isinstance(schema, Mapping | str) else list(schema)
    scores = []
    for completion, written in zip(completions, schemas, strict=True):
        wanted = json.loads(written) if isinstance(written, str) else written
        kind = validators.validator_for(wanted)
        kind.check_schema(wanted)
        text = without_reasoning(read_text(completion)).strip()
        blocks = fenced_blocks(text)
        is_block = len(blocks) == 1 and blocks[0].is_closed and blocks[0].end == len(text)
        if is_block and text.startswith(("```", "~~~")) and blocks[0].label.lower() in ("", "json"):
            text = blocks[0].code
        try:
            value = strict_json(text)
        except (ValueError, RecursionError):
            scores.append(0.0)
        else:
            scores.append(float(kind(wanted).is_valid(value)))
    return scores


def strict_json(text: str) -> Any:
    """Read the value of a JSON text.

    Raises:
        ValueError: it is no JSON, or only for readers that overlook something.
    """

    def single(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ValueError("a name comes twice")
        return dict(pairs)

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, object_pairs_hook=single, parse_constant=refuse)

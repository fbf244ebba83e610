"""The known layouts of a row: the columns that each needs or may have, and how its turns are read from them.

Which layout a row has is decided in `convert`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sftplay.data.layouts.turns import (
    RowFields,
    expect_list,
    expect_text,
    is_blank,
    listed,
    openai_turns,
    prompt_turns,
    refuse,
    sharegpt_turns,
)
from sftplay.data.records import Message

if TYPE_CHECKING:  # at run time it would bring pydantic into every worker
    from sftplay.config.data import Layout

Names = tuple[str, ...]
"""A field's own name, then others under which it is found in files; the first that a row has is taken."""

INSTRUCTION: Names = ("instruction",)
USER: Names = ("user",)
ASSISTANT: Names = ("assistant",)
PROMPT: Names = ("prompt",)
TURNS: Names = ("conversations", "conversation", "dialogue")
OUTPUT: Names = ("output", "response")
COMPLETION: Names = ("completion", "response")
QUESTION: Names = ("question", "query")
ANSWER: Names = ("answer", "response")
SYSTEM: Names = ("system",)
TOOLS: Names = ("tools", "functions")


@dataclass(frozen=True)
class Body:
    """The turns of a row, before its system prompt and its tools are added."""

    turns: tuple[Message, ...]
    n_given: int = 0  # turns at the beginning that are not learned
    columns: Mapping[str, Any] = field(default_factory=dict)  # the columns that rewards read, in addition to the answer


@dataclass(frozen=True)
class Shape:
    """The columns of a layout and how its body is read from them."""

    needs: tuple[Names, ...]  # first the column of the question
    may: tuple[Names, ...] = ()
    body: Callable[[RowFields], Body] | None = None  # None: plain text
    ask: Callable[[RowFields], tuple[Message, ...]] | None = None
    """The turns up to the question, perhaps with its answer, of a row without one too. None: the text in `asked`."""

    is_published: bool = False  # the layout belongs to one data set, so its columns keep their names

    @property
    def asked(self) -> Names:
        """The column of the question."""
        return self.needs[0]

    @property
    def fields(self) -> set[str]:
        """Our names of all its columns that may have other names in a file."""
        return set() if self.is_published else {names[0] for names in (*self.needs, *self.may)}


def picked(row: RowFields, names: Names) -> str | None:
    """Return the first of the names that the row has a value for; else the first that it has at all."""
    fallback = None
    for name in names:
        if name in row:
            if row[name] is not None:
                return name
            fallback = fallback or name
    return fallback


def optional(row: RowFields, names: Names) -> object:
    """Return the value of a column that need not be there; None without it."""
    name = picked(row, names)
    return None if name is None else row[name]


def needed(row: RowFields, names: Names) -> tuple[str, object]:
    """Return the column's name in this row and its value."""
    name = picked(row, names)
    if name is None:
        refuse(f"has no key {names[0]!r}; its keys are {listed(row)}", FIX_LAYOUT)
    return name, row[name]


def needed_text(row: RowFields, names: Names) -> str:
    """Return the text in a column that must be there."""
    name, value = needed(row, names)
    return expect_text(value, name)


def _from_messages(row: RowFields) -> Body:
    return Body(openai_turns(needed(row, ("messages",))[1], "messages"))


def _from_sharegpt(row: RowFields) -> Body:
    name, value = needed(row, TURNS)
    return Body(sharegpt_turns(value, name))


def _from_alpaca(row: RowFields) -> Body:
    return Body((*_ask_alpaca(row), Message("assistant", needed_text(row, OUTPUT))))


def _ask_alpaca(row: RowFields) -> tuple[Message, ...]:
    """Read `history`, earlier exchanges as a list of pairs with answers that are learned too, and the instruction."""
    instruction, more, history = needed_text(row, INSTRUCTION), row.get("input"), row.get("history")
    extra = "" if more is None else expect_text(more, "input")
    turns = []
    for index, pair in enumerate([] if is_blank(history) else expect_list(history, "'history'", of="pairs")):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            refuse(f"history[{index}] is not a pair of a user's text and its answer")
        turns.append(Message("user", expect_text(pair[0], f"history[{index}][0]")))
        turns.append(Message("assistant", expect_text(pair[1], f"history[{index}][1]")))
    asked = "\n\n".join(text for text in (instruction, extra) if text and not text.isspace())
    return (*turns, Message("user", asked))


def _from_pair(question: Names, answer: Names) -> Callable[[RowFields], Body]:
    def read(row: RowFields) -> Body:
        return Body((Message("user", needed_text(row, question)), Message("assistant", needed_text(row, answer))))

    return read


def _from_prompt(row: RowFields) -> Body:
    """Only the completion is learned, as in TRL: assistant turns inside the prompt are context."""
    before = prompt_turns(needed(row, PROMPT)[1], "prompt", role="user")
    name, value = needed(row, COMPLETION)
    after = prompt_turns(value, name, role="assistant")
    if not any(turn.role == "assistant" for turn in after):
        refuse(f"{name!r} has no assistant turn")
    return Body((*before, *after), len(before))


def _ask_prompt(row: RowFields) -> tuple[Message, ...]:
    return prompt_turns(row["prompt"], "prompt", role="user")


def _from_problem(row: RowFields) -> Body:
    from sftplay.data.problems.problem import format_answer, format_question, reward_columns, to_problem

    problem = to_problem(row)
    turns = Message("user", format_question(problem)), Message("assistant", format_answer(problem))
    return Body(turns, columns=reward_columns(problem))


def _ask_problem(row: RowFields) -> tuple[Message, ...]:
    return _from_problem(row).turns[:1]


_MBPP = [(name,) for name in ("task_id", "test_imports", "test_setup_code", "challenge_test_list", "source_file")]

SHAPES: Mapping[Layout, Shape] = {
    "messages": Shape((("messages",),), (SYSTEM, TOOLS), _from_messages, lambda row: _from_messages(row).turns),
    "sharegpt": Shape((TURNS,), (SYSTEM, TOOLS), _from_sharegpt, lambda row: _from_sharegpt(row).turns),
    "alpaca": Shape((INSTRUCTION, OUTPUT), (("input",), ("history",), SYSTEM, TOOLS), _from_alpaca, _ask_alpaca),
    "system_user_assistant": Shape((USER, ASSISTANT), (SYSTEM,), _from_pair(USER, ASSISTANT)),
    "prompt_completion": Shape((PROMPT, COMPLETION), (SYSTEM, TOOLS), _from_prompt, _ask_prompt),
    "question_answer": Shape((QUESTION, ANSWER), (SYSTEM,), _from_pair(QUESTION, ANSWER)),
    "mbpp": Shape(
        (("test_list",), ("code",)),
        (("prompt", "text"), *_MBPP, SYSTEM),
        _from_problem,
        _ask_problem,
        is_published=True,
    ),
    "humaneval": Shape(
        (("canonical_solution",), ("test",), ("entry_point",), PROMPT),
        (("task_id",), SYSTEM),
        _from_problem,
        _ask_problem,
        is_published=True,
    ),
    "text": Shape((("text",),)),
}
"""In the order in which a row's keys are compared with them."""

QUESTIONS: tuple[Layout, ...] = (
    *("mbpp", "humaneval", "messages", "sharegpt"),
    *("prompt_completion", "alpaca", "system_user_assistant", "question_answer"),
)
"""In the order in which a row's keys are searched for a question: an answer column does not identify a layout."""

INGESTED = {"source", "title", "section", "pages", "row", "place", "n_chars", "sha256", "file_sha256"}
"""Columns that `ingest` writes next to each text. All of them together identify its rows."""

FIX_LAYOUT = (
    f"name its columns with data.columns, or the layout with data.format ({', '.join(SHAPES)});"
    " or leave such rows out with data.on_bad_row: skip"
)

"""Rows in the layouts of other kits become canonical records, or say why they cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from sftplay.config.data import DataConfig, Layout
from sftplay.config.run import RunConfig
from sftplay.data.files import (
    RowFields,
    describe_type,
    expect_list,
    expect_text,
    is_blank,
    listed,
    parse_json,
    refuse,
)  # fmt: skip
from sftplay.data.records import Call, Chat, Message, Record, Role, Source, Text
from sftplay.errors import DataError, nearest_names


def select_data_config(cfg: RunConfig, kind: str) -> DataConfig:
    """The section `data` as it holds for sources of a type: only layouts of that type are read."""
    data = cfg.data
    if kind == "cpt":
        columns = {field: column for field, column in data.columns.items() if field == "text"}
        return data.model_copy(update={"format": "text", "columns": columns, "system": None})
    others = {field: column for field, column in data.columns.items() if field != "text"}
    return data.model_copy(update={"format": "auto" if data.format == "text" else data.format, "columns": others})


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

    needs: tuple[Names, ...]  # first the column of the question, for `ask`
    may: tuple[Names, ...] = ()
    body: Callable[[RowFields], Body] | None = None  # None: plain text
    ask: Callable[[RowFields], tuple[Message, ...]] | None = None
    """The turns up to the question, perhaps with its answer, of a row without one too. None: the text in `needs[0]`."""

    is_published: bool = False  # the layout belongs to one data set, so its columns keep their names

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
    name, value = needed(row, names)
    return expect_text(value, name)


def _ask_messages(row: RowFields) -> tuple[Message, ...]:
    return openai_turns(needed(row, ("messages",))[1], "messages")


def _ask_sharegpt(row: RowFields) -> tuple[Message, ...]:
    name, value = needed(row, TURNS)
    return sharegpt_turns(value, name)


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


def _from_problem(row: RowFields) -> Body:
    from sftplay.data.problem import format_answer, format_question, reward_columns, to_problem

    problem = to_problem(row)
    turns = Message("user", format_question(problem)), Message("assistant", format_answer(problem))
    return Body(turns, columns=reward_columns(problem))


_MBPP = [(name,) for name in ("task_id", "test_imports", "test_setup_code", "challenge_test_list", "source_file")]


def _ask_prompt(row: RowFields) -> tuple[Message, ...]:
    return prompt_turns(row["prompt"], "prompt", role="user")


SHAPES: Mapping[Layout, Shape] = {
    "messages": Shape((("messages",),), (SYSTEM, TOOLS), lambda row: Body(_ask_messages(row)), _ask_messages),
    "sharegpt": Shape((TURNS,), (SYSTEM, TOOLS), lambda row: Body(_ask_sharegpt(row)), _ask_sharegpt),
    "alpaca": Shape((INSTRUCTION, OUTPUT), (("input",), ("history",), SYSTEM, TOOLS), _from_alpaca, _ask_alpaca),
    "system_user_assistant": Shape((USER, ASSISTANT), (SYSTEM,), _from_pair(USER, ASSISTANT)),
    "prompt_completion": Shape((PROMPT, COMPLETION), (SYSTEM, TOOLS), _from_prompt, _ask_prompt),
    "question_answer": Shape((QUESTION, ANSWER), (SYSTEM,), _from_pair(QUESTION, ANSWER)),
    "mbpp": Shape(
        (("test_list",), ("code",)),
        (("prompt", "text"), *_MBPP, SYSTEM),
        _from_problem,
        lambda row: _from_problem(row).turns[:1],
        is_published=True,
    ),
    "humaneval": Shape(
        (("canonical_solution",), ("test",), ("entry_point",), PROMPT),
        (("task_id",), SYSTEM),
        _from_problem,
        lambda row: _from_problem(row).turns[:1],
        is_published=True,
    ),
    "text": Shape((("text",),)),
}
"""In the order in which a row's keys are compared with them."""

FIX_LAYOUT = (
    f"name its columns with data.columns, or the layout with data.format ({', '.join(SHAPES)});"
    " or leave such rows out with data.on_bad_row: skip"
)


@dataclass(frozen=True)
class LayoutOptions:
    """The settings by which rows are understood."""

    format: Layout | Literal["auto"] = "auto"
    columns: tuple[tuple[str, str], ...] = ()  # our field, the file's column; other fields keep their own names
    system: str | None = None  # system prompt of every chat without one


DEFAULT_OPTIONS = LayoutOptions()


def read_layout_options(data: DataConfig) -> LayoutOptions:
    return LayoutOptions(format=data.format, columns=tuple(data.columns.items()), system=data.system)


def to_record(row: RowFields, source: Source, *, reading: LayoutOptions = DEFAULT_OPTIONS) -> Record:
    """Convert the row to a record that obeys every rule of its kind; texts are kept to the character.
    Raise DataError where the row has no known layout or breaks a rule; `where` is file:line, `what` the reason.
    """
    try:
        row = rename_columns(row, reading)
        shape = SHAPES[find_layout(row, reading)]
        if shape.body is None:
            text = needed_text(row, ("text",))
            if not text or text.isspace():
                refuse("text is empty")
            return Text(text, source)
        body = shape.body(row)
        turns = tie_results(body.turns)
        if not any(turn.role == "assistant" for turn in turns):
            refuse("has no assistant turn, so there is nothing to learn")
        if turns[-1].role != "assistant":
            last = "a tool's result" if turns[-1].role == "tool" else "a user turn"
            refuse(f"ends with {last} that has no answer")
        check_order(turns)
        lead = find_lead(row, turns, reading=reading)
        learned_from = len(lead) + body.n_given if body.n_given else 0
        tools = read_tools(row) if TOOLS in shape.may else ""
        columns = json.dumps(body.columns, ensure_ascii=False) if body.columns else ""
        return Chat((*lead, *turns), source, learned_from, tools, columns)
    except DataError as error:
        raise DataError(error.what, where=str(source), fix=error.fix) from None


def tie_results(turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the turns, where functions are called with ids on all calls and results."""
    if not any(turn.calls or turn.role == "tool" for turn in turns):
        return turns
    from sftplay.data import calls

    return calls.tie_results(turns)


def read_tools(row: RowFields) -> str:
    """Return the functions that the assistant of a row may call, as JSON text; empty for none."""
    value = optional(row, TOOLS)
    if is_blank(value):
        return ""
    from sftplay.data.calls import tools_text

    return tools_text(value)


def detect_layout(names: Iterable[str], mapped: Iterable[str] = ()) -> Layout | None:
    """Return the first layout that has all it needs among the names and reads every field in `mapped`, or None."""
    present, asked = set(names), set(mapped)
    for layout, shape in SHAPES.items():
        if all(not present.isdisjoint(group) for group in shape.needs) and asked <= shape.fields:
            return layout
    return None


def find_layout(row: RowFields, reading: LayoutOptions) -> Layout:
    mapped = [field for field, _ in reading.columns]
    if reading.format != "auto":
        if idle := set(mapped) - SHAPES[reading.format].fields:
            what = f"data.columns maps {listed(sorted(idle))}, which the layout {reading.format} does not read"
            refuse(what, "map the fields of that layout, or set data.format to the one that is meant")
        return reading.format
    # In a table of mixed layouts the columns of the others are null.
    used = [name for name, value in row.items() if value is not None]
    found = detect_layout(used, mapped) or detect_layout(row, mapped)
    if found is None:
        with_these = f" and reads {listed(mapped)}, as data.columns asks" if mapped else ""
        refuse(f"no known layout has the keys {listed(row)}{with_these}", FIX_LAYOUT)
    return found


def rename_columns(row: RowFields, reading: LayoutOptions, *, is_partial: bool = False) -> RowFields:
    """Return the row under our names; with `is_partial`, mapped columns may be missing."""
    if not reading.columns:
        return row
    given = {column: field for field, column in reading.columns}
    if len(given) < len(reading.columns):
        refuse("data.columns gives one column to two fields", "keep each column in one of the two")
    missing = [column for column in given if column not in row]
    if missing and not is_partial:
        what = f"has no column {missing[0]!r}, to which data.columns maps {given[missing[0]]!r}"
        refuse(f"{what}; its keys are {listed(row)}", "correct data.columns, or the row")
    ours = set(given.values())
    kept = {name: value for name, value in row.items() if name not in ours and name not in given}
    return kept | {field: row[column] for column, field in given.items() if column in row}


def find_lead(row: RowFields, turns: tuple[Message, ...], *, reading: LayoutOptions) -> tuple[Message, ...]:
    """Return the system turn that goes before these turns, if there is to be one."""
    in_column = optional(row, SYSTEM)
    has_turn = bool(turns) and turns[0].role == "system"
    if not is_blank(in_column):
        text = expect_text(in_column, "system")
        if has_turn and turns[0].content != text:
            refuse("has a system prompt in its column 'system' and another one in its first turn")
        return () if has_turn else (Message("system", text),)
    return () if has_turn or not reading.system else (Message("system", reading.system),)


# Turns as OpenAI, ShareGPT and their relatives write them become canonical messages.

OPENAI_ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    **dict.fromkeys(("tool", "function"), "tool"),
}
SHAREGPT_ROLES: dict[str, Role] = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
}
PLAIN = {"role", "content", "from", "value", "text", "name", "id", "tool_calls", "function_call", "tool_call_id"}
UNHONOURED = (
    *("reasoning_content", "reasoning", "thinking", "thought", "thoughts"),
    *("refusal", "audio", "images", "image", "videos", "train_detail"),
)
"""Keys of a message that would change what is learned and that are not rendered; ignoring them would be silent."""


def openai_turns(value: object, name: str) -> tuple[Message, ...]:
    """Read a list of objects with `role` and `content` as messages, in order."""
    messages = []
    for index, turn in enumerate(expect_list(value, repr(name), of="messages")):
        place = f"{name}[{index}]"
        if not isinstance(turn, Mapping):
            refuse(f"{place} is {describe_type(turn)}, not an object with role and content")
        role_name = turn.get("role")
        role = OPENAI_ROLES.get(role_name) if isinstance(role_name, str) else None
        if role is None:
            refuse_role(role_name, turn, name=place, known=OPENAI_ROLES)
        messages.append(read_message(role, turn, name=place, key="content"))
    return tuple(messages)


def prompt_turns(value: object, name: str, *, role: Role) -> tuple[Message, ...]:
    """Read a prompt or a completion: a list of messages, or a text that is one message from `role`."""
    if isinstance(value, list):
        return openai_turns(value, name)
    return (Message(role, expect_text(value, name)),)


def check_order(turns: Sequence[Message]) -> None:
    """Refuse any order but: system first if at all, user and assistant by turns, results after calls, no empty turn."""
    due: tuple[Role, ...] = ("user",)
    for place, turn in enumerate(turns, 1):
        role = turn.role
        if role == "system":
            if place > 1:
                refuse(f"message {place} is a system message; only the first may be one")
        elif role not in due:
            refuse(f"message {place} is from {role!r} where {due[0]!r} is due")
        if not turn.calls and (not turn.content or turn.content.isspace()):
            refuse(f"message {place}, from {role!r}, is empty")
        if role == "assistant":
            due = ("tool",) if turn.calls else ("user",)
        elif role != "system":
            due = ("assistant",) if role == "user" else ("assistant", "tool")


def read_message(role: Role, turn: Mapping[str, Any], *, name: str, key: str) -> Message:
    """Read a turn whose text stands under `key`."""
    if not PLAIN.issuperset(turn):
        check_keys(role, turn, name=name)
    value, calls = turn.get(key), tuple[Call, ...]()
    if not is_blank(turn.get("tool_calls")) or not is_blank(turn.get("function_call")):
        from sftplay.data.calls import read_calls

        calls = read_calls(role, turn, name=name)
    content = "" if value is None and calls else _read_content(value, f"{name}.{key}")
    if role != "tool":
        return Message(role, content, calls)
    tool, call_id = turn.get("name"), turn.get("tool_call_id")
    return Message(
        role,
        content,
        name="" if tool is None else expect_text(tool, f"{name}.name"),
        call_id="" if call_id is None else expect_text(call_id, f"{name}.tool_call_id"),
    )


def _read_content(value: object, name: str) -> str:
    """Return a text, or the texts of a list of parts put together."""
    if not isinstance(value, list):
        return expect_text(value, name)
    texts = []
    for index, part in enumerate(value):
        place = f"{name}[{index}]"
        if isinstance(part, str):
            texts.append(expect_text(part, place))
            continue
        if not isinstance(part, Mapping):
            refuse(f"{place} is {describe_type(part)}, not a part of a message")
        if part.get("type") not in ("text", "input_text", "output_text"):
            refuse(f"{place} is a part of the type {part.get('type')!r}; only text can be learned")
        texts.append(expect_text(part.get("text"), f"{place}.text"))
    return "".join(texts)


def check_keys(role: Role, turn: Mapping[str, Any], *, name: str) -> None:
    """Refuse keys that concern what is learned and would be ignored."""
    for key in UNHONOURED:
        if not is_blank(turn.get(key)):
            refuse(f"{name} has {key!r}, which is not rendered")
    learns = role == "assistant"
    for key in ("weight", "loss_weight"):
        if turn.get(key) not in ((None, 1) if learns else (None, 0, 1)):
            refuse(f"{name} has {key} {turn[key]!r}; only 1 is known")
    for key in ("train", "training", "trainable", "learn", "loss", "mask", "masked"):
        if turn.get(key) not in (None, learns != key.startswith("mask")):
            due = "always learned" if learns else "never learned"
            refuse(f"{name} has {key} {turn[key]!r}, but a turn from {role!r} is {due}")


def refuse_role(role_name: object, turn: Mapping[str, Any], *, name: str, known: Mapping[str, Role]) -> NoReturn:
    """Refuse a role that is none of `known`, and suggest one of them."""
    if not isinstance(role_name, str):
        refuse(f"{name} has no role: its keys are {listed(turn)}")
    meant: dict[str, Role] = {**SHAREGPT_ROLES, "developer": "system", "ai": "assistant"}
    near: str = meant.get(role_name.lower()) or "".join(nearest_names(role_name[:40], known)[:1])
    refuse(f"{name} has the unknown role {role_name[:40]!r}" + (f"; did you mean {near!r}?" if near else ""))


def sharegpt_turns(value: object, name: str) -> tuple[Message, ...]:
    """Read a list of objects with `from` and `value`, or their variants, as messages, in order."""
    messages = []
    for index, turn in enumerate(expect_list(value, repr(name), of="turns")):
        place = f"{name}[{index}]"
        if not isinstance(turn, Mapping):
            refuse(f"{place} is {describe_type(turn)}, not an object with from and value")
        key = next((key for key in ("value", "content", "text") if turn.get(key) is not None), "value")
        role_name = turn.get("from")
        role_name = turn.get("role") if role_name is None else role_name
        plain = role_name.strip().lower() if isinstance(role_name, str) else ""
        role = SHAREGPT_ROLES.get(plain)
        if plain in ("function_call", "tool_call"):
            messages.append(_read_calling_turn(turn, place, key=key))
        elif role is None:
            refuse_role(role_name, turn, name=place, known=SHAREGPT_ROLES)
        else:
            messages.append(read_message(role, turn, name=place, key=key))
    return tuple(messages)


def _read_calling_turn(turn: Mapping[str, Any], name: str, *, key: str) -> Message:
    """Read a turn of the assistant that is nothing but calls: one of them or a list, mostly as JSON text."""
    from sftplay.data.calls import read_call

    check_keys("assistant", turn, name=name)
    value = turn.get(key)
    if isinstance(value, str):
        value = parse_json(value, f"{name}.{key}", due="a call")
    calls = value if isinstance(value, list | tuple) else [value]
    if not calls:
        refuse(f"{name}.{key} has no call in it")
    return Message("assistant", "", tuple(read_call(call, f"{name}.{key}[{n}]") for n, call in enumerate(calls)))

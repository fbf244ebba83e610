"""Rows in the layouts of other kits become canonical pairs, or single answers with a verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sftplay.config.data import Layout
from sftplay.config.run import RunConfig
from sftplay.data.files import RowFields, describe_type, expect_list, expect_text, is_blank, listed, refuse
from sftplay.data.layouts import (
    SHAPES,
    LayoutOptions,
    check_order,
    find_lead,
    needed_text,
    openai_turns,
    optional,
    picked,
    read_layout_options,
    read_tools,
    rename_columns,
    sharegpt_turns,
    tie_results,
    to_record,
)
from sftplay.data.read import read_dialect, read_rows
from sftplay.data.records import Chat, Message, Refused, Role, Source
from sftplay.errors import DataError

CHOSEN, REJECTED = ("chosen",), ("rejected",)
REJECTED_ANSWER, REJECTED_DIALOGUE = "rejected_response", "rejected_messages"  # ms-swift's, next to `messages`
VERDICT = ("label", "kto_tag", "desirable")
SCORES = (
    ("score_chosen", "chosen_score", "chosen-rating", "chosen_rating", "rating_chosen"),
    ("score_rejected", "rejected_score", "rejected-rating", "rejected_rating", "rating_rejected"),
)
MARGIN = ("margin",)

PROMPTS: tuple[Layout, ...] = (
    *("prompt_completion", "sharegpt", "messages"),
    *("alpaca", "system_user_assistant", "question_answer"),
)
"""Layouts by which the prompt of a pair is read, in the order in which a row's keys are searched for one. `messages`
comes after `prompt`: next to that, published sets repeat the chosen dialogue there."""

FIX_PAIR = (
    "name the sides chosen and rejected, and what they answer prompt, or map their columns with data.columns;"
    " or leave such rows out with data.on_bad_row: skip"
)
FIX_ANSWER = (
    "name its columns prompt, completion and label, or chosen and rejected, or map them with data.columns; or leave"
    " such rows out with data.on_bad_row: skip"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the chosen one first; or one answer with a verdict."""

    prompt: tuple[Message, ...]  # ends with a user's turn or a tool's result
    sides: tuple[tuple[Message, ...], ...]  # each begins and ends with an assistant turn
    source: Source
    tools: str = ""  # as in `Chat`
    desirable: bool | None = None  # the verdict about a single answer
    margin: float = math.nan  # by how much the chosen side is better; NaN where the row does not say it
    has_scores: bool = False  # the margin is the difference of two scores
    texts: tuple[str, ...] = ()  # the prompt and each side, where all are plain texts

    @property
    def chats(self) -> tuple[Chat, ...]:
        """One chat for each side, in which only the side is learned."""
        prompt = self.prompt
        return tuple(Chat((*prompt, *side), self.source, len(prompt), self.tools) for side in self.sides)

    @property
    def question(self) -> Chat:
        """The prompt as a record: two prompts are equal if these have equal content."""
        return Chat((*self.prompt, Message("assistant", "")), self.source, tools=self.tools)

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple("\n\n".join(map(_words, side)) for side in self.sides)


def _words(turn: Message) -> str:
    calls = [f"{call.name}({call.arguments})" for call in turn.calls]
    return "\n".join([turn.content] * bool(turn.content) + calls)


def to_pair(
    row: RowFields, source: Source, *, reading: LayoutOptions, takes_answers: bool = False, is_plain: bool = False
) -> Pair:
    """Convert the row to a pair; with `takes_answers` also an answer with a verdict.

    With `is_plain` texts are not turns: two texts without a prompt have the beginning that they share as their prompt.
    Raise DataError where the row is neither, or breaks a rule; `where` is file:line, `what` the reason.
    """
    try:
        columns, row = dict(reading.columns), _unpack(rename_columns(row, reading, is_partial=True))
        reading = replace(reading, columns=())
        if _has_pair(row):
            return _read_pair(row, source, reading=reading, is_plain=is_plain)
        if takes_answers:
            return _read_answer(row, source, reading=reading)
        if picked(row, VERDICT) is not None and optional(row, CHOSEN) is None and optional(row, REJECTED) is None:
            what = f"is one answer with a verdict, not a pair; its keys are {listed(row)}"
            refuse(what, "write task_mode: kto, or give pairs")
        name = "chosen" if optional(row, CHOSEN) is None else "rejected"
        if (column := columns.get(name, name)) != name and name not in row:
            what = f"has no column {column!r}, to which data.columns maps {name!r}; its other keys are {listed(row)}"
            refuse(what, "correct data.columns, or the row")
        refuse(f"has no {name!r} side; its keys are {listed(row)}", FIX_PAIR)
    except DataError as error:
        raise DataError(error.what, where=str(source), fix=error.fix) from None


def sample_pairs(cfg: RunConfig, path: str, *, is_plain: bool) -> list[Pair]:
    """Return the readable pairs among the first 32 rows; the full pass reports all others."""
    pairs, reading, answers = [], read_layout_options(cfg.data), cfg.task.takes_answers
    for source, row in islice(read_rows(path, read_dialect(cfg.data)), 32):
        if not isinstance(row, Refused):
            with suppress(DataError):
                pairs.append(to_pair(row, source, reading=reading, takes_answers=answers, is_plain=is_plain))
    return pairs


_DIALOGUE = re.compile(
    r"""\s*\[\s*\{.*?(["'])(role|from)\1\s*:\s*(["'])(system|user|assistant|tool|human|gpt)\3""", re.S
)


def _unpack(row: RowFields) -> RowFields:
    """Return the row with messages where it has the JSON text of them: cells of csv and parquet often hold that.

    Raise DataError where a text begins as messages do, and is no JSON: Python's own notation of a list.
    """
    texts = {name: row[name] for name in ("prompt", *CHOSEN, *REJECTED, "completion") if name in row}
    found = {
        name: expect_list(value, name, of="messages")
        for name, value in texts.items()
        if isinstance(value, str) and value.lstrip()[:1] == "[" and _DIALOGUE.match(value)
    }
    return {**row, **found} if found else row


def _has_pair(row: RowFields) -> bool:
    sides = [optional(row, names) is not None for names in (CHOSEN, REJECTED)]
    in_dialogue = row.get("messages") is not None
    other = row.get(REJECTED_ANSWER) is not None or row.get(REJECTED_DIALOGUE) is not None
    return all(sides) or (in_dialogue and other and not sides[0])


def _read_pair(row: RowFields, source: Source, *, reading: LayoutOptions, is_plain: bool) -> Pair:
    texts: tuple[str, ...] = ()
    if optional(row, CHOSEN) is None:
        prompt, sides = _split_dialogues(*_swift_dialogues(row))
    else:
        values = [optional(row, names) for names in (CHOSEN, REJECTED)]
        chosen, rejected = (_read_side(value, name) for value, name in zip(values, ("chosen", "rejected")))
        if _is_whole(chosen) != _is_whole(rejected):
            refuse("has a whole dialogue as one side, and only an answer as the other")
        given = _read_prompt(row, reading=reading, is_needed=not (_is_whole(chosen) or is_plain))
        if _is_whole(chosen):
            prompt, sides = _split_dialogues(chosen, rejected)
            if given:
                _expect_theirs(given, prompt)
        elif given:
            prompt, sides = given, (chosen, rejected)
            asked = row.get("prompt")
            if isinstance(asked, str) and not _is_hh(asked) and all(isinstance(value, str) for value in values):
                texts = (asked, *map(str, values))
        else:  # texts that a model goes on writing
            texts = _split_texts(*(expect_text(value, name) for value, name in zip(values, ("chosen", "rejected"))))
            prompt = (Message("user", texts[0]),)
            sides = tuple((Message("assistant", text),) for text in texts[1:])
    margin, has_scores = _read_margin(row)
    pair = _complete(row, source, prompt, sides=sides, reading=reading)
    is_bare = not pair.tools and len(pair.prompt) == 1
    return replace(pair, margin=margin, has_scores=has_scores, texts=texts if is_bare else ())


def _complete(
    row: RowFields, source: Source, prompt: Sequence[Message], *, sides: Sequence[Sequence[Message]], reading: Any
) -> Pair:
    """Return the pair with its system prompt and tools, each side checked as a chat."""
    for place, turn in enumerate(prompt, 1):
        if not turn.calls and not turn.content.strip():
            refuse(f"its prompt: message {place}, from {turn.role!r}, is empty")
    whole, n_given = [tie_results((*prompt, *side)) for side in sides], len(prompt)
    for turns, side, name in zip(whole, sides, ("chosen", "rejected") if len(sides) == 2 else ("completion",)):
        if not side:
            refuse(f"its {name} side has no turn")
        if side[0].role != "assistant" or side[-1].role != "assistant":
            refuse(f"its {name} side does not begin and end with an assistant turn")
        try:
            check_order(turns)
        except DataError as error:
            raise DataError(f"its {name} side: {error.what}", fix=error.fix) from None
    if any(turns[:n_given] != whole[0][:n_given] for turns in whole):
        refuse("its sides answer the calls of the prompt otherwise")
    lead = find_lead(row, whole[0], reading=reading)
    return Pair((*lead, *whole[0][:n_given]), tuple(turns[n_given:] for turns in whole), source, read_tools(row))


def _read_answer(row: RowFields, source: Source, *, reading: LayoutOptions) -> Pair:
    name = picked(row, VERDICT)
    if name is None:
        what = "is neither an answer with a verdict nor a pair"
        refuse(f"{what}; its keys are {listed(row)}", FIX_ANSWER)
    desirable = _read_verdict(row[name], name)
    rest = {key: value for key, value in row.items() if key not in VERDICT}
    record = to_record(rest, source, reading=reading)
    if not isinstance(record, Chat):
        refuse("is a plain text without a prompt, so there is no answer to judge", FIX_ANSWER)
    n_given = record.learned_from or record.turns()[-1]
    prompt, side = record.messages[:n_given], record.messages[n_given:]
    if side[0].role != "assistant":
        refuse("its completion does not begin with an assistant turn")
    asked = row.get("prompt")
    is_bare = not record.tools and len(prompt) == len(side) == 1
    texts = (asked, side[0].content) if isinstance(asked, str) and is_bare and asked == prompt[0].content else ()
    return Pair(prompt, (side,), source, record.tools, desirable, texts=texts)


def _read_verdict(value: object, name: str) -> bool:
    words = {"true": True, "false": False, "1": True, "0": False}
    found = words.get(value.strip().lower()) if isinstance(value, str) else None
    if found is None and isinstance(value, bool | int | float) and value in (0, 1):
        found = bool(value)
    if found is None:
        shown = repr(value)[:40] if isinstance(value, str | bool | int | float) else describe_type(value)
        refuse(f"{name} is {shown}, not true or false", "write true for an answer that is wanted, false for others")
    return found


def _read_margin(row: RowFields) -> tuple[float, bool]:
    """Return the margin of a row, and whether it is the difference of two scores."""
    if not math.isnan(margin := _read_number(row, MARGIN)):
        return margin, False
    margin = _read_number(row, SCORES[0]) - _read_number(row, SCORES[1])
    return margin, not math.isnan(margin)


def _read_number(row: RowFields, names: tuple[str, ...]) -> float:
    """Return a number of a column that need not be there, else NaN; csv has numbers as text."""
    name = picked(row, names)
    value = None if name is None else row[name]
    if name is None or is_blank(value):
        return math.nan
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.inf
    except (ValueError, OverflowError):
        number = math.inf
    if math.isinf(number):
        shown = repr(value)[:40] if isinstance(value, str | int | float) else describe_type(value)
        refuse(f"{name} is {shown}, not a finite number")
    return number


def _read_prompt(row: RowFields, *, reading: LayoutOptions, is_needed: bool) -> tuple[Message, ...]:
    """Return the turns that a row gives as the prompt of its sides; none where it gives none."""
    for layout in PROMPTS:
        shape = SHAPES[layout]
        if optional(row, shape.needs[0]) is None or (layout == "messages" and not is_needed):
            continue
        if layout == "prompt_completion" and isinstance(row["prompt"], str) and _is_hh(row["prompt"]):
            return _hh_turns(row["prompt"], "prompt", is_prompt=True)
        if shape.ask is not None:
            return shape.ask(row)
        return (Message("user", needed_text(row, shape.needs[0])),)
    if is_needed:
        what = f"has two answers but no prompt, and they are not whole dialogues; its keys are {listed(row)}"
        refuse(what, FIX_PAIR)
    return ()


def _read_side(value: object, name: str) -> tuple[Message, ...]:
    """Read a side: a text, a turn, or a list of turns; of an answer or of a whole dialogue."""
    if isinstance(value, str):
        if _is_hh(value):
            return _hh_turns(value, name)
        return (Message("assistant", expect_text(value, name)),)
    turns: Sequence[Any] = [value] if isinstance(value, Mapping) else expect_list(value, repr(name), of="messages")
    if not turns:
        refuse(f"{name} is an empty list")
    is_sharegpt = any(isinstance(turn, Mapping) and turn.get("from") is not None for turn in turns)
    return (sharegpt_turns if is_sharegpt else openai_turns)(list(turns), name)


def _is_whole(turns: Sequence[Message]) -> bool:
    """Return True for a whole dialogue, which begins with a user's turn."""
    return next((turn.role for turn in turns if turn.role != "system"), "user") == "user"


_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_HH_ROLES: Mapping[str, Role] = {"Human": "user", "Assistant": "assistant"}


def _is_hh(text: str) -> bool:
    """Return True for a dialogue in one text, as Anthropic's hh-rlhf writes it."""
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def _hh_turns(text: str, name: str, *, is_prompt: bool = False) -> tuple[Message, ...]:
    parts = _HH_TURN.split(expect_text(text, name).lstrip())
    turns = [Message(_HH_ROLES[role], words.strip()) for role, words in zip(parts[1::2], parts[2::2], strict=True)]
    if is_prompt and turns[-1].role == "assistant" and not turns[-1].content:
        turns.pop()  # the name that opens the answer
    return tuple(turns)


def count_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the parts that both begin with."""
    shortest = min(len(one), len(other))
    return next((n for n in range(shortest) if one[n] != other[n]), shortest)


def _split_dialogues(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
    """Return the turns that two dialogues share, up to the first answer that differs, and what follows them in each."""
    shortest = min(len(chosen), len(rejected))
    n_shared = count_shared(chosen, rejected)
    if n_shared == len(chosen) == len(rejected):  # the sides are equal; the last answer is theirs
        n_shared -= 1
    elif n_shared == shortest:  # one side goes on where the other ends: it ends with its last answer
        n_shared = max((n for n in range(shortest) if chosen[n].role == "assistant"), default=0)
    differing = {turns[n_shared].role for turns in (chosen, rejected)}
    if differing != {"assistant"}:
        what = f"its two dialogues differ in message {n_shared + 1}, which is not an answer: they have no shared prompt"
        refuse(what, "give both sides the same prompt, or leave such rows out with data.on_bad_row: skip")
    return chosen[:n_shared], (chosen[n_shared:], rejected[n_shared:])


def _expect_theirs(given: tuple[Message, ...], shared: tuple[Message, ...]) -> None:
    """Refuse a row with a prompt that its two dialogues do not begin with; sets of several turns give the last one."""
    if given[0].role != "system" and shared[0].role == "system":
        given = (shared[0], *given)
    asked = [turn.content.strip() for turn in given if turn.role == "user"]
    known = [turn.content.strip() for turn in shared if turn.role == "user"]
    if given != shared[: len(given)] and not (len(asked) == 1 and asked[0] in (known[0], known[-1])):
        what = "has a prompt that its two dialogues do not begin with"
        refuse(what, "correct the prompt, or take it out: the dialogues hold their own")


def _split_texts(chosen: str, rejected: str) -> tuple[str, ...]:
    """Return the beginning that two plain texts share, up to a word's end, and the rest of each."""
    n_shared = count_shared(chosen, rejected)
    while n_shared and not chosen[n_shared : n_shared + 1].isspace():
        n_shared -= 1
    if not chosen[:n_shared].strip():
        refuse("has no prompt, and its two texts share no beginning", FIX_PAIR)
    return chosen[:n_shared], chosen[n_shared:], rejected[n_shared:]


def _swift_dialogues(row: RowFields) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return the dialogues of a row with `messages` and another answer, or other messages."""
    chosen = openai_turns(row["messages"], "messages")
    if not chosen or chosen[-1].role != "assistant":
        refuse("messages does not end with an assistant turn, so there is no chosen answer")
    if row.get(REJECTED_DIALOGUE) is not None:
        rejected = openai_turns(row[REJECTED_DIALOGUE], REJECTED_DIALOGUE)
        return chosen, rejected if _is_whole(rejected) else (*chosen[:-1], *rejected)
    value = row[REJECTED_ANSWER]
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        refuse(f"{REJECTED_ANSWER} has {len(value)} answers, and a pair has one", "write a row for each of them")
    return chosen, (*chosen[:-1], *_read_side(value, REJECTED_ANSWER))

"""Which characters of a chat are learned, by generation tags, sentinels or prefixes; and its token ids with labels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from sftplay.data.records import IGNORE_INDEX, Call, Chat, Message, Source, Text
from sftplay.data.render.templates import ChatTemplate, Span
from sftplay.data.render.vocabulary import (
    Encoded,
    SpecialTokenEscaper,
    Vocabulary,
    alternation,
    unguarded,
    without_guards,
)
from sftplay.errors import DataError

TRIED_TURNS = 100
"""Up to here, and for the last turn, the inference prompt of each answer is rendered. Further on, an answer before
which the template writes the same text as before an earlier one has the same prompt: to render thousands takes
quadratic time."""

EDGE = " \n "  # white space put around the marks, to see on which side a template trims


class Unproven(Exception):
    """The method cannot vouch for this chat; the message gives the reason."""


def read_sentinel_layout(
    template: ChatTemplate, roles: Sequence[str], *, end: re.Pattern[str]
) -> Callable[[Sequence[Message]], tuple[str, list[Span]]]:
    """Read what a template writes around the messages of a chat with these roles.

    It gives a function from messages to the text that the template must write for them, and each message's span in it.
    `end` matches an end-of-turn token and white space before it.
    Raise Unproven where a text is missing, doubled or out of order, inference would prompt otherwise, or a turn has no
    end; DataError where the template refuses these roles.
    """
    # Letters between private-use characters: nothing a template trims, splits at or looks for.
    marks = [f"\ue0f0m{index}\ue0f1" for index in range(len(roles))]
    probes = [Message(role, EDGE + mark + EDGE) for role, mark in zip(roles, marks)]  # type: ignore[arg-type]
    text, _ = template.render(probes)
    gaps = [text]
    for index, mark in enumerate(marks):
        if text.count(mark) != 1 or mark not in gaps[-1]:
            raise Unproven(f"the text of message {index + 1} appears {text.count(mark)} times or out of order")
        gaps[-1:] = gaps[-1].split(mark)
    # Whether white space at that edge of a message's text survives.
    keeps_left, keeps_right = [gap.endswith(EDGE) for gap in gaps[:-1]], [gap.startswith(EDGE) for gap in gaps[1:]]
    for index in range(len(roles)):
        gaps[index] = gaps[index].removesuffix(EDGE) if keeps_left[index] else gaps[index]
        gaps[index + 1] = gaps[index + 1].removeprefix(EDGE) if keeps_right[index] else gaps[index + 1]
    # How much of the gap before a message belongs to the inference prompt, and of the gap behind it to its turn: up to
    # the end-of-turn token.
    heads, tails = [0] * len(roles), [0] * len(roles)
    known: dict[tuple[str, bool], int] = {}
    for index in (index for index, role in enumerate(roles) if role == "assistant"):
        form = gaps[index], keeps_left[index]
        if index and (form not in known or index < TRIED_TURNS or index == len(roles) - 1):
            prompt, before = template.render(probes[:index], prompts=True)[0], text[: text.index(marks[index])]
            if not before.startswith(prompt):
                raise Unproven(f"at inference an answer would follow {prompt[-40:]!r}, in training {before[-40:]!r}")
            # What follows the prompt is learned: text the template puts first, and the answer's white space where kept.
            n_learned = len(before) - len(prompt) - len(EDGE) * keeps_left[index]
            known[form] = len(gaps[index]) - max(n_learned, 0)
        heads[index] = known[form] if index else 0
        match = end.match(gaps[index + 1])
        if not match:
            raise Unproven(f"no end-of-turn token follows the assistant's text but {gaps[index + 1][:40]!r}")
        tails[index] = match.end()

    def assemble(messages: Sequence[Message]) -> tuple[str, list[Span]]:
        parts, spans, at = [gaps[0]], [], len(gaps[0])
        for index, message in enumerate(messages):
            content = message.content if keeps_left[index] else message.content.lstrip()
            content = content if keeps_right[index] else content.rstrip()
            spans.append((at - len(gaps[index]) + heads[index], at + len(content) + tails[index]))
            parts += (content, gaps[index + 1])
            at += len(content) + len(gaps[index + 1])
        return "".join(parts), spans

    return assemble


def uses_tools(chat: Chat) -> bool:
    """Return True if tools are offered, called or answered in the chat."""
    return bool(chat.tools) or any(message.calls or message.role == "tool" for message in chat.messages)


def find_calls_end(text: str, calls: Sequence[Call], *, at: int) -> int:
    """Find where the last name or value of `calls` ends in `text`, searching from `at`.
    Raise Unproven where a name, a key or a value is not there.
    """
    for call in calls:
        begin = text.find(call.name, at)
        if begin < 0:
            raise Unproven(f"the template does not write the call of {call.name!r}")
        begin = at = begin + len(call.name)
        for key, value in _leaves(json.loads(call.arguments)):
            forms = spellings(value) if isinstance(value, str) else (json.dumps(value), str(value))
            after_key = _after(text, spellings(key), begin=begin)
            end = _after(text, forms, begin=after_key) if after_key >= 0 else -1
            if end < 0:
                raise Unproven(f"the template changes or drops {key}={value!r}, an argument of {call.name!r}")
            at = max(at, end)
    return at


def spellings(content: str) -> Iterator[str]:
    """Yield the ways a template may write a text: as it is, or inside JSON or Python."""
    stripped = content.strip()
    yield stripped
    yield json.dumps(stripped, ensure_ascii=False)[1:-1]
    yield json.dumps(stripped)[1:-1]
    yield repr(stripped)[1:-1]
    yield stripped.replace("\\", "\\\\").replace("\n", "\\n").replace("'", "\\'")


def has_text(text: str, message: Message) -> bool:
    """Return True if `text` contains the text of the message, apart from white space."""
    if message.content.strip() in text:
        return True
    squeezed = "".join(text.split())
    return any("".join(form.split()) in squeezed for form in spellings(message.content))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that holds no others, with the nearest key above it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def _after(text: str, forms: Iterable[str], *, begin: int, end: int | None = None) -> int:
    """Find the end of the first of `forms` between the two places, or -1."""
    for form in forms:
        place = text.find(form, begin, end)
        if place >= 0:
            return place + len(form)
    return -1


def _n_equal(one: str, other: str) -> int:
    """Count the characters that the two texts begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


Method = Literal["markers", "sentinels", "prefixes"]


@dataclass(frozen=True, slots=True)
class Marked:
    """A rendered record and the spans of its text that are learned, or the reason why it has none."""

    text: str
    spans: tuple[Span, ...] = ()
    problem: str = ""
    n_escaped: int = 0
    is_spelled: bool = False  # the text is spelled by `escape_special_tokens`, because the record types special tokens
    is_whole_text: bool = False
    """A plain text, not a chat: all of it is learned. The tokenizer's own BOS and an EOS go around it."""


class TurnFinder:
    """Find the learned spans of chats for one template.

    `special_tokens` are all texts that may end a turn; those that do are found by trying, and are `ends` afterwards.
    """

    def __init__(self, template: ChatTemplate, special_tokens: Iterable[str], *, ends: tuple[str, ...] = ()) -> None:
        self.template = template
        special = list(special_tokens)
        self._special, self._closing = _pattern(special, "+"), _pattern(special, r"+\s*\Z")
        self._layouts: dict[tuple[str, ...], Callable[[Sequence[Message]], tuple[str, list[Span]]]] = {}
        self._set_ends(ends)

    def learn_ends(self, chats: Iterable[Chat]) -> None:
        """Remember which run of tokens ends the last turn of these chats; chats that the template refuses are skipped.

        Only a last turn shows it: after any other, the tokens of the next header may follow at once.
        """
        found = set(self.ends)
        for chat in chats:
            with suppress(DataError, Unproven):
                text, calls = self.render_chat(chat), chat.messages[-1].calls
                if calls:  # only the end of the text shows it
                    prompt = self.render_prompt(chat, len(chat.messages) - 1)
                    match = self._closing.search(text, find_calls_end(text, calls, at=len(prompt)))
                else:
                    at = _find_answer_end(text, chat)
                    match = self._special.match(text, at) if at >= 0 else self._closing.search(text)
                found |= {match.group().strip()} if match else set()
        self._set_ends(tuple(sorted(found, key=len, reverse=True)))

    def rewrites(self, chat: Chat) -> bool:
        """Return True if the template writes a turn differently once other turns follow it."""
        whole = self.render_chat(chat)
        for part in chat.turns_apart()[:-1]:
            text = self.render_chat(part)
            after = _find_answer_end(text, part)
            end = after + len(self._match_end(text, after))
            if after >= 0 and not whole.startswith(text[:end]):
                return True
        return False

    def find(self, chat: Chat, method: Method) -> Marked:
        """Return the chat's text with the spans of its learned turns, each checked against the assistant's text.
        Raise Unproven where the method does not hold for this chat; DataError where the template refuses the chat.
        """
        by = {"markers": self._by_markers, "sentinels": self._by_sentinels, "prefixes": self._by_prefixes}
        marked = by[method](chat)
        for (start, end), turn in zip(marked.spans, chat.learned_turns(), strict=True):
            prompt = marked.text[:start] * (method == "prefixes")
            self._check(marked.text[start:end], chat.messages[turn], prompt=prompt)
        if method != "sentinels":
            self._check_context(chat, marked)
        return marked

    def place(self, chat: Chat, method: Method, *, rewrites: bool) -> list[tuple[Chat, Marked]]:
        """Return the chat with its marked text; one chat and text for each turn where one text cannot show them all.

        Where `method` does not hold, prefixes are tried.
        Raise Unproven where nothing holds for this chat; DataError where the template refuses the chat.
        """

        def find_or_prefixes(part: Chat) -> Marked:
            if method != "prefixes":
                with suppress(Unproven):
                    return self.find(part, method)
            return self.find(part, "prefixes")

        splittable = len(chat.learned_turns()) > 1
        if not (splittable and rewrites):
            try:
                return [(chat, find_or_prefixes(chat))]
            except Unproven:
                if not splittable:
                    raise
        return [(part, find_or_prefixes(part)) for part in chat.turns_apart()]

    def render_chat(self, chat: Chat) -> str:
        return self.template.render(chat.messages, tools=chat.tools)[0]

    def render_prompt(self, chat: Chat, turn: int) -> str:
        """Render the inference prompt for the chat's turn of this index."""
        return self.template.render(chat.messages[:turn], tools=chat.tools, prompts=True)[0]

    def check_prompts(self, chat: Chat, marked: Marked) -> None:
        """Raise Unproven unless each learned turn follows exactly the text that inference would prompt with."""
        for (start, end), turn in zip(marked.spans, chat.learned_turns(), strict=True):
            prompt = self.render_prompt(chat, turn)
            before = marked.text[:start]
            if before != prompt:
                at_inference = f"at inference it would follow {prompt[-40:]!r}"
                raise Unproven(f"in training an answer follows {before[-40:]!r}, {at_inference}")
            bare, _ = self.template.render(chat.messages[:turn], tools=chat.tools)
            opens_itself = squeezed(marked.text[start:end]).startswith(squeezed(chat.messages[turn].content))
            if bare == prompt and not opens_itself:
                raise Unproven("the template ignores add_generation_prompt, so inference would not open the answer")

    def _by_markers(self, chat: Chat) -> Marked:
        text, spans = self.template.render(chat.messages, tools=chat.tools)
        turns = chat.turns()
        if len(spans) != len(turns):
            raise Unproven(f"{len(spans)} generation blocks for {len(turns)} assistant turns")
        trimmed = [(start, start + len(text[start:end].rstrip())) for start, end in spans]
        return Marked(text, tuple(span for span, turn in zip(trimmed, turns) if turn >= chat.learned_from))

    def _by_sentinels(self, chat: Chat) -> Marked:
        if uses_tools(chat):
            raise Unproven("calls have no text that a mark could replace")
        text, roles = self.render_chat(chat), tuple(turn.role for turn in chat.messages)
        if roles not in self._layouts:
            self._layouts[roles] = read_sentinel_layout(self.template, roles, end=self._end)
        expected, spans = self._layouts[roles](chat.messages)
        if text != expected:
            raise Unproven("the template writes this chat's texts otherwise than it writes unique marks in their place")
        return Marked(text, tuple(spans[turn] for turn in chat.learned_turns()))

    def _by_prefixes(self, chat: Chat) -> Marked:
        text = self.render_chat(chat)
        spans = []
        for turn in chat.learned_turns():
            prompt = self.render_prompt(chat, turn)
            is_last = turn == len(chat.messages) - 1
            upto = text if is_last else self.template.render(chat.messages[: turn + 1], tools=chat.tools)[0]
            end = self._find_turn_end(upto, chat.messages[turn], begin=len(prompt))
            if not text.startswith(prompt):
                raise Unproven(
                    f"in training an answer does not follow {prompt[-40:]!r}, which it would follow at inference"
                )
            if text[:end] != upto[:end]:
                raise Unproven("the text up to a turn is not the beginning of the whole text")
            spans.append((len(prompt), end))
        return Marked(text, tuple(spans))

    def _find_turn_end(self, text: str, message: Message, *, begin: int) -> int:
        """Find the end of the last turn: after the token that follows its text, or that ends everything."""
        if message.calls:
            match = self._any_end.search(text, find_calls_end(text, message.calls, at=begin))
            return match.end() if match else len(text.rstrip())
        content = message.content.strip()
        at = text.rfind(content, begin)
        tail = self._match_end(text, at + len(content)) if at >= 0 else ""
        return at + len(content) + len(tail) if tail else len(text.rstrip())

    def _check(self, learned: str, message: Message, *, prompt: str) -> None:
        """Check that the learned text is the assistant's, apart from white space and what the template puts before.

        The text may begin in `prompt`, the inference prompt: some of those open the thinking for the model.
        """
        end = next((end for end in self.ends if learned.endswith(end)), None)
        if end is None:
            raise Unproven(f"the learned text does not close with the end-of-turn token but with {learned[-20:]!r}")
        body, content = learned[: len(learned) - len(end)], message.content
        if message.calls:
            if not has_text(prompt[-len(content) :] * bool(content) + body, message):
                raise Unproven(f"the template drops the assistant's text next to its calls: {content[:60]!r}")
            find_calls_end(body, message.calls, at=0)
            return
        if body == content or squeezed(body).endswith(squeezed(content)):
            return
        if not body.strip() or not squeezed(prompt[-len(content) :] + body).endswith(squeezed(content)):
            raise Unproven(f"the template changes or drops part of the assistant's text: {content[:60]!r}")

    def _check_context(self, chat: Chat, marked: Marked) -> None:
        """Raise Unproven when the template leaves out what the answers answer; earlier answers it may shorten."""
        at = 0
        for message in chat.messages:
            if message.role not in ("system", "user"):
                continue
            # Texts nearly always stand in order; to look from the beginning each time would take quadratic time.
            found = marked.text.find(message.content.strip(), at)
            at = max(at, found)
            if found < 0 and not has_text(marked.text, message):
                raise Unproven(f"the template changes or drops the {message.role}'s text: {message.content[:60]!r}")
        # Each tool's result must stand in order, and before the turn that learns from it.
        begins, at = dict(zip(chat.learned_turns(), [start for start, _ in marked.spans], strict=True)), 0
        for index, message in enumerate(chat.messages):
            if message.role == "tool":
                until = next((begins[turn] for turn in sorted(begins) if turn > index), None)
                at = _after(marked.text, spellings(message.content), begin=at, end=until)
                if at < 0:
                    raise Unproven(f"the template changes or drops a tool's result: {message.content[:60]!r}")
        if chat.tools:  # all must be named in what the same chat without tools lacks
            text, without = marked.text, self.template.render(chat.messages)[0]
            start = _n_equal(text, without)
            shared = _n_equal(text[start:][::-1], without[start:][::-1])
            for tool in json.loads(chat.tools):
                name = tool.get("function", tool).get("name", "")
                if name not in text[start : len(text) - shared]:
                    raise Unproven(f"the template leaves out the tool {name!r}")

    def _set_ends(self, ends: tuple[str, ...]) -> None:
        self.ends = ends
        self._end = _pattern(ends)
        self._any_end = re.compile(alternation(ends))

    def _match_end(self, text: str, at: int) -> str:
        match = self._end.match(text, max(at, 0))
        return match.group() if match else ""


def _find_answer_end(text: str, chat: Chat) -> int:
    """Find where the last assistant text ends, or -1 where the template does not print it."""
    content = chat.answer.strip()
    at = text.rfind(content)
    return at + len(content) if at >= 0 else -1


def _pattern(tokens: Iterable[str], repeat: str = "") -> re.Pattern[str]:
    """White space, then one of `tokens`, the longest that fits; without tokens it matches nowhere."""
    return re.compile(rf"\s*{alternation(filter(None, tokens))}{repeat}")


def squeezed(text: str) -> str:
    return "".join(text.split())


SPARE_CHARACTERS, CHARACTERS_A_TOKEN = 1_000_000, 64
"""A text is tokenised up to this many characters, plus this many for each token that can be used."""

EDGE_CHARACTERS = 1_000
"""So far from the cut, the tokens of a cut text are those of the whole text; few vocabularies have longer ones."""

MANY_EXAMPLES, USUAL_CHARACTERS = 8, 8
"""From this many examples of one record on, their shared beginning is read once. It is searched for in this many
characters for each token that can be used."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One training example, or the reason why a record gives none."""

    input_ids: list[int]
    labels: list[int]  # as long as `input_ids`: the same id where it is learned, -100 elsewhere
    record_index: int = 0  # index of the record it came from, in the list that was rendered
    problem: str = ""  # why the record cannot be trained on; then both lists are empty
    n_escaped: int = 0
    """Number of special tokens that the texts of the record spell; only its first example has the count."""

    joins_prompt: bool = False
    """The problem: a token begins in the prompt and ends in the answer, so the prompt at inference would differ."""

    n_tokens: int = 0
    """Tokens of a very long text, reckoned in thousands from its beginning, which alone was tokenised; else 0."""


def labelled(
    vocabulary: Vocabulary, groups: Sequence[Sequence[Marked]], *, max_tokens: int | None = None
) -> list[Rendered]:
    """Return an example for each marked text of each record, in order; those without a text keep their reason."""
    limit = None if max_tokens is None else SPARE_CHARACTERS + CHARACTERS_A_TOKEN * max_tokens
    items, texts = [], []
    for index, group in enumerate(groups):
        beginning = None if max_tokens is None else _find_shared_beginning(vocabulary, group, max_tokens=max_tokens)
        for marked in group:
            items.append((index, marked))
            texts.append(beginning if beginning and marked.text.startswith(beginning) else marked.text)
    is_plain = [not (marked.is_spelled or marked.problem) for _, marked in items]
    plain = list(dict.fromkeys(text[:limit] for text, is_read in zip(texts, is_plain, strict=True) if is_read))
    known: dict[str, Encoded]
    if limit is None and all(marked.is_whole_text for _, marked in items if not marked.problem):
        known = {text: (ids, None, "") for text, ids in zip(plain, vocabulary.encode_ids(plain), strict=True)}
    else:
        known = {text: (found.ids, found, "") for text, found in zip(plain, vocabulary.encode(plain), strict=True)}
    examples = []
    for (index, marked), shared in zip(items, texts, strict=True):
        if marked.problem:
            examples.append(Rendered([], [], index, marked.problem))
            continue
        text = shared[:limit]
        encoded = vocabulary.encode_spelled(text) if marked.is_spelled else known[text]
        is_enough = len(text) == len(marked.text) or shared is not marked.text
        if not is_enough and _n_sure(encoded[1], text) <= (max_tokens or 0):
            # A long text with few tokens, such as white space: its beginning is not enough.
            text = marked.text
            if marked.is_spelled:
                encoded = vocabulary.encode_spelled(text)
            else:
                (encoding,) = vocabulary.encode([text])
                encoded = encoding.ids, encoding, ""
        examples.append(_make_example(vocabulary, index, marked=marked, text=text, encoded=encoded))
    return examples


def _find_shared_beginning(vocabulary: Vocabulary, group: Sequence[Marked], *, max_tokens: int) -> str | None:
    """Return the beginning of a record's last text, if that alone has more tokens than can be used.

    The examples of a chat that was split begin alike. To read each of them to its end takes quadratic time.
    """
    if len(group) < MANY_EXAMPLES:
        return None
    whole = next((marked.text for marked in reversed(group) if not (marked.is_spelled or marked.problem)), "")
    text = whole[: USUAL_CHARACTERS * max_tokens + EDGE_CHARACTERS]
    if len(text) == len(whole):
        return None
    (encoding,) = vocabulary.encode([text])
    if _n_sure(encoding, text) <= max_tokens:
        return None
    return text[: encoding.token_to_chars(max_tokens)[1] + EDGE_CHARACTERS]


def _make_example(vocabulary: Vocabulary, index: int, *, marked: Marked, text: str, encoded: Encoded) -> Rendered:
    """Return the example of a marked text of record `index`; `text` is the part of it that was encoded."""
    ids, encoding, lost = encoded
    if lost:
        return Rendered([], [], index, f"types {lost!r}, which this tokenizer cannot write as text")
    is_partial = len(text) < len(marked.text)
    n_tokens = -(-len(ids) * len(marked.text) // (1000 * len(text))) * 1000 if is_partial else 0
    if marked.is_whole_text:  # all is learned except the BOS; a text that was cut gets no EOS
        head = list(vocabulary.specials.prefix_ids)
        end = [] if is_partial or vocabulary.eos_id is None else [vocabulary.eos_id]
        ids, labels = [*head, *ids, *end], [*[IGNORE_INDEX] * len(head), *ids, *end]
        return Rendered(ids, labels, index, "", marked.n_escaped, n_tokens=n_tokens)
    labels = [IGNORE_INDEX] * len(ids)
    try:
        for start, stop in marked.spans:
            if start < len(text):
                first, last = _find_tokens(encoding, text, span=(start, min(stop, len(text))))
                labels[first:last] = ids[first:last]
    except Unproven as error:
        return Rendered([], [], index, str(error), joins_prompt=True)
    return Rendered(ids, labels, index, "", marked.n_escaped, n_tokens=n_tokens)


def _n_sure(encoding: Any, text: str) -> int:
    """Count the tokens at the beginning of a cut text that are surely those of the whole text."""
    return encoding.char_to_token(max(len(text) - EDGE_CHARACTERS, 0)) or 0


def _find_tokens(encoding: Any, text: str, *, span: Span) -> tuple[int, int]:
    """Find the tokens that spell the span; one that begins in the prompt counts if it spells more than white space.
    Raise Unproven where a token begins in the prompt, and the answer does not begin with white space.
    """
    start, end = span
    first = encoding.char_to_token(start)
    while first is None and start < end - 1:  # a tokenizer may drop white space
        start += 1
        first = encoding.char_to_token(start)
    last = encoding.char_to_token(end - 1)
    if first is None or last is None:
        return 0, 0
    left, right = encoding.token_to_chars(first)
    if left < span[0]:
        if not text[span[0]].isspace():  # white space may share a token with the prompt, as in `proof`
            answer = text[span[0] : span[0] + 40]
            raise Unproven(f"the tokenizer joins the prompt's end otherwise where {answer!r} follows than at inference")
        first += text[span[0] : right].isspace()
    return first, last + 1


NOWHERE = Source("(prompt)", 1)


class Writer:
    """One tokenizer that keeps typed and written special tokens apart."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.escaper = SpecialTokenEscaper(vocabulary.control_tokens)

    def needs_spelling(self, n_typed: int) -> bool:
        """Return whether a text with `n_typed` special tokens must be spelled: they could become control otherwise."""
        return n_typed > 0 or self.vocabulary.folds_text

    def mark_text(self, record: Text) -> Marked:
        """Return a plain text, all of it to be learned.
        Raise Unproven where the tokenizer has nothing to end it with; DataError where it holds a noncharacter.
        """
        if self.vocabulary.eos_id is None:
            raise Unproven("the tokenizer has no EOS token, so a text could not end")
        guarded, n_typed = self.escaper.guarded(record)
        if not self.needs_spelling(n_typed):
            return Marked(record.text, is_whole_text=True)
        spelled, _ = self.escaper.spelled(guarded.text, [])  # type: ignore[union-attr]
        return Marked(spelled, n_escaped=n_typed, is_spelled=True, is_whole_text=True)

    def spell(self, finder: TurnFinder, part: Chat, *, marked: Marked, n_escaped: int = 0) -> Marked:
        """Return the marked text of a guarded chat, ready to be encoded.
        Raise Unproven where the template writes the chat otherwise when what it types is guarded.
        """
        if finder.render_chat(unguarded(part)) != without_guards(marked.text):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        text, spans = self.escaper.spelled(marked.text, marked.spans)
        return Marked(text, spans, n_escaped=n_escaped, is_spelled=True)

    def prompt_ids(self, finder: TurnFinder, messages: Sequence[Message], *, tools: str) -> list[int]:
        """Return the tokens that ask for an answer to `messages`.
        Raise Unproven where what is typed in them cannot be kept apart from control tokens; DataError where the
        template refuses them, or they hold a noncharacter.
        """
        whole = Chat(tuple(messages), NOWHERE, tools=tools)
        guarded, typed = self.escaper.guarded(whole)
        if not isinstance(guarded, Chat) or not self.needs_spelling(typed):
            return self.encode_ids(finder.render_prompt(whole, len(messages)), is_spelled=False)
        text = finder.render_prompt(guarded, len(messages))
        if without_guards(text) != finder.render_prompt(unguarded(guarded), len(messages)):
            raise Unproven("types a special token at a place where the template looks at the text itself")
        return self.encode_ids(self.escaper.spelled(text, [])[0], is_spelled=True)

    def encode_ids(self, text: str, *, is_spelled: bool) -> list[int]:
        """Return the ids of a text, or raise Unproven where a typed special token in it comes out as control."""
        if not is_spelled:
            return list(self.vocabulary.encode([text])[0].ids)
        ids, _, lost = self.vocabulary.encode_spelled(text)
        if lost:
            raise Unproven(f"types {lost!r}, which this tokenizer cannot write as text")
        return ids

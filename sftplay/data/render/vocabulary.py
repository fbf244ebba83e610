"""Special tokens and the vocabulary: what a text may not spell, and which token ids mean what."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from tokenizers import Tokenizer

from sftplay.data.records import Call, Chat, Record, Text
from sftplay.data.render.templates import CLOSE, OPEN, Span
from sftplay.errors import DataError

GUARD = "\ufdd2"  # stands inside a typed special token, and before a written one: a noncharacter, like OPEN and CLOSE


class SpecialTokenEscaper:
    """Find and guard the texts of one tokenizer's special tokens."""

    def __init__(self, special: Iterable[str]) -> None:
        known = [token for token in special if len(token) > 1]
        self._search = re.compile(f"[{OPEN}{CLOSE}{GUARD}]|{alternation(known)}").search
        self._firsts = sorted({token[0] for token in known if token.isascii()})
        self._typed = re.compile(alternation(known))
        self._said = re.compile(alternation(token for token in known if token not in ("<think>", "</think>")))
        self._events = re.compile(f"{GUARD}|{alternation(known)}")

    def guarded(self, record: Record) -> tuple[Record, int]:
        """Return the record with a guard in each special token that it types, and how many there are.
        Raise DataError where the record holds one of the three noncharacters itself.
        """
        if self._is_plain(record):
            return record, 0
        if any(mark in text for text in _texts(record) for mark in (OPEN, CLOSE, GUARD)):
            raise DataError("holds U+FDD0, U+FDD1 or U+FDD2, which are not characters")
        count = 0

        def escape_text(text: str, pattern: re.Pattern[str] = self._typed) -> str:
            nonlocal count
            n_found = 1
            while n_found:  # what is left of two that overlap may be a third
                text, n_found = pattern.subn(lambda match: match[0][0] + GUARD + match[0][1:], text)
                count += n_found
            return text

        if isinstance(record, Text):
            return replace(record, text=escape_text(record.text)), count
        turns = []
        for message in record.messages:
            calls = tuple(
                Call(escape_text(call.name), _map_json(call.arguments, escape_text), call.id)
                if any(map(self._search, _call_texts(call)))
                else call
                for call in message.calls
            )
            content = escape_text(message.content, self._said if message.role == "assistant" else self._typed)
            turns.append(replace(message, content=content, calls=calls, name=escape_text(message.name)))
        changed = replace(record, messages=tuple(turns), tools=_map_json(record.tools, escape_text))
        return (changed, count) if count else (record, 0)

    def spelled(self, text: str, spans: Iterable[Span]) -> tuple[str, tuple[Span, ...]]:
        """Take the guards out of a guarded rendering and put one before each control token; move the spans along.

        It begins at the same places of the chat: only what is between the characters has changed.
        """
        parts: list[str] = []
        moves: list[tuple[int, int]] = []
        at = 0
        for match in self._events.finditer(text):
            is_guard = match.group() == GUARD
            parts += (text[at : match.start()], "" if is_guard else GUARD + match.group())
            moves.append((match.start(), -1 if is_guard else 1))
            at = match.end()

        def move(edge: int) -> int:
            return edge + sum(step for place, step in moves if place < edge)

        return "".join([*parts, text[at:]]), tuple((move(start), move(end)) for start, end in spans)

    def _is_plain(self, record: Record) -> bool:
        """Return True if there is nothing to guard or refuse; nearly every record takes this way."""
        if isinstance(record, Chat) and not record.tools:
            for message in record.messages:
                text = message.content
                # Searching for single characters is fast, and most texts have none that begins a token.
                may_hold = not text.isascii() or any(character in text for character in self._firsts)
                if message.calls or message.name or (may_hold and self._search(text)):
                    break
            else:
                return True
        return not any(map(self._search, _texts(record)))


def without_guards(text: str) -> str:
    return text.replace(GUARD, "")


def unguarded(chat: Chat) -> Chat:
    """Return the chat without guards; its JSON texts may have other white space than before."""
    turns = tuple(
        replace(
            message,
            content=without_guards(message.content),
            calls=tuple(Call(without_guards(c.name), without_guards(c.arguments), c.id) for c in message.calls),
            name=without_guards(message.name),
        )
        for message in chat.messages
    )
    return replace(chat, messages=turns, tools=without_guards(chat.tools))


def _texts(record: Record) -> Iterator[str]:
    if isinstance(record, Text):
        yield record.text
        return
    for message in record.messages:
        yield message.content
        if message.name:
            yield message.name
        for call in message.calls:
            yield from _call_texts(call)
    if record.tools:
        yield from _json_texts(record.tools)


def _call_texts(call: Call) -> Iterator[str]:
    yield call.name
    yield from _json_texts(call.arguments)


def _json_texts(text: str) -> Iterator[str]:
    """Yield the JSON text, and its strings where escapes hide what they contain."""
    yield text
    if "\\" in text:
        found: list[str] = []

        def note(string: str) -> str:
            found.append(string)
            return string

        _map_json(text, note)
        yield from found


def _map_json(text: str, change: Callable[[str], str]) -> str:
    """Return the JSON text with its strings changed: a template may rewrite what is between them, guards too."""

    def apply(value: Any) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict):
            return {change(key): apply(inner) for key, inner in value.items()}
        return [apply(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(apply(json.loads(text)), ensure_ascii=False) if text else text


def alternation(tokens: Iterable[str]) -> str:
    """Return a pattern for any of `tokens`, at one place the longest; without tokens it matches nowhere."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})"


PART_CHARACTERS = 1 << 18  # a part ends at the first seam after this many characters
AROUND = 1_000  # this many characters on each side of a seam are tokenised together and apart, and must give the same
SEAM = re.compile(r"(?<=\S\n)[A-Za-z0-9]")
"""The first letter of a line behind one line break. Splitters of byte-level vocabularies never join the two."""

LOCAL = ("Split", "ByteLevel", "Digits")
"""Splitters that look at the characters around a place only, not at where the text begins."""


def can_be_cut(tokenizer_json: str) -> bool:
    """Return whether a tokenizer works on each word alone and finds words by the text around them.

    Then two parts are tokenised like the whole if no word goes over the seam. A normaliser that puts something before a
    text, or that joins characters other than a letter with its accents, forbids it.
    """

    def is_local(splitter: dict[str, Any]) -> bool:
        if splitter["type"] == "Sequence":
            return all(map(is_local, splitter["pretokenizers"]))
        return splitter["type"] in LOCAL and not splitter.get("add_prefix_space", False)

    state = json.loads(tokenizer_json)
    normalizer, model, splitter = state["normalizer"], state["model"], state["pre_tokenizer"]
    if (normalizer or {"type": "NFC"})["type"] != "NFC" or model["type"] != "BPE" or model.get("dropout"):
        return False
    if any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in state["added_tokens"]):
        return False
    return splitter is not None and is_local(splitter)


def split_at_seams(text: str, encode: Callable[[str], list[int]], *, size: int = PART_CHARACTERS) -> list[str]:
    """Split the text into parts of about `size` characters; into larger ones where no seam is found."""
    parts, start, seam = [], 0, 0
    while len(text) - start > size:
        for found in SEAM.finditer(text, start + size):
            seam = found.start()
            before, behind = text[max(0, seam - AROUND) : seam], text[seam : seam + AROUND]
            if encode(before) + encode(behind) == encode(before + behind):
                break
        else:
            break
        parts.append(text[start:seam])
        start = seam
    return [*parts, text[start:]]


@dataclass(frozen=True)
class SpecialTokens:
    """Facts about a tokenizer that its JSON lacks."""

    named: Mapping[str, Any]  # special tokens that a template may name, such as `eos_token`
    eos: str | None
    prefix_ids: tuple[int, ...]  # ids that the tokenizer puts before a text: a BOS, or nothing


Encoded = tuple[list[int], Any, str]
"""The ids of a text; the `tokenizers.Encoding`, for places only: its ids may be the twin's, None if no places are
needed; and a typed special token that this tokenizer can only encode as control, or nothing."""


class Vocabulary:
    """One tokenizer, and when it is first needed its twin that reads typed special tokens as text."""

    def __init__(self, backend: Tokenizer, specials: SpecialTokens) -> None:
        self._backend, self.specials = backend, specials
        # Many tokenizer.json files ask for truncation and padding.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self._control: dict[int, str] = {
            id: token.content for id, token in added.items() if token.special or token.content == specials.eos
        }

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> Vocabulary:
        """Return the vocabulary of a transformers tokenizer that is fast."""
        backend, named = tokenizer.backend_tokenizer, {}
        for key, value in tokenizer.special_tokens_map.items():
            named[key] = [str(item) for item in value] if isinstance(value, list) else str(value)
        bare, whole = backend.encode("a", add_special_tokens=False).ids, backend.encode("a").ids
        begin = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
        return cls(backend, SpecialTokens(named, tokenizer.eos_token, tuple(whole[:begin])))

    @property
    def control_tokens(self) -> list[str]:
        """The texts that are read as control wherever they stand."""
        return list(self._control.values())

    @property
    def special_tokens(self) -> list[str]:
        """The texts that may end a turn: those of all control tokens, and the EOS that may be none."""
        return list(dict.fromkeys([*self.control_tokens, *([self.specials.eos] if self.specials.eos else [])]))

    @cached_property
    def folds_text(self) -> bool:
        """Return True if the normaliser turns a text that is no control token into one, such as `</S>` or `＜/s＞`.

        A search for control tokens would miss such a text, so every text has to be spelled.
        """
        if self._backend.normalizer is None:
            return False
        fold, added = self._backend.normalizer.normalize_str, self._backend.get_added_tokens_decoder()
        for id, token in self._control.items():
            if token == self.specials.named.get("unk_token"):
                continue
            # The full-width form, which NFKC takes back.
            wide = "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in token)
            # A control character, an accent and a space without width: what cleaning normalisers take out.
            hidden = [token[:1] + mark + token[1:] for mark in ("\x01", "\u0301", "\u200b")]
            others = {token.upper(), token.lower(), wide, *hidden} - {token}
            if not any(token in fold(other) for other in others):
                continue
            # It must also be found in normalised text, as an added token or by the model.
            if added[id].normalized or any(piece.id == id for piece in self._backend.model.tokenize(token)):
                return True
        return False

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text."""
        return self._backend.token_to_id(self.specials.eos) if self.specials.eos else None

    def to_json(self) -> str:
        """The tokenizer as the tokenizers library writes it."""
        return self._backend.to_str()

    def encode(self, texts: Sequence[str]) -> list[Any]:
        """The `tokenizers.Encoding` of each text, in one call that uses all cores.

        A template writes the special tokens already, so none is added and no BOS is doubled; nothing is cut or padded.
        """
        return cast("list[Any]", self._backend.encode_batch(list(texts), add_special_tokens=False))

    def encode_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, as those of `encode`; of a long text too, in little memory."""

        def read(texts: list[str]) -> list[list[int]]:
            # The fast way leaves out where the tokens lie in the text, and takes a fifth less time.
            return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

        short_texts = [text for text in texts if len(text) <= PART_CHARACTERS]
        found = dict(zip(short_texts, read(short_texts), strict=True))
        for text in texts:
            if text not in found:
                parts = split_at_seams(text, lambda part: read([part])[0]) if self._can_be_cut else [text]
                found[text] = [id for part in parts for id in read([part])[0]]
        return [found[text] for text in texts]

    def encode_spelled(self, text: str) -> Encoded:
        """A text spelled by `escape_special_tokens`.

        What it types is lost where the vocabulary has no pieces to write it with, as where unknown words are one token.
        """
        twin, original_ids = self._twin
        encoding = twin.encode(text, add_special_tokens=False)
        ids = [original_ids.get(token, token) for token in encoding.ids]
        for token, (start, end) in zip(ids, encoding.offsets, strict=True):
            if token in self._control and self._control[token] == text[start:end].strip():
                return ids, encoding, self._control[token]
        return ids, encoding, ""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens shown."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def _can_be_cut(self) -> bool:
        return can_be_cut(self.to_json())

    @cached_property
    def _twin(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer with a guard before the text of each special token, and its ids that are others here."""
        names = set(self.control_tokens)
        twin = Tokenizer.from_str(_guarded_json(self.to_json(), names))
        others = {}
        for id, token in self._backend.get_added_tokens_decoder().items():
            found = twin.token_to_id(GUARD + token.content if token.content in names else token.content)
            if found is not None and found != id:
                others[found] = id
        return twin, others


def _guarded_json(text: str, names: Set[str]) -> str:
    """The tokenizer's JSON with these tokens renamed, in the list of added tokens and in the vocabulary."""
    state = json.loads(text)
    for token in state["added_tokens"]:
        if token["content"] in names:
            token |= {"content": GUARD + token["content"], "normalized": False}
    model = state["model"]
    if "merges" in model:  # without those that would make a control token out of text
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.isdisjoint((*pair, "".join(pair)))]
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {GUARD + piece if piece in names else piece: id for piece, id in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[GUARD + piece if piece in names else piece, score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = GUARD + model["unk_token"]
    return json.dumps(state, ensure_ascii=False)

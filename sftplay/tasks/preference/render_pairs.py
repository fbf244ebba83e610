"""Pairs become tokens: both sides rendered whole, the prompt found as the tokens that they share."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sftplay.data.files import RowFields, parsed
from sftplay.data.problem import published_test_id
from sftplay.data.records import IGNORE_INDEX, Refused, Source, Text
from sftplay.data.render.masks import Rendered
from sftplay.data.row_outcomes import (
    Example,
    Keys,
    RawRow,
    RowOptions,
    RowOutcome,
    RowProcessor,
    compute_keys,
    is_held_out,
)
from sftplay.errors import DataError
from sftplay.tasks.preference.gate import PairFacts, read_facts
from sftplay.tasks.preference.pairs import MARGIN, SCORES, VERDICT, Pair, count_shared, to_pair

EQUAL = "equal_sides"  # why a pair with nothing to tell apart is dropped


@dataclass(frozen=True, slots=True)
class PairOptions(RowOptions):
    takes_answers: bool = False  # task mode kto: an answer is a row, and a pair becomes two
    is_plain: bool = False  # there is no chat template, and texts are continued
    needs_margin: bool = False
    keeps_end: bool = False  # what the template writes behind the last end token stays: plain transformers scores it

    def read(self, row: RowFields, source: Source) -> Pair:
        """Convert a row. Raise DataError where it is no pair, or breaks a rule."""
        return to_pair(row, source, reading=self.reading, takes_answers=self.takes_answers, is_plain=self.is_plain)


@dataclass(slots=True)
class PairExample(Example):
    """The tokens of a pair: the prompt, the chosen side, the rejected one; or of one answer."""

    prompt_tokens: int = 0
    chosen_tokens: int = 0
    desirable: bool = True
    margin: float = math.nan
    content: str = ""  # its texts, as JSON

    @property
    def longest_side(self) -> int:
        n_joined, n_chosen = len(self.ids) // 4, self.prompt_tokens + self.chosen_tokens
        return max(n_chosen, n_joined - self.chosen_tokens)


@dataclass(slots=True)
class PairOutcome(RowOutcome):
    swapped: int = 0  # the normal key of the pair with its sides exchanged, or of the answer with the other verdict
    answers: tuple[int, ...] = ()  # for each side a key of the prompt with it
    facts: PairFacts | None = None
    is_joined: bool = False  # the prompt's last tokens are others than those that generation would begin with


@dataclass(slots=True)
class _Sides:
    """A pair on its way to tokens."""

    outcome: PairOutcome
    pair: Pair
    rendered: list[Rendered] = field(default_factory=list)

    @property
    def longest(self) -> int:
        return max(side.n_tokens or len(side.input_ids) for side in self.rendered)


class PairProcessor(RowProcessor):
    """Turn batches of raw rows into outcomes of pairs, in order."""

    _options: PairOptions

    def process(self, rows: Sequence[RawRow], share: float) -> list[RowOutcome]:
        outcomes: list[RowOutcome] = []
        waiting: list[_Sides] = []
        for number, source, raw in rows:
            outcome = PairOutcome(number, source, held_out=share == 1.0, is_chat=not self._options.is_plain)
            outcomes.append(outcome)
            row = parsed(raw)
            try:
                if isinstance(row, Refused):
                    raise DataError(row.reason)
                outcome.tested = published_test_id(row)
                waiting.append(_Sides(outcome, self._read_row(row, outcome, share=share)))
            except DataError as error:
                outcome.refused, outcome.fix = error.what, error.fix
        for sides, rendered in zip(waiting, self._render([sides.pair for sides in waiting]), strict=True):
            sides.rendered = rendered
            self._finish(sides)
        return outcomes

    def _read_row(self, row: dict[str, object], outcome: PairOutcome, *, share: float) -> Pair:
        options = self._options
        pair = options.read(row, outcome.source)
        if options.needs_margin and math.isnan(pair.margin):
            fix = "give each row `margin`, or `score_chosen` and `score_rejected`; or write reward_model.margin: false"
            raise DataError("has neither a margin nor two scores", fix=fix)
        if options.is_plain and not pair.texts:
            fix = "set data.template: chatml or a Jinja file, or give prompt, chosen and rejected as texts alone"
            raise DataError("has turns, and there is no chat template", fix=fix)
        note_keys(pair, outcome)
        outcome.held_out = is_held_out(outcome.keys, share)
        first = pair.prompt[0]
        outcome.system = first.content if first.role == "system" else ""
        outcome.unused = _unused_columns(row, options)
        return pair

    def _render(self, pairs: Sequence[Pair]) -> list[list[Rendered]]:
        """Return the whole texts of the sides of each pair as tokens, the prompt of each not learned."""
        if self._options.is_plain:
            return self._render_texts(pairs)
        records = [chat for pair in pairs for chat in pair.chats]
        groups: list[list[Rendered]] = [[] for _ in records]
        for example in self._renderer.render(records, self._options.max_tokens):
            groups[example.record_index].append(example)
        found = iter([_only_example(group, keeps_end=self._options.keeps_end) for group in groups])
        return [[next(found) for _ in pair.sides] for pair in pairs]

    def _render_texts(self, pairs: Sequence[Pair]) -> list[list[Rendered]]:
        """As `_render` for texts that are continued: what follows the tokens of the prompt alone is learned."""
        records = [
            Text(text, pair.source)
            for pair in pairs
            for text in (pair.texts[0], *(pair.texts[0] + side for side in pair.texts[1:]))
        ]
        found = iter(self._renderer.render(records, self._options.max_tokens))
        groups = []
        for pair in pairs:
            prompt, sides = next(found), [next(found) for _ in pair.sides]
            beginning = prompt.input_ids[:-1]
            shared = [count_shared(beginning, side.input_ids[:-1]) for side in sides]
            groups.append(
                [
                    side if side.problem else replace(side, labels=[IGNORE_INDEX] * n + side.input_ids[n:])
                    for side, n in zip(sides, shared, strict=True)
                ]
            )
        return groups

    def _finish(self, sides: _Sides) -> None:
        """Write the examples of a pair into its outcome, or why it has none."""
        outcome, limit = sides.outcome, self._options.max_tokens
        outcome.refused = next((side.problem for side in sides.rendered if side.problem), "")
        if outcome.refused or limit is None:
            return
        outcome.n_escaped = max(side.n_escaped for side in sides.rendered)
        outcome.lengths = [sides.longest]
        is_cut = sides.longest > limit
        if is_cut and not (self._options.too_long == "truncate" and self._shorten(sides, limit=limit)):
            outcome.dropped = "too_long"
            return
        pair, rendered = sides.pair, sides.rendered
        firsts = [_first_label(side) for side in rendered]
        if min(firsts) < 1:
            outcome.refused = "has no token of a prompt before its answer"
            return
        if any(first == len(side.labels) for first, side in zip(firsts, rendered, strict=True)):
            outcome.dropped = "no_trainable_token"
            return
        outcome.facts = read_facts(pair, [len(side.input_ids) - min(firsts) for side in rendered])
        if len(rendered) == 2 and rendered[0].input_ids == rendered[1].input_ids:
            outcome.dropped = EQUAL
            return
        asked = self._prompt_ids(pair)
        outcome.is_joined = any(side.input_ids[:first] != asked for side, first in zip(rendered, firsts, strict=True))
        self._add_examples(sides, firsts=firsts, is_cut=is_cut)

    def _add_examples(self, sides: _Sides, *, firsts: Sequence[int], is_cut: bool) -> None:
        outcome, pair, rendered = sides.outcome, sides.pair, sides.rendered
        if not self._options.takes_answers:
            both = [side.input_ids for side in rendered]
            n_prompt = min(*firsts, count_shared(*both))
            joined = replace(
                rendered[0],
                input_ids=both[0] + both[1][n_prompt:],
                labels=rendered[0].labels + rendered[1].labels[n_prompt:],
            )
            example = self._make(joined, pair, n_prompt=n_prompt, n_chosen=len(both[0]) - n_prompt, is_cut=is_cut)
            example.ends_learned = all(_last_label(side) in self._ends for side in rendered)
            outcome.examples = [example]
        else:
            verdicts = (True, False) if pair.desirable is None else (pair.desirable,)
            for n, (side, first, verdict) in enumerate(zip(rendered, firsts, verdicts, strict=True)):
                texts = (pair.texts[0], pair.texts[n + 1]) if pair.texts else ()
                answer = replace(pair, sides=(pair.sides[n],), desirable=verdict, texts=texts)
                example = self._make(side, answer, n_prompt=first, n_chosen=len(side.input_ids) - first, is_cut=is_cut)
                example.ends_learned = _last_label(side) in self._ends
                outcome.examples.append(example)
            # A pair has given two rows, each with a length of its own.
            outcome.lengths = outcome.lengths if len(rendered) == 1 else [len(side.input_ids) for side in rendered]
        outcome.learnable = sum(example.n_labels for example in outcome.examples)

    def _make(self, side: Rendered, pair: Pair, *, n_prompt: int, n_chosen: int, is_cut: bool) -> PairExample:
        n_labels = len(side.labels) - side.labels.count(IGNORE_INDEX)
        return PairExample(
            array("i", side.input_ids).tobytes(),
            array("i", side.labels).tobytes(),
            n_labels,
            is_cut,
            ends_learned=False,
            prompt_tokens=n_prompt,
            chosen_tokens=n_chosen,
            desirable=pair.desirable is not False,
            margin=pair.margin,
            content=_content(pair, is_plain=self._options.is_plain),
        )

    def _shorten(self, sides: _Sides, *, limit: int) -> bool:
        """Cut whole turns from the left of the prompt, after its system prompt, until both sides fit; False: never."""
        prompt = sides.pair.prompt
        n_lead = int(prompt[0].role == "system")
        starts = [n for n, turn in enumerate(prompt) if turn.role == "user" and n > n_lead]
        known: dict[int, _Sides] = {}

        def fits(place: int) -> bool:
            shorter = replace(sides.pair, prompt=(*prompt[:n_lead], *prompt[starts[place] :]), texts=())
            known[place] = _Sides(sides.outcome, shorter, self._render([shorter])[0])
            return not any(side.problem for side in known[place].rendered) and known[place].longest <= limit

        found = 0 if self._options.is_plain else bisect_left(range(len(starts)), True, key=fits)
        if self._options.is_plain or found == len(starts):
            return False
        sides.pair, sides.rendered = known[found].pair, known[found].rendered
        return True

    def _prompt_ids(self, pair: Pair) -> list[int]:
        """Return the tokens that generation would begin with; none where it could not."""
        try:
            if self._options.is_plain:
                return self._renderer.beginning_ids(pair.texts[0])
            return self._renderer.prompt_ids(pair.prompt, pair.tools)
        except DataError:
            return []


def note_keys(pair: Pair, outcome: PairOutcome) -> None:
    """Note in the outcome the keys of a pair: of its content, of both orders of its sides, of its prompt, its sides."""
    found = [compute_keys(chat) for chat in pair.chats]
    prompt = compute_keys(pair.question).prompt
    verdict = "" if pair.desirable is None else str(pair.desirable)
    exact, normal = [keys.content for keys in found], [keys.normal for keys in found]
    outcome.keys = Keys(_hash64(verdict, exact), _hash64(verdict, normal), prompt)
    other = "" if pair.desirable is None else str(not pair.desirable)
    outcome.swapped = _hash64(other, normal[::-1])
    outcome.answers = tuple(normal)


def _hash64(word: str, keys: Sequence[int]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([word, *keys]).encode()).digest()[:8], "big")


def _only_example(group: Sequence[Rendered], *, keeps_end: bool) -> Rendered:
    """Return the one example of a side. Where the template rewrites earlier turns it has several, and no pair."""
    if len(group) == 1 or group[0].problem:
        return group[0] if keeps_end else _up_to_last_label(group[0])
    what = "has an answer of several turns, and the template writes an earlier turn otherwise once others follow"
    return Rendered([], [], group[0].record_index, what)


def _first_label(side: Rendered) -> int:
    return next((n for n, label in enumerate(side.labels) if label != IGNORE_INDEX), len(side.labels))


def _last_label(side: Rendered) -> int:
    return next(label for label in reversed(side.labels) if label != IGNORE_INDEX)


def _up_to_last_label(side: Rendered) -> Rendered:
    """Return the side without what the template writes behind the last end token: nothing is learned from it."""
    end = next((n for n in range(len(side.labels), 0, -1) if side.labels[n - 1] != IGNORE_INDEX), len(side.labels))
    return replace(side, input_ids=side.input_ids[:end], labels=side.labels[:end])


def _content(pair: Pair, *, is_plain: bool) -> str:
    words = pair.texts[1:] if is_plain else pair.answers
    chosen, rejected = words if len(words) == 2 else (words[0], "") if pair.desirable else ("", words[0])
    beginning = pair.texts[0] if is_plain else ""
    content = {"question": pair.question.as_json(), "beginning": beginning, "chosen": chosen, "rejected": rejected}
    return json.dumps(content)


_READ = {
    *("prompt", "question", "query", "instruction", "input", "history", "user", "system", "tools", "functions"),
    *("chosen", "rejected", "rejected_response", "rejected_messages", "conversations", "conversation", "dialogue"),
    *("completion", "response", "output", "answer", "assistant", *VERDICT, *MARGIN, *SCORES[0], *SCORES[1]),
}


def _unused_columns(row: dict[str, object], options: PairOptions) -> tuple[str, ...]:
    """Return the row's columns that no layout of pairs reads, by the file's names; empty ones are not counted."""
    mapped = {column for _, column in options.reading.columns}
    has_sides = row.get("chosen") is not None
    read = _READ | mapped | (set() if has_sides else {"messages"})
    unused = [name for name, value in row.items() if name not in read and value is not None and value != ""]
    return tuple(name.encode("utf-8", "backslashreplace").decode() for name in unused)

"""Outcomes of rows: a batch parsed, converted, rendered and cut; the data report; the policies across rows."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sftplay.config.data import DataConfig
from sftplay.data.files import FIX_ROW, RowFields, UnparsedRow, parsed
from sftplay.data.layouts import DEFAULT_OPTIONS, SHAPES, LayoutOptions, find_layout, picked, rename_columns, to_record
from sftplay.data.problem import published_test_id
from sftplay.data.records import IGNORE_INDEX, Chat, Record, Refused, Source, Text
from sftplay.data.render.masks import Rendered
from sftplay.data.render.render import Renderer
from sftplay.errors import DataError

CUT_AWAY = "no_trainable_token_after_cut"  # why a row is dropped if only its prompt is left after the cut


INGESTED = {"source", "title", "section", "pages", "row", "place", "n_chars", "sha256", "file_sha256"}
"""Columns that `ingest` writes next to each text. All of them together identify its rows."""


def unused_columns(row: RowFields, reading: LayoutOptions = DEFAULT_OPTIONS) -> tuple[str, ...]:
    """Return the row's columns that its layout does not read, by the file's names; empty ones are not counted.

    Nor are those that `ingest` writes next to a text to record where it is from.
    """
    try:
        view = rename_columns(row, reading)
        shape = SHAPES[find_layout(view, reading)]
    except DataError:
        return ()
    names = dict(reading.columns)
    read = {names.get(name, name) for group in (*shape.needs, *shape.may) if (name := picked(view, group))}
    if shape.body is None and row.keys() >= INGESTED:
        read |= INGESTED
    unused = [name for name, value in row.items() if name not in read and value is not None and value != ""]
    return tuple(name.encode("utf-8", "backslashreplace").decode() for name in unused)


RawRow = tuple[int, Source, UnparsedRow]
"""Number, place and bytes of a row. Numbers count the rows of a source in reading order, from 0, refused ones too."""


class Keys(NamedTuple):
    """Three 64-bit numbers, equal exactly for records with equal content: of ten million, two collide in 3 of 10^6."""

    content: int  # the whole content to the character, wherever it came from; the ids of calls do not count
    normal: int  # the content without differences of white space, case and Unicode normalisation
    prompt: int  # everything before the last answer, in its normal form; of a plain text all of it


def compute_keys(record: Record) -> Keys:
    """Compute the numbers that identify the content of a record."""
    n_prompt = None
    if isinstance(record, Text):
        texts = [record.text]
    else:
        texts, last = [record.tools], record.turns()[-1]
        for index, message in enumerate(record.messages):
            n_prompt = len(texts) if index == last else n_prompt
            texts += (message.role, message.content)
            for call in message.calls:
                texts += (call.name, call.arguments)
    folded = [text if text.isascii() else unicodedata.normalize("NFKC", text) for text in texts]
    normal = [" ".join(text.casefold().split()) for text in folded]
    whole = _hash64(normal)
    return Keys(_hash64(texts), whole, whole if n_prompt is None else _hash64(normal[:n_prompt]))


def _hash64(texts: Iterable[str]) -> int:
    # The length before each text keeps two different contents from running together into one string.
    whole = "".join([f"{len(text)}:{text}" for text in texts])
    return int.from_bytes(hashlib.sha256(whole.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def is_held_out(keys: Keys, share: float) -> bool:
    """Return True for about `share` of all prompts; a prompt is always on the same side, in any file and order."""
    return keys.prompt < share * 2**64


@dataclass(slots=True)
class Example:
    """One training example that fits."""

    ids: bytes
    labels: bytes  # Both as int32. Documents that are kept whole have no labels here: all is learned.
    n_labels: int  # tokens that are learned
    is_cut: bool
    ends_learned: bool  # the last learned token ends a turn
    n_bytes: int = 0  # bytes of the text it spells, as UTF-8; 0 for a chat


@dataclass(slots=True)
class RowOutcome:
    """The outcome of one raw row."""

    row: int
    source: Source
    refused: str = ""  # why it cannot be read or rendered
    fix: str = ""  # the remedy, where it is known
    held_out: bool = False
    is_chat: bool = True
    keys: Keys = Keys(0, 0, 0)  # noqa: RUF009 - it cannot be changed
    examples: list[Example] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Tokens of each example before cutting; also of examples that are not kept."""

    learnable: int = 0  # tokens of all its examples that would be learned if nothing was cut
    dropped: str = ""  # why an example of it was left out
    chat: str = ""  # the chat as json, where it is held out
    n_bytes: int = 0  # bytes of a plain text, as UTF-8
    n_escaped: int = 0
    system: str = ""  # the text of its system turn; empty where there is none
    unused: tuple[str, ...] = ()  # columns that its layout does not read
    tested: str = ""  # its id, where it is one of the published problems by which models are tested


@dataclass(frozen=True, slots=True)
class RowOptions:
    """The settings for single rows."""

    reading: LayoutOptions
    max_tokens: int | None  # longest example; None where nothing is too long
    too_long: Literal["truncate", "drop", "error"]
    only_held_out: bool = False  # rows to train on are read, to find their side, but not rendered
    only_chats: bool = False  # plain texts are refused


class RowProcessor:
    """Turn batches of raw rows into outcomes, in order."""

    def __init__(self, renderer: Renderer, options: RowOptions) -> None:
        self._renderer, self._options = renderer, options
        self._ends = set(renderer.end_token_ids)

    def process(self, rows: Sequence[RawRow], share: float) -> list[RowOutcome]:
        """Return one outcome for each row; `share` of all prompts is held out (0 none, 1 all)."""
        outcomes, waiting, records = [], [], []
        for row, source, raw in rows:
            outcome = RowOutcome(row, source, held_out=share == 1.0)
            outcomes.append(outcome)
            record = self._read(raw, outcome, share=share)
            if record is not None and (outcome.held_out or not self._options.only_held_out):
                waiting.append(outcome)
                records.append(record)
        groups: list[list[Rendered]] = [[] for _ in records]
        for example in self._renderer.render(records, self._options.max_tokens):
            groups[example.record_index].append(example)
        for outcome, group in zip(waiting, groups, strict=True):
            outcome.refused = next((example.problem for example in group if example.problem), "")
            for example in [] if outcome.refused else group:
                outcome.n_escaped += example.n_escaped
                outcome.lengths.append(example.n_tokens or len(example.input_ids))
                outcome.learnable += _count_learned(example.labels)
                fitted = self._cut(example)
                if isinstance(fitted, Example):
                    fitted.n_bytes = outcome.n_bytes
                    outcome.examples.append(fitted)
                else:
                    outcome.dropped = fitted
        return outcomes

    def _read(self, raw: UnparsedRow, outcome: RowOutcome, *, share: float) -> Record | None:
        """Return the record of a raw row, and note in its outcome what it is, or why there is none."""
        row, options = parsed(raw), self._options
        if isinstance(row, Refused):
            outcome.refused = row.reason
            return None
        try:
            record = to_record(row, outcome.source, reading=options.reading)
        except DataError as error:
            outcome.refused, outcome.fix = error.what, error.fix
            return None
        if options.only_chats and isinstance(record, Text):
            outcome.refused = "is a plain text, and its source has type: chat"
            outcome.fix = "give the source type: cpt, or remove the row"
            return None
        outcome.unused, outcome.tested = unused_columns(row, options.reading), published_test_id(row)
        outcome.keys = compute_keys(record)
        outcome.held_out = is_held_out(outcome.keys, share)
        outcome.is_chat = isinstance(record, Chat)
        if isinstance(record, Chat):
            first = record.messages[0]
            outcome.system = first.content if first.role == "system" else ""
            outcome.chat = json.dumps(record.as_json()) if outcome.held_out else ""
        else:
            outcome.n_bytes = len(record.text.encode("utf-8", "surrogatepass"))
        return record

    def _cut(self, example: Rendered) -> Example | str:
        """Return the example as far as it fits, or why it is left out."""
        limit = self._options.max_tokens
        is_long = limit is not None and len(example.input_ids) > limit
        if is_long and self._options.too_long != "truncate":
            return "too_long"
        ids, labels = example.input_ids[:limit], example.labels[:limit]
        n_labels = _count_learned(labels)
        if not n_labels:
            return CUT_AWAY if is_long else "no_trainable_token"
        last = next(label for label in reversed(labels) if label != IGNORE_INDEX)
        kept = b"" if limit is None else array("i", labels).tobytes()
        return Example(array("i", ids).tobytes(), kept, n_labels, is_long, last in self._ends)


def _count_learned(labels: Sequence[int]) -> int:
    return len(labels) - labels.count(IGNORE_INDEX)


STEP = 8  # lengths are counted in steps of this many tokens
BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Upper edges of the length histogram, in tokens."""


@dataclass
class RowCounts:
    """Counts of one source, or of several added up."""

    kept: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_tokens: Counter[str] = field(default_factory=Counter)
    """Why a record was left out -> the tokens of such records."""

    cut_tokens: int = 0  # tokens behind the cut of records that were kept in part
    refused: int = 0
    duplicates: int = 0
    """Records with content that was read before on the same side. `data.duplicates` decides whether they are kept."""

    near_duplicates: int = 0
    """As `duplicates`, for content that differs only in white space, case or Unicode normalisation."""

    prompts_with_several_answers: int = 0
    with_special_tokens: int = 0  # records with the text of a special token in them; it is read as text, not as control
    with_system: int = 0  # chats that begin with `data.system`
    unused_columns: Counter[str] = field(default_factory=Counter)  # column that no layout reads -> records that have it
    split: int = 0  # records that became several examples, because the template rewrites earlier turns
    examples: int = 0
    chat_examples: int = 0  # those of them that are not plain text
    tokens: int = 0
    trainable_tokens: int = 0
    ends_learned: int = 0  # examples with a last learned token that ends a turn
    longest: int = 0  # tokens of the longest example before cutting
    lengths: Counter[int] = field(default_factory=Counter)
    """Tokens of an example before cutting, rounded up to a multiple of STEP -> examples."""

    learnable_tokens: int = 0  # tokens that would be learned if no example was cut

    def add_length(self, n_tokens: int) -> None:
        """Count an example of `n_tokens`, before it is cut."""
        self.longest = max(self.longest, n_tokens)
        self.lengths[-(-n_tokens // STEP) * STEP] += 1

    def length_that_keeps(self, share: float) -> int:
        """Return the smallest multiple of STEP that `share` of all examples are not longer than."""
        seen, wanted = 0, share * self.lengths.total()
        for length in sorted(self.lengths):
            seen += self.lengths[length]
            if seen >= wanted:
                return length
        return 0

    def add_record(self, outcome: RowOutcome) -> None:
        """Count a record that is kept, whole or in part."""
        examples = outcome.examples
        self.cut_tokens += sum(outcome.lengths) - sum(len(example.ids) // 4 for example in examples)
        self.learnable_tokens += outcome.learnable
        is_cut = bool(outcome.dropped) or any(example.is_cut for example in examples)
        self.cut += is_cut
        self.kept += not is_cut
        self.split += len(outcome.lengths) > 1
        self.examples += len(examples)
        self.chat_examples += len(examples) * outcome.is_chat
        for example in examples:
            self.tokens += len(example.ids) // 4
            self.trainable_tokens += example.n_labels
            self.ends_learned += example.ends_learned

    def as_state(self) -> dict[str, Any]:
        """Return all counts as plain JSON, for `from_state`."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowCounts:
        """Invert `as_state`."""
        # The older name is of a store that an earlier version has begun.
        renamed = {"typed_specials": "with_special_tokens"}
        state = {renamed.get(name, name): value for name, value in state.items()}
        counters = {name: Counter(value) for name, value in state.items() if isinstance(value, dict)}
        lengths = Counter({int(length): count for length, count in state["lengths"].items()})  # JSON's keys are texts
        return cls(**{**state, **counters, "lengths": lengths})

    @property
    def lost_share(self) -> float:
        """Share of the tokens to learn that lies behind the cut."""
        return 1 - self.trainable_tokens / self.learnable_tokens if self.learnable_tokens else 0.0

    @property
    def read(self) -> int:
        """Records read: kept, cut, dropped and refused ones, which are disjoint."""
        return self.kept + self.cut + self.dropped.total() + self.refused

    def as_json(self) -> dict[str, Any]:
        """Return the counts under the names of `data_report.json`."""
        bins: Counter[int] = Counter()
        for length, n in self.lengths.items():
            bins[next((edge for edge in BINS if length <= edge), 0)] += n
        histogram = {f"<={edge}" if edge else f">{BINS[-1]}": bins[edge] for edge in (*BINS, 0) if bins[edge]}
        return {
            "read": self.read,
            "kept": self.kept,
            "cut": self.cut,
            "dropped": dict(sorted(self.dropped.items())),
            "dropped_tokens": dict(sorted(self.dropped_tokens.items())),
            **{name: getattr(self, name) for name in ("cut_tokens", "refused", "duplicates", "near_duplicates")},
            "prompts_with_several_answers": self.prompts_with_several_answers,
            "split_records": self.split,
            "typed_specials": self.with_special_tokens,
            "with_system": self.with_system,
            "unused_columns": dict(sorted(self.unused_columns.items())),
            **{name: getattr(self, name) for name in ("examples", "tokens", "trainable_tokens")},
            "trainable_token_share": self.trainable_tokens / max(self.tokens, 1),
            "eos_in_loss_share": self.ends_learned / max(self.examples, 1),
            "lost_to_cut_share": self.lost_share,
            "longest_tokens": self.longest,
            "tokens_that_keep_99_percent": self.length_that_keeps(0.99),
            "length_histogram": histogram,
        }


def where_rows_went(source: Mapping[str, Any], *, refused_rows: str = "") -> str:
    """Describe where the rows of an empty source went: "5 read, 3 too long, 2 refused, see FILE"."""
    words = [f"{source.get('read', 0):,} read"]
    words += [f"{count:,} {reason.replace('_', ' ')}" for reason, count in source.get("dropped", {}).items()]
    words += [f"{source['refused']:,} refused, see {refused_rows}"] if refused_rows and source["refused"] else []
    return ", ".join(words)


def total(sources: Iterable[RowCounts]) -> RowCounts:
    whole = RowCounts()
    for source in sources:
        for name, value in vars(source).items():
            so_far = getattr(whole, name)
            setattr(whole, name, max(so_far, value) if name == "longest" else so_far + value)
    return whole


def account_line(report: Mapping[str, Any], fates: Sequence[str] = ("kept", "cut")) -> str:
    """Format the head of a data report: how many rows there were, and how many had each fate."""
    kept = " + ".join(f"{report[fate]:,} {fate}" for fate in fates)
    left_out = f"{sum(report['dropped'].values()):,} dropped + {report['refused']:,} refused"
    return f"data report      {report['read']:,} read = {kept} + {left_out}"


def source_lines(report: Mapping[str, Any], noun: str = "examples") -> list[str]:
    """Format a line for each source; `noun` is what its rows became."""
    return [
        f"  {name:<14} {source['examples']:,} {noun}, {source['tokens']:,} tokens,"
        f" {source['trainable_token_share']:.1%} learned   {source['path']}"
        for name, source in report["sources"].items()
    ]


def left_out_lines(report: Mapping[str, Any]) -> list[str]:
    """Format why rows were dropped, and where the refused ones are listed."""
    dropped = report["dropped"].items()
    lines = [f"  dropped        {count:,}: {reason.replace('_', ' ')}" for reason, count in dropped]
    refused = f"  refused        reasons with file and line in {report['refused_rows']}"
    return [*lines, refused] if report["refused"] else lines


def report_table(report: Mapping[str, Any]) -> str:
    """Format the report for people: at most 25 lines."""
    lines = [account_line(report), *source_lines(report), *left_out_lines(report)]
    action = "left out" if "duplicate" in report["dropped"] else "kept"
    near = report["near_duplicates"]
    repeated = report["duplicates"] + near
    several, split = report["prompts_with_several_answers"], report["split_records"]
    typed, opened = report["typed_specials"], report["with_system"]
    columns = ", ".join(f"{name[:40]!r} ({count:,})" for name, count in report["unused_columns"].items())
    remarks = {
        f"duplicates     {repeated:,} records repeat an earlier one, {near:,} of them up to white space or case;"
        f" {action}": repeated,
        f"answers        {several:,} prompts have several": several,
        f"split          {split:,} records into one example a turn": split,
        f"special        {typed:,} records spell a special token; it is read as text": typed,
        f"system         data.system opens {opened:,} records": opened,
        f"unused         columns {columns[:90]}": columns,
    }
    lines += [f"  {remark}" for remark, is_worth_saying in remarks.items() if is_worth_saying]
    lines += [
        f"  tokens         {report['tokens']:,}, {report['trainable_token_share']:.1%} learned;"
        f" the end of turn is learned in {report['eos_in_loss_share']:.1%}",
        f"  mask           by {report['mask_method']}, template {report['template_hash'][:12]}",
        f"  length         longest {report['longest_tokens']:,} tokens, limit {report['max_seq_len']:,}",
    ]
    lines += [f"  warning        {warning}" for warning in report["warnings"]]
    room, histogram = 25 - len(lines) - len(report["notes"]), report["length_histogram"]
    most = max(histogram.values(), default=1)
    for name, count in list(histogram.items())[: max(room, 0)]:
        lines.append(f"  {name:>14} {'#' * max(1, round(30 * count / most)):<30} {count:,}")
    lines += [f"  note           {note}" for note in report["notes"]]
    return "\n".join(lines[:25])


Side = Literal["train", "held_out"]
SIDES: tuple[Side, Side] = ("train", "held_out")
NAMED_ROWS = 5
ROOM = "raise model.max_seq_len (cpt.block_size, where that is set)"
FIX_LONG = f"{ROOM}; or cut such rows with data.too_long: truncate, or leave them out with drop"
FIX_CUT = f"{ROOM}, or leave such rows out with data.too_long: drop"
FIX_LEAK = "take the row out of one of the two files, or leave it out of training with data.contamination: drop"
FIX_TESTED = "leave them out of training with data.contamination: drop; what models are tested by must not be learned"


class RowPolicies:
    """Decide for each outcome what is kept, and count it once."""

    def __init__(
        self, data: DataConfig, max_tokens: int | None, *, limit: str = "max_seq_len", fix_long: str = FIX_LONG
    ) -> None:
        """`limit` names `max_tokens` where a row is too long; `fix_long` is what to do about that."""
        self._data, self._max_tokens, self._limit, self._fix_long = data, max_tokens, limit, fix_long
        self.counts: dict[Side, RowCounts] = {side: RowCounts() for side in SIDES}
        self.n_bad = 0
        self._bad: list[str] = []
        self._remedies: dict[str, None] = {}  # in the order in which their causes came up
        self._exact: dict[Side, set[int]] = {side: set() for side in SIDES}
        self._normal: dict[Side, set[int]] = {side: set() for side in SIDES}
        self.answers: dict[int, int] = {}  # prompt -> the first content with it; of training rows
        self._several: set[int] = set()
        self._guarded: dict[int, str] = {}  # content of held-out and test rows -> where it stands

    def resume(self, counts: Mapping[Side, RowCounts], *, seen: Mapping[Side, NDArray[np.uint64]], chats: Any) -> None:
        """Know what an earlier pass knew: its counts, and of each record that it judged the keys, uint64 [records, 3].

        `chats` are the keys of the training chats among them. Held-out rows must be guarded again.
        """
        self.counts = dict(counts)
        for side, keys in seen.items():
            self._exact[side] = set(keys[:, 0].tolist())
            self._normal[side] = set(keys[:, 1].tolist())
        prompts, normals = chats[:, 2].tolist(), chats[:, 1].tolist()
        self.answers = dict(zip(reversed(prompts), reversed(normals), strict=True))
        pairs = zip(prompts, normals, strict=True)
        self._several = {prompt for prompt, normal in pairs if self.answers[prompt] != normal}

    def guard(self, normal_key: int, source: Source) -> None:
        self._guarded.setdefault(normal_key, str(source))

    def keep(self, outcome: RowOutcome, side: Side) -> Sequence[Example]:
        """Return the kept examples of a record; none when the record was refused or dropped, which is counted."""
        counts = self.counts[side]
        if outcome.refused:
            counts.refused += 1
            self._note_bad(f"{outcome.source} {outcome.refused}", self._data.on_bad_row, fix=outcome.fix or FIX_ROW)
            return []
        is_seen = self._count_content(outcome, side, counts=counts)
        reason = self._reason_to_leave(outcome, side, is_seen=is_seen)
        if reason:
            counts.dropped[reason] += 1
            counts.dropped_tokens[reason] += sum(outcome.lengths)
            counts.learnable_tokens += outcome.learnable * (reason == CUT_AWAY)
            return []
        counts.add_record(outcome)
        return outcome.examples

    def check(self) -> None:
        """Raise the DataError that names the first five bad rows, if there were any."""
        if not self.n_bad:
            return
        n_more = self.n_bad - len(self._bad)
        shown = "\n  ".join(self._bad) + (f"\n  and {n_more:,} more" if n_more else "")
        what = f"{self.n_bad:,} {'row' if self.n_bad == 1 else 'rows'} cannot be trained on\n  {shown}"
        raise DataError(what, where="data", fix="; ".join(self._remedies))

    def _count_content(self, outcome: RowOutcome, side: Side, *, counts: RowCounts) -> bool:
        """Count the content. True when an earlier record of this side has the same content, at least in normal form."""
        exact, normal, prompt = outcome.keys
        is_exact = exact in self._exact[side]
        is_seen = is_exact or normal in self._normal[side]
        self._exact[side].add(exact)
        self._normal[side].add(normal)
        counts.duplicates += is_exact
        counts.near_duplicates += is_seen and not is_exact
        if side == "held_out":
            self.guard(normal, outcome.source)
        elif outcome.is_chat and self.answers.setdefault(prompt, normal) != normal:
            self._several.add(prompt)
            counts.prompts_with_several_answers = len(self._several)
        for length in outcome.lengths:
            counts.add_length(length)
        for column in outcome.unused:
            # Every row may have other keys.
            is_named = column in counts.unused_columns or len(counts.unused_columns) < 100
            counts.unused_columns[column if is_named else "(others)"] += 1
        counts.with_special_tokens += outcome.n_escaped > 0
        if self._data.system is not None and outcome.is_chat:
            counts.with_system += outcome.system == self._data.system
        return is_seen

    def _reason_to_leave(self, outcome: RowOutcome, side: Side, *, is_seen: bool) -> str:
        """Return why the record is dropped, or nothing. Where the config says error, also note the record as bad."""
        twin = self._guarded.get(outcome.keys[1], "")
        if side == "train" and (outcome.tested or twin):
            what, fix = f"{outcome.source} is held out as well, at {twin}", FIX_LEAK
            if outcome.tested:
                what, fix = f"{outcome.source} is problem {outcome.tested} of a published test split", FIX_TESTED
            self._note_bad(what, self._data.contamination, fix=fix)
            return "leak"
        if is_seen and self._data.duplicates == "drop":
            return "duplicate"
        if outcome.dropped == "too_long":
            what = f"has {max(outcome.lengths):,} tokens; {self._limit} is {self._max_tokens:,}"
            self._note_bad(f"{outcome.source} {what}", self._data.too_long, fix=self._fix_long)
        elif not outcome.examples:
            is_cut = outcome.dropped == CUT_AWAY
            after = f" in its first {self._max_tokens:,} of {max(outcome.lengths):,} tokens" if is_cut else ""
            what = f"{outcome.source} has nothing to learn{after}"
            self._note_bad(what, self._data.on_bad_row, fix=FIX_CUT if is_cut else FIX_ROW)
        return "" if outcome.examples else outcome.dropped

    def _note_bad(self, line: str, setting: str, *, fix: str) -> None:
        """Name and count a bad row, if the setting about such rows is error."""
        if setting == "error":
            self.n_bad += 1
            if len(self._remedies) < NAMED_ROWS:
                self._remedies[fix] = None
            if len(self._bad) < NAMED_ROWS:
                self._bad.append(line)

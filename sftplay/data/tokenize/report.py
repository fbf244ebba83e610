"""The data report: the outcome of every record that was read, as `data_report.json` and as a table for people.

Every record is counted in exactly one of kept, cut, dropped and refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sftplay.data.tokenize.batch import RowOutcome

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
            "cut_tokens": self.cut_tokens,
            "refused": self.refused,
            "duplicates": self.duplicates,
            "near_duplicates": self.near_duplicates,
            "prompts_with_several_answers": self.prompts_with_several_answers,
            "split_records": self.split,
            "typed_specials": self.with_special_tokens,
            "with_system": self.with_system,
            "unused_columns": dict(sorted(self.unused_columns.items())),
            "examples": self.examples,
            "tokens": self.tokens,
            "trainable_tokens": self.trainable_tokens,
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
    """Add up the counts of several sources."""
    whole = RowCounts()
    for source in sources:
        for name, value in vars(source).items():
            so_far = getattr(whole, name)
            setattr(whole, name, max(so_far, value) if name == "longest" else so_far + value)
    return whole


def report_table(report: Mapping[str, Any]) -> str:
    """Format the report for people: at most 25 lines."""
    lines = [
        f"data report      {report['read']:,} read = {report['kept']:,} kept + {report['cut']:,} cut"
        f" + {sum(report['dropped'].values()):,} dropped + {report['refused']:,} refused"
    ]
    lines += [
        f"  {name:<14} {source['examples']:,} examples, {source['tokens']:,} tokens,"
        f" {source['trainable_token_share']:.1%} learned   {source['path']}"
        for name, source in report["sources"].items()
    ]
    lines += [f"  dropped        {count:,}: {reason.replace('_', ' ')}" for reason, count in report["dropped"].items()]
    if report["refused"]:
        lines.append(f"  refused        reasons with file and line in {report['refused_rows']}")
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

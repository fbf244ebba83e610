"""Accounting: what became of every record that was read, as `data_report.json` and as a table for people.

Every record is counted in exactly one of kept, cut, dropped and refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

BINS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Upper edges of the length histogram, in tokens."""

BAR_WIDTH = 30


@dataclass
class Tally:
    """Counts of one source, or of several added up."""

    kept: int = 0
    cut: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    duplicates: int = 0
    """Records whose whole content was read before, in this source or an earlier one; they are kept."""

    split: int = 0
    """Records that became several examples, because the template rewrites earlier turns."""

    examples: int = 0
    tokens: int = 0
    trainable_tokens: int = 0
    ends_learned: int = 0
    """Examples whose last learned token ends a turn."""

    longest: int = 0
    """Tokens of the longest example before cutting."""

    lengths: Counter[int] = field(default_factory=Counter)
    """Upper edge of a bin -> examples, by their length before cutting; 0 stands for longer than the last edge."""

    def add_length(self, n_tokens: int) -> None:
        """Count an example of `n_tokens`, before it is cut."""
        self.longest = max(self.longest, n_tokens)
        self.lengths[next((edge for edge in BINS if n_tokens <= edge), 0)] += 1

    @property
    def read(self) -> int:
        """Records read: the sum of the four disjoint fates."""
        return self.kept + self.cut + self.dropped.total() + self.refused

    def as_json(self) -> dict[str, Any]:
        """The counts under the names of `data_report.json`."""
        return {
            "read": self.read,
            "kept": self.kept,
            "cut": self.cut,
            "dropped": dict(sorted(self.dropped.items())),
            "refused": self.refused,
            "duplicates": self.duplicates,
            "split_records": self.split,
            "examples": self.examples,
            "tokens": self.tokens,
            "trainable_tokens": self.trainable_tokens,
            "trainable_token_share": _share(self.trainable_tokens, self.tokens),
            "eos_in_loss_share": _share(self.ends_learned, self.examples),
            "longest_tokens": self.longest,
            "length_histogram": {_edge_name(edge): self.lengths[edge] for edge in (*BINS, 0) if self.lengths[edge]},
        }


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of several sources."""
    whole = Tally()
    for tally in tallies:
        for name, value in vars(tally).items():
            so_far = getattr(whole, name)
            setattr(whole, name, max(so_far, value) if name == "longest" else so_far + value)
    return whole


def report_table(report: Mapping[str, Any]) -> str:
    """The report for people: at most 25 lines."""
    lines = [
        f"data report      {report['read']:,} read = {report['kept']:,} kept + {report['cut']:,} cut"
        f" + {sum(report['dropped'].values()):,} dropped + {report['refused']:,} refused"
    ]
    lines += [_source_line(name, source) for name, source in report["sources"].items()]
    lines += [f"  dropped        {count:,}: {reason.replace('_', ' ')}" for reason, count in report["dropped"].items()]
    if report["refused"]:
        lines.append(f"  refused        reasons with file and line in {report['refused_rows']}")
    if report["duplicates"]:
        lines.append(f"  duplicates     {report['duplicates']:,} records are equal to an earlier one; they are kept")
    if report["split_records"]:
        lines.append(f"  split          {report['split_records']:,} records into one example a turn")
    lines += [
        f"  tokens         {report['tokens']:,}, of which {report['trainable_token_share']:.1%} are learned;"
        f" the end of turn is learned in {report['eos_in_loss_share']:.1%}",
        f"  mask           by {report['mask_method']}, template {report['template_hash'][:12]}",
        f"  length         longest {report['longest_tokens']:,} tokens, limit {report['max_seq_len']:,}",
    ]
    room = 25 - len(lines) - len(report["notes"])
    lines += _histogram_lines(report["length_histogram"])[: max(room, 0)]
    lines += [f"  note           {note}" for note in report["notes"]]
    return "\n".join(lines[:25])


def _source_line(name: str, source: Mapping[str, Any]) -> str:
    return (
        f"  {name:<14} {source['examples']:,} examples, {source['tokens']:,} tokens,"
        f" {source['trainable_token_share']:.1%} learned   {source['path']}"
    )


def _histogram_lines(histogram: Mapping[str, int]) -> list[str]:
    most = max(histogram.values(), default=1)
    return [
        f"  {name:>14} {'#' * max(1, round(BAR_WIDTH * count / most)):<{BAR_WIDTH}} {count:,}"
        for name, count in histogram.items()
    ]


def _edge_name(edge: int) -> str:
    return f"<={edge}" if edge else f">{BINS[-1]}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

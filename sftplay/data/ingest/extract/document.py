"""A document of any kind as a title and Markdown blocks, or the reason why it cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from sftplay.errors import MachineError

BlockKind = Literal["heading", "paragraph", "list", "table", "code"]

Reason = Literal["empty", "encrypted", "scanned", "broken", "wrong_format", "too_large", "encoding", "unsafe"]
"""`unsafe`: reading it would take memory or reach files and hosts without need, as zip bombs and XML entities do."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a document that is not divided: a heading, a paragraph, a whole list, table or piece of code."""

    text: str
    """Markdown, without blank lines around it. Only `|` in the cells of a table is escaped."""

    kind: BlockKind = "paragraph"

    level: int = 0
    """Of a heading, 1 to 6; 0 for all else."""

    page: int | None = None
    """The page, slide or sheet on which the block begins, from 1; None where the format has no pages."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """A document's text. It has at least one block with text."""

    title: str
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    """Remarks for the report, such as "2 of 7 pages have no text"."""

    guessed_encoding: str = ""
    """The encoding that was taken for a text that is not UTF-8 and names none."""


class Unreadable(Exception):
    """A document gives no text; the reason is one word for counting, the detail is for people."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def need(*modules: str, kind: str) -> None:
    """Raise MachineError where a library of a kind of documents is not installed; import none."""
    lacking = [name for name in modules if find_spec(name) is None]
    if lacking:
        raise MachineError(f"{kind} documents need {', '.join(lacking)}", fix="make install EXTRAS=ingest")


def find_heading(blocks: Iterable[Block]) -> str:
    """Return the text of the first heading; empty where there is none."""
    return next((block.text.lstrip("# ") for block in blocks if block.level), "")


def heading(text: str, level: int, *, page: int | None = None) -> Block:
    level = min(max(level, 1), 6)
    return Block(f"{'#' * level} {' '.join(text.split())}", "heading", level, page)

"""The page of a report: sections of blocks as one HTML file that needs neither network nor server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sftplay.places import ROOT
from sftplay.report.figures import as_number, format_figure

TEMPLATES = ROOT / "sftplay" / "report" / "templates"

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters no HTML text may hold, or that turn the direction of what follows; half surrogates are no UTF-8."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells, whose long texts are cut; a narrow page scrolls it in itself, or with `stacks` shows the cells of
    a row below each other.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kinds: str = ""
    """One letter per column: `n` figure, `v` change with its verdict, `c` code, `b` width of a bar, else text."""

    caption: str = ""
    stacks: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def format(self) -> str:
        """Return the table for a terminal."""
        lines = [[str(cell) for cell in line] for line in (self.head, *self.rows)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(self.head))]
        first = [line[0].ljust(widths[0]) for line in lines]
        rest = [[cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)] for line in lines]
        return "\n".join("  ".join([name, *cells]).rstrip() for name, cells in zip(first, rest, strict=True))


def list_facts(tree: dict[str, Any], skipped: Collection[str] = (), *, above: str = "") -> list[tuple[str, str]]:
    """Return what an object says as names and texts; inner objects two levels down, and nothing that is empty."""
    facts: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{above}{key}".replace("_", " ")
        if key in skipped or value in (None, "", [], {}):
            continue
        if isinstance(value, dict) and above.count(": ") < 2:
            facts += list_facts(value, skipped, above=f"{name}: ")
        elif isinstance(value, float) or (as_number(value) is not None and key.endswith("_bytes")):
            facts.append((name, format_figure(key, value)))
        elif isinstance(value, list):
            facts.append((name, ", ".join(map(str, value))))
        elif isinstance(value, bool):
            facts.append((name, "yes" if value else "no"))
        else:
            facts.append((name, str(value) if as_number(value) is None else f"{value:,}"))
    return facts


MOST_CHARACTERS = 700  # of an answer's text

Answer = tuple[str, list[tuple[str, bool | None, str]]]
"""Its heading, and its texts as (name, correct or not or unknown, text)."""

Block = tuple[str, Any]
"""What kind of block it is, a branch of the macro `show` in templates/page.html, and its content."""


class Section(NamedTuple):
    """A part of the page. Blocks without content are left out, and sections without blocks."""

    anchor: str
    title: str
    blocks: Sequence[Block]


Tile = tuple[str, str, str]
"""Name, value, a note below it."""

Remark = tuple[Literal["stop", "warn", "note"], str]
"""How much it matters, and a sentence."""


def render_page(
    title: str, *, heading: str, lead: Sequence[Sequence[tuple[str, object]]], tiles: Sequence[Tile],
    sections: Sequence[Section], footer: str = "",
) -> str:  # fmt: skip
    """Return the whole page as HTML. `lead` is lines of (kind, text): plain, `code`, or a state's colour."""
    shown = [(anchor, name, [block for block in blocks if block[1]]) for anchor, name, blocks in sections]
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    script *= any(kind == "charts" for _, _, blocks in shown for kind, _ in blocks)
    # Only this very script runs and nothing is fetched, so text of a run that became markup could do nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # As many columns as leave the fewest gaps in the last row; the most of equal ones.
    columns = min(range(3, 7), key=lambda columns: (-len(tiles) % columns, -columns))
    return ENVIRONMENT.get_template("page.html").render(
        title=title, heading=heading, lead=lead, tiles=tiles, columns=columns, footer=footer,
        sections=[section for section in shown if section[2]],
        style=Markup(style), script=Markup(script), digest=digest,
    )  # fmt: skip


def cut(value: object, limit: int) -> str:
    """Return the value as text. A long one is cut, and its full length is added."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text):,} characters in all)"


def _escape(value: object) -> object:
    """Show control characters, also those that turn the writing direction, as escapes."""

    def write(match: re.Match[str]) -> str:
        code = ord(match.group())
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

    return value if isinstance(value, Markup) else _UNPRINTABLE.sub(write, str(value))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES), autoescape=True, finalize=_escape, undefined=StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
ENVIRONMENT.filters["cut"] = cut
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":")}

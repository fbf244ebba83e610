"""The report's templates. Nothing that a file of the run holds becomes markup: every value they show is escaped.

The page stands alone: a policy keeps it from fetching anything. It is read on a phone, on a desk and on paper, in light
and dark, and without the script.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sftplay.places import ROOT

TEMPLATES = ROOT / "sftplay" / "report" / "templates"

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters no HTML text may hold, or that turn the direction of what follows; half surrogates are no UTF-8."""


def render(template: str, **values: Any) -> str:
    """Return the template as HTML, filled with the values."""
    return ENVIRONMENT.get_template(template).render(values)


def render_page(title: str, **values: Any) -> str:
    """Return the whole page as HTML."""
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    # Only this very script runs and nothing is fetched, so text of a run that became markup could do nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render("page.html", title=title, style=Markup(style), script=Markup(script), digest=digest, **values)


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


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts; a narrow page scrolls it in itself, or with `stacks` shows the cells of a row below each other."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    kinds: str = ""
    """One letter per column: `n` figures, `c` code, `b` the width of a bar, else text."""

    caption: str = ""
    stacks: bool = False

    def kind(self, column: int) -> str:
        """The letter of a column."""
        return self.kinds[column : column + 1]

"""Whether a stream is a terminal, and text in colours where it shows them."""

from __future__ import annotations

import os
from typing import TextIO

YELLOW, RED = "\x1b[33m", "\x1b[31m"
PLAIN = "\x1b[0m"


def is_terminal(stream: TextIO) -> bool:
    """True where a line can be written over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """True on a terminal that nobody asked to leave plain (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def painted(text: str, colour: str, *, stream: TextIO) -> str:
    """The text in a colour where the stream shows colours."""
    return f"{colour}{text}{PLAIN}" if has_colours(stream) else text

"""Write the card of a run's own adapter, and open the templates of cards.

It is apart from the model's card because the workers of every run write it."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

TEMPLATES = Path(__file__).with_name("templates")


def write_adapter_card(path: Path, *, name: str, base: str | None) -> None:
    """Write the card of a run's own adapter over PEFT's, which names folders of this machine.

    `base` is the base's name on the hub, None for a local one.
    """
    front = ModelCardData(library_name="peft", tags=["sft-play"], base_model=base)
    text = card_template("adapter_card.md").render(name=name, base=base)
    path.write_text(f"---\n{front.to_yaml()}\n---\n\n{text}", encoding="utf-8")


def card_template(name: str) -> Template:
    """Return the template of a card, with the filters that keep a value in its place."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    # A card is Markdown: autoescape would do too little there, and show as codes in a code block.
    environment.filters |= {"text": as_text, "code": as_code}
    return environment.get_template(name)


def as_text(value: Any) -> str:
    """Return a value as one line of plain Markdown text, without any tag, link, table cell or heading."""
    return html.escape(re.sub(r"([\\`*\[\]|~$])", r"\\\1", _one_line(value)), quote=False)


def as_code(value: Any) -> str:
    """Return a value as a code span, with more backquotes than its longest run of them (CommonMark 0.31, 6.1)."""
    text = _one_line(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _one_line(value: Any) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in str(value)).split())

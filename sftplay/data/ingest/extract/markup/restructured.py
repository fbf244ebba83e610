"""Convert reStructuredText to blocks through the HTML of docutils; no directive may read a file of the machine.

Roles and directives of Sphinx, which docutils does not know, keep their text.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Extracted, Unreadable, find_heading, heading, need
from sftplay.data.ingest.extract.markup.page import parse_page
from sftplay.data.ingest.extract.text import read_characters

LONGEST_LINE = 100_000
"""Characters; docutils gets slow on longer lines, because its rules look far ahead."""

SWITCHED_OFF = (
    *("file_insertion_enabled", "raw_enabled", "embed_stylesheet", "docinfo_xform", "smart_quotes"),
    *("footnote_backlinks", "toc_backlinks"),
)
SETTINGS: dict[str, Any] = dict.fromkeys(SWITCHED_OFF, False)
SETTINGS |= {"_disable_config": True, "report_level": 5, "halt_level": 6, "line_length_limit": LONGEST_LINE}
SETTINGS |= {"syntax_highlight": "none", "math_output": "LaTeX", "stylesheet_path": None}
"""https://docutils.sourceforge.io/docs/user/config.html"""

HEADER = re.compile(r"\A\s*(?:[A-Z][\w-]*:.*\n(?:[ \t]+.*\n)*){2,}\s*\n")
"""Lines like the header of a mail, with which PEPs and other proposals begin."""

HEADER_TITLE = re.compile(r"^Title:[ \t]*(\S.*)$", re.M)
ROLE = re.compile(r":((?:[a-z]+:)?[a-z]+):`~?!?([^`<]+?)(?:\s*<[^`>]*>)?`")
DOCUTILS_ROLES = (
    *("math", "sub", "sup", "subscript", "superscript", "code", "literal", "emphasis", "strong", "pep", "rfc"),
)
PLAIN_ROLES = ("ref", "doc", "term", "abbr", "numref", "guilabel", "menuselection", "dfn", "title", "any")
"""Roles that mark words; all others mark code."""

KEPT_DIRECTIVES = (
    *("versionadded", "versionchanged", "deprecated", "versionremoved", "seealso", "centered", "glossary", "only"),
    *("function", "class", "method", "attribute", "exception", "module", "data", "describe", "object", "option"),
    *("py:function", "py:class", "py:method", "py:attribute", "py:exception", "py:module", "py:data", "c:function"),
    *("confval", "cmdoption", "staticmethod", "classmethod", "decorator", "tab", "tabs", "dropdown", "details"),
)
SKIPPED_DIRECTIVES = (
    *("toctree", "index", "currentmodule", "py:currentmodule", "highlight", "automodule", "autoclass", "autofunction"),
    *("canonical-doc", "canonical-pypa-spec", "canonical-typing-spec", "autosummary", "plot", "program"),
    "tabularcolumns",
)
"""Directives of Sphinx by whether a reader sees their content."""


def read_restructured(path: Path, encoding: str) -> Extracted:
    need("docutils", kind="reStructuredText")
    from docutils.core import publish_parts
    from docutils.utils import SystemMessage

    text, guessed = read_characters(path, encoding)
    longest = max(map(len, text.split("\n")))
    if longest > LONGEST_LINE:
        raise Unreadable("too_large", f"a line of {longest:,} characters; {LONGEST_LINE:,} are read")
    header = HEADER.match(text)
    named = HEADER_TITLE.search(header[0]) if header else None

    def replace_role(found: re.Match[str]) -> str:  # one that docutils does not know
        role, words = found[1].rpartition(":")[2], " ".join(found[2].split())
        if role in DOCUTILS_ROLES:
            return found[0]
        return words if role in PLAIN_ROLES else f"``{words}``"

    text = ROLE.sub(replace_role, text[header.end() :] if header and named else text)
    _register_directives()
    settings = SETTINGS | {"warning_stream": io.StringIO(), "doctitle_xform": named is None}
    settings["initial_header_level"] = 2 if named else 1
    try:
        parts = publish_parts(text, writer="html5", settings_overrides=settings)
    except SystemMessage as error:
        raise Unreadable("broken", f"docutils: {error}") from None
    title, blocks = parse_page(f"<body>{parts['html_body']}</body>", is_whole=True)
    if named:
        title = named[1].strip()
        blocks.insert(0, heading(title, 1))
    title = title or find_heading(blocks) or path.stem
    return Extracted(title, tuple(blocks), guessed_encoding=guessed)


def _register_directives() -> None:
    """Register Sphinx's directives with docutils: they keep their arguments and content, or add nothing."""
    from docutils import nodes
    from docutils.parsers.rst import Directive, directives

    class KeptDirective(Directive):
        optional_arguments, final_argument_whitespace, has_content = 100, True, True

        def run(self) -> list[Any]:
            argument = " ".join(self.arguments)
            begins = [nodes.paragraph(argument, argument)] if argument else []
            holder = nodes.container()
            self.state.nested_parse(self.content, self.content_offset, holder)
            return [*begins, *holder.children]

    class SkippedDirective(KeptDirective):
        def run(self) -> list[Any]:
            return []

    for names, directive in ((KEPT_DIRECTIVES, KeptDirective), (SKIPPED_DIRECTIVES, SkippedDirective)):
        for name in names:
            directives.register_directive(name, directive)

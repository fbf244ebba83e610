"""HTML, Markdown and reStructuredText become blocks."""

from __future__ import annotations

import codecs
import io
import re
from email import message_from_bytes, policy
from email.message import EmailMessage
from itertools import chain
from pathlib import Path
from typing import Any

from sftplay.data.files import MARKS
from sftplay.data.ingest.extract.document import (
    Block,
    BlockKind,
    Extracted,
    Unreadable,
    as_markdown,
    check_size,
    cut_blocks,
    find_heading,
    guess_encoding,
    heading,
    need,
    read_characters,
    split_plain,
    to_fence,
    without_empty_contents,
)

DROPPED_NAMES = """
    script style noscript template svg button select input textarea iframe object embed head img audio video canvas
    map area link meta rp rt
"""
DROPPED = frozenset(DROPPED_NAMES.split())
"""Elements that hold no text of the document."""

BREAK = "\x00"
"""Stands for a line break until white space is made one; HTML cannot hold it."""

CODE, DOCUTILS_CODE = ("code", "kbd", "samp", "tt"), "docutils literal"
"""Elements of inline code, and the class by which docutils marks it."""

POWER = re.compile(r"[-+−]?\d+|[a-z]", re.A)
EDGE = re.compile(rf"[ \t\r\n\f]*{BREAK}[ \t\r\n\f]*")
SPACES = re.compile(r"[ \t\r\n\f]+")


def tidy(text: str) -> str:
    """Return the text with white space as a browser shows it, and line breaks where the document has them."""
    return SPACES.sub(" ", EDGE.sub(BREAK, text)).strip(f" {BREAK}").replace(BREAK, "\n")


def inline_text(element: Any) -> str:
    """Return the text of an element and its inline children; not tidied, without the element's tail."""
    tag = element.tag
    if not isinstance(tag, str) or tag in DROPPED:  # comments and instructions have no name
        return ""
    if tag == "br":
        return BREAK
    if tag == "math":
        return math_text(element)
    inner = (element.text or "") + "".join(inline_text(child) + (child.tail or "") for child in element)
    is_code = tag in CODE or element.get("class") == DOCUTILS_CODE
    if is_code and inner.strip() and "`" not in inner:
        return f"`{inner.strip()}`"
    if tag == "q":
        return f"“{inner}”"
    if tag == "sup" and POWER.fullmatch(inner.strip()):
        return f"^{inner.strip()}"
    return inner


def math_text(element: Any) -> str:
    """Return a formula as TeX where the document holds it, else as its characters."""
    tex = element.get("alttext") or ""
    for note in element.iter("annotation"):
        if "tex" in (note.get("encoding") or ""):
            tex = note.text or tex
    tex = tex.strip().removeprefix("{\\displaystyle").removesuffix("}" if "displaystyle" in tex else "").strip()
    return f"${tex}$" if tex else "".join(element.itertext())


MOST_COLUMNS, MOST_ROWS_SPANNED, MOST_CELLS = 200, 1_000, 200_000
"""A document may claim any span; these bound its cost."""

HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")


def _build_grid(cells_by_row: list[list[Any]]) -> list[list[str]]:
    """Return a table's texts by row and column; a merged cell fills all its places."""
    grid: list[list[str]] = []
    hanging: dict[int, tuple[int, str]] = {}  # column -> rows still to fill, text
    n_cells = 0
    for cells in cells_by_row:
        line: list[str] = []
        for cell in cells:
            _fill(line, hanging)
            text = to_cell(find_blocks(cell))
            rows, columns = _span(cell, "rowspan", most=MOST_ROWS_SPANNED), _span(cell, "colspan", most=MOST_COLUMNS)
            for place in range(columns):
                shown = "" if place else text
                if rows > 1:
                    # A short cell is repeated, so that every row can be read alone.
                    hanging[len(line)] = (rows - 1, shown if len(shown) <= 80 else "")
                line.append(shown)
            if len(line) > MOST_COLUMNS:
                break
        _fill(line, hanging)
        n_cells += len(line)
        if n_cells > MOST_CELLS:
            break
        grid.append(line)
    return grid


def _fill(line: list[str], hanging: dict[int, tuple[int, str]]) -> None:
    """Append the cells that span down from rows above."""
    while len(line) in hanging:
        left, text = hanging.pop(len(line))
        if left > 1:
            hanging[len(line)] = (left - 1, text)
        line.append(text)


def _span(cell: Any, name: str, *, most: int) -> int:
    digits = (cell.get(name) or "1").strip()
    return min(max(int(digits), 1), most) if digits.isdecimal() and len(digits) < 6 else 1


BLOCK_NAMES = """
    address article aside blockquote body caption center dd details dialog dir div dl dt fieldset figcaption figure
    footer form h1 h2 h3 h4 h5 h6 header hgroup hr html legend li main menu nav ol p pre search section summary table
    tbody td tfoot th thead tr ul
"""
BLOCKS = frozenset(BLOCK_NAMES.split())
LISTS = ("ul", "ol", "menu", "dir")
LANGUAGE = re.compile(
    r"(?:language-|lang-|brush: ?|highlight-source-|highlight-)([a-z0-9+#-]+)"
    r"|\bcode ([a-z0-9+#-]+) (?:literal-block|doctest)"
)
CODE_SIGNS = re.compile(r"[{}=<>$#\\|@]|\(\)|\w[_/]\w")
PARAGRAPHS = re.compile(rf"(?:{BREAK}[ \t\r\n\f]*){{2,}}")


def find_blocks(element: Any) -> list[Block]:
    """Return the blocks of an element, without its tail."""
    out: list[Block] = []
    _walk(element, out)
    return out


def _walk(element: Any, out: list[Block]) -> None:
    pending = element.text or ""
    for child in element:
        if isinstance(child.tag, str) and child.tag not in DROPPED:
            if not BLOCKS.isdisjoint(inner.tag for inner in child.iter()):
                _add_paragraphs(pending, out)
                pending = ""
                _add(child, out)
            else:
                pending += inline_text(child)
        pending += child.tail or ""
    _add_paragraphs(pending, out)


def _add(element: Any, out: list[Block]) -> None:
    tag = element.tag
    if tag in HEADINGS:
        text = " ".join(tidy(inline_text(element)).split())
        if text:
            out.append(heading(text, int(tag[1])))
    elif tag in LISTS:
        text = _list_text(element)
        if text:
            out.append(Block(text, "list"))
    elif tag == "table":
        _add_table(element, out)
    elif tag == "pre":
        _add_pre(element, out)
    elif tag == "dl":
        _add_definitions(element, out)
    elif tag == "blockquote":
        inner = find_blocks(element)
        out += [block if block.level else Block(indent(block.text, "> ", others="> ")) for block in inner]
    else:
        _walk(element, out)


def _add_paragraphs(text: str, out: list[Block]) -> None:
    """Add running text; two line breaks in a row are the end of a paragraph."""
    if text.strip():
        out += [Block(part) for paragraph in PARAGRAPHS.split(text) if (part := tidy(paragraph))]


def _list_text(element: Any) -> str:
    """Return a list as Markdown, with the blocks of each item indented below it."""
    lines = []
    first = element.get("start") or "1"
    number = int(first) if first.isdecimal() and len(first) < 10 else 1
    for item in element:
        if item.tag in LISTS:  # not allowed, but frequent: a list directly in a list belongs to the item before
            inner = _list_text(item)
            lines += [indent(inner, "  ", others="  ")] if inner else []
        elif isinstance(item.tag, str) and item.tag not in DROPPED:
            # A list follows its paragraph directly, all else after an empty line.
            blocks = find_blocks(item)
            inner = "".join(("\n" if block.kind == "list" else "\n\n") + block.text for block in blocks).lstrip("\n")
            if inner:
                marker = f"{number}. " if element.tag == "ol" else "- "
                lines.append(indent(inner, marker, others=" " * len(marker)))
                number += 1
    return "\n".join(lines)


def indent(text: str, first: str, *, others: str) -> str:
    """Return the text with one prefix before its first line and another before the others."""
    lines = text.split("\n")
    return "\n".join([first + lines[0], *((others + line).rstrip() for line in lines[1:])])


def _add_definitions(element: Any, out: list[Block]) -> None:
    """Add terms and their definitions: a list if all are short, else paragraphs."""
    parts = [part for part in element.iter("dt", "dd") if next(part.iterancestors("dl")) is element]
    inner = [(part.tag, find_blocks(part)) for part in parts]
    if any(len(blocks) > 1 or any(block.kind != "paragraph" for block in blocks) for _, blocks in inner):
        for _, blocks in inner:
            out += blocks
        return
    lines: list[str] = []
    for tag, blocks in inner:
        text = " ".join(blocks[0].text.split()) if blocks else ""
        if tag == "dd" and lines and text:
            lines[-1] += f" {text}" if lines[-1].endswith(":") else f": {text}"
        elif text:
            lines.append(f"- {text}")
    if lines:
        out.append(Block("\n".join(lines), "list"))


def _add_table(element: Any, out: list[Block]) -> None:
    """Add a table with its caption before it; of a layout table, add the blocks of its cells."""
    for caption in element.iter("caption"):
        if next(caption.iterancestors("table")) is element:
            _walk(caption, out)
    rows = []  # without those of tables in the cells
    for child in element:
        if child.tag in ("tr", "thead", "tbody", "tfoot"):
            rows += [child] if child.tag == "tr" else [row for row in child if row.tag == "tr"]
    cells_by_row = [[cell for cell in row if cell.tag in ("td", "th")] for row in rows]
    widths = [sum(_span(cell, "colspan", most=MOST_COLUMNS) for cell in cells) for cells in cells_by_row]
    is_layout = max(widths, default=0) <= 1 or element.get("role") in ("presentation", "none")
    if is_layout or any(inner.tag in HEADINGS for inner in element.iter()):
        for cell in chain.from_iterable(cells_by_row):
            _walk(cell, out)
    elif text := as_markdown(_build_grid(cells_by_row)):
        out.append(Block(text, "table"))


def to_cell(blocks: list[Block]) -> str:
    """Return blocks in one line: items of lists and rows of inner tables are divided by `;`."""
    parts = []
    for block in blocks:
        lines = block.text.split("\n")
        if block.kind == "table":
            rows = [line.strip("| ").replace(" | ", ", ") for line in [lines[0], *lines[2:]]]
            parts.append("; ".join(rows).replace("\\|", "|"))
        elif block.kind == "list":
            parts.append("; ".join(re.sub(r"^\s*(?:-|\d+\.) ", "", line).strip() for line in lines))
        elif block.kind == "code":
            parts.append(" ".join(lines[1:-1]))
        else:
            parts.append(block.text.lstrip("# ") if block.level else " ".join(lines))
    return " ".join(parts)


def _add_pre(element: Any, out: list[Block]) -> None:
    """Add preformatted text: code in a fence, verse and letters line by line."""
    text = inline_text(element).replace(BREAK, "\n") if element.find("br") is not None else "".join(element.itertext())
    lines = text.expandtabs(4).replace("\r", "").strip("\n").split("\n")
    text = "\n".join(line.rstrip() for line in lines)
    if not text.strip():
        return
    classes = " ".join([element.get("class") or "", *(e.get("class") or "" for e in element.iter("code"))])
    above = " ".join(ancestor.get("class") or "" for ancestor in list(element.iterancestors())[:2])
    is_code = element.find(".//code") is not None or bool(classes.strip()) or CODE_SIGNS.search(text) is not None
    if not is_code:
        parts = [part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip()]
        out += [Block(part if "\n" in part else part.strip()) for part in parts]
        return
    named = LANGUAGE.search(classes) or LANGUAGE.search(above)
    language = named[1] or named[2] if named else ""
    language = "" if language in ("default", "text", "none", "plaintext", "notranslate") else language
    out.append(to_fence(text, language))


MOST_PAGE_BYTES = 32 << 20
"""Of one page. Its tree takes about ten times as much memory."""

DECLARED = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)
BROWSERS = {
    **dict.fromkeys(("iso-8859-1", "latin-1", "latin1", "ascii", "us-ascii"), "cp1252"),
    **dict.fromkeys(("utf-16", "utf-16le", "utf-16be", "utf16", "ucs-2"), "utf-8"),
}
"""Names that stand for Windows' encoding in pages (https://encoding.spec.whatwg.org/#names-and-labels), and for UTF-8:
a page whose bytes spell the name is in none of these itself (HTML, "determining the character encoding")."""

NAVIGATION_WORDS = """
    nav navbar navbox navbox-styles navigation menu sidebar breadcrumb breadcrumbs toc toctree-wrapper footer noprint
    headerlink mw-editsection mw-jump-link catlinks printfooter cookie cookies cookie-banner share sharing social
    skip-link skip-to-content visually-hidden sr-only screen-reader-text pagenum page-number page-list pagination
    related advertisement ad ads comments vertical-navbox sistersitebox sphinxsidebar rst-footer-buttons
    wy-nav-side wy-breadcrumbs prev-next-area metadata ambox hatnote shortdescription pg-boilerplate mw-empty-elt
    vector-column-start vector-column-end vector-page-toolbar vector-body-before-content vector-dropdown edit-link
    copybtn linenos lineno line-numbers gutter permalink anchor-link anchorjs-link back-to-top site-header site-footer
    mw-cite-backlink mw-redirectedfrom
"""
NAVIGATION = frozenset(NAVIGATION_WORDS.split())
"""Words of `class` with which widely used templates mark navigation."""

NAVIGATION_ROLES = ("navigation", "banner", "contentinfo", "search", "menu", "menubar", "toolbar", "dialog", "doc-toc")
NAVIGATION_TAGS = (
    *("nav", "footer", "form", "dialog", "script", "style", "noscript", "template", "svg", "button", "select"),
)
HIDDEN = re.compile(r"(?:display\s*:\s*none|visibility\s*:\s*hidden)", re.I)
CONTENT_MARKS = ("main", "role=main", "id=mw-content-text", "itemprop=articleBody", "article")
LEAST_SHARE = 0.3
"""Least share of a page's text, without navigation, that its marked content must hold."""

LEAST_LINKS, LINKED_SHARE, LONGEST_ENTRY = 3, 0.8, 100
"""A table or list where so many entries, and such a share of them, link into the page itself is a table of contents;
its entries are no longer than so many characters."""


def read_page(path: Path, encoding: str) -> Extracted:
    check_size(path, MOST_PAGE_BYTES)
    text, notes, guessed = _decode(path.read_bytes(), encoding)
    title, blocks = parse_page(text)
    return Extracted(title or path.stem, tuple(blocks), notes, guessed)


def _decode(data: bytes, encoding: str) -> tuple[str, tuple[str, ...], str]:
    """Return a page as text, by its byte order mark, the encoding of the caller or of the page itself, else as UTF-8;
    notes; and the encoding that was guessed where none of these is right.
    """
    marked = next((name for mark, name in MARKS if data.startswith(mark)), "")
    found = DECLARED.search(data[:4096])
    declared = found[1].decode("ascii", "replace").lower() if found else ""
    name = marked or ("" if encoding == "auto" else encoding) or BROWSERS.get(declared, declared) or "utf-8"
    try:
        codec = codecs.lookup(name)
        text, _ = codec.decode(data, "strict")
    except (LookupError, UnicodeError, TypeError):
        if not found or "codec" not in locals():
            if encoding != "auto" or marked:
                raise Unreadable("encoding", f"the page is not {name} and names no other encoding") from None
            guessed = guess_encoding(data)
            return data.decode(guessed, "replace"), (), guessed
        text, _ = codec.decode(data, "replace")
        note = f"characters that are not {name}, which the page names: {text.count(chr(0xFFFD))}"
        return text.removeprefix("\ufeff"), (note,), ""
    return text.removeprefix("\ufeff"), (), ""


def parse_page(text: str, is_whole: bool = False) -> tuple[str, list[Block]]:
    """Return the title and blocks of a page; with `is_whole` nothing is treated as navigation.
    Raise Unreadable where it cannot be parsed, or is nested too deeply.
    """
    from lxml import etree, html

    # A fresh parser without network and with libxml2's bounds on depth; entities of HTML are characters only.
    parser = html.HTMLParser(encoding="utf-8", no_network=True, huge_tree=False, remove_comments=True, remove_pis=True)
    try:
        root = html.document_fromstring(text.encode("utf-8", "replace"), parser=parser)
    except (etree.LxmlError, ValueError, AssertionError) as error:
        raise Unreadable("broken", f"no HTML: {error}") from None
    body = root.find("body")
    if body is None:
        raise Unreadable("empty", "the page has no body")
    named = tidy(root.findtext("head/title") or "")
    first = body.find(".//h1")
    headline = " ".join(tidy(inline_text(first)).split()) if first is not None else ""
    content = body
    if not is_whole:  # the text that follows a removed element stays
        for element in list(body.iterdescendants()):
            if isinstance(element.tag, str) and _is_navigation(element):
                element.drop_tree()
        for element in list(body.iterdescendants("table", "ul", "ol")):
            if _is_contents(element):
                element.drop_tree()
        content = _find_content(body)
    blocks = without_empty_contents(cut_blocks(find_blocks(content)))
    levels = [block.level for block in blocks if block.level]
    if headline and content is not body and 1 not in levels:
        blocks.insert(0, heading(headline, 1))
    return (headline if levels.count(1) <= 1 and headline else named) or headline, blocks


def _is_navigation(element: Any) -> bool:
    tag = element.tag
    if tag in NAVIGATION_TAGS or element.get("role") in NAVIGATION_ROLES or element.get("hidden") is not None:
        return True
    if HIDDEN.search(element.get("style") or "") and element.find(".//math") is None:
        return True
    words = (element.get("class") or "").lower().split()
    if tag in ("header", "aside") and element.find(".//h1") is None:
        outer = [ancestor for ancestor in element.iterancestors() if ancestor.get("role") == "main"]
        return not outer and next(element.iterancestors("main", "article"), None) is None
    if tag == "sup":
        return "reference" in words  # a wiki's note; the same word stands at every link that Sphinx makes
    is_place = tag in ("div", "ul", "ol") and "section" not in words  # a section's id is its heading's text
    begins_with_heading = len(element) > 0 and element[0].tag in HEADINGS
    words += [(element.get("id") or "").lower()] if is_place and not begins_with_heading else []
    return not NAVIGATION.isdisjoint(words) and tag not in ("html", "body", "main", "article", "h1", "h2", "math")


def _is_contents(element: Any) -> bool:
    """Whether a table or list is a table of contents: nearly all of it links into the same page."""
    n_entries = sum(bool(entry.text_content().strip()) for entry in element.iter("tr", "li", "p", "dt"))
    links = [link for link in element.iter("a") if (link.get("href") or "").startswith("#")]
    n_links = sum(len(link.text_content().strip()) >= 3 for link in links)  # a note's way back is one sign
    if n_links < LEAST_LINKS or n_links < LINKED_SHARE * n_entries:
        return False
    return len(" ".join(element.text_content().split())) <= LONGEST_ENTRY * n_links


def _find_content(body: Any) -> Any:
    """Return the element that the page marks as its content if it is a fair part of the page, else all."""
    whole = max(len(body.text_content()), 1)
    for mark in CONTENT_MARKS:
        name, _, value = mark.partition("=")
        found = body.xpath(f"//*[@{name}=$value]", value=value) if value else body.findall(f".//{name}")
        if found and (mark != "article" or len(found) == 1):
            best = max(found, key=lambda element: len(element.text_content()))
            if len(best.text_content()) >= LEAST_SHARE * whole:
                return best
    return body


def read_mail(path: Path, encoding: str) -> Extracted:
    check_size(path)
    mail = message_from_bytes(path.read_bytes(), policy=policy.default)
    if any(part.get_content_type() == "application/pkcs7-mime" for part in mail.walk()):
        raise Unreadable("encrypted", "the mail is encrypted (S/MIME)")
    if mail.get_content_type() == "multipart/encrypted":
        raise Unreadable("encrypted", "the mail is encrypted (PGP)")
    subject = " ".join(str(mail.get("subject", "")).split())
    blocks: list[Block] = []
    for kinds in (("plain", "html"), ("html",)):
        body = mail.get_body(preferencelist=kinds) if not blocks else None
        if isinstance(body, EmailMessage):
            data, charset = bytes(body.get_payload(decode=True) or b""), body.get_content_charset() or "utf-8"
            try:
                text = data.decode(charset, "strict")
            except (LookupError, UnicodeDecodeError):
                raise Unreadable("encoding", f"the mail's text is not {charset}, which it names") from None
            is_page = body.get_content_subtype() == "html"
            blocks = parse_page(text)[1] if is_page and text.strip() else split_plain(text.replace("\r\n", "\n"))
    n_attachments = sum(part.is_attachment() for part in mail.walk() if isinstance(part, EmailMessage))
    notes = (f"attachments that are not read: {n_attachments}",) if n_attachments else ()
    head = [heading(subject, 1)] if subject and blocks else []
    return Extracted(subject or path.stem, (*head, *blocks), notes)


MARKDOWN_KINDS: dict[str, BlockKind] = {
    "bullet_list_open": "list",
    "ordered_list_open": "list",
    "table_open": "table",
    "fence": "code",
    "code_block": "code",
}
"""Tokens of markdown-it; all other blocks are paragraphs."""

FRONT_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)(?:---|\.\.\.)[ \t]*\n", re.S)
FRONT_TITLE = re.compile(r"^title:[ \t]*[\"']?(.+?)[\"']?[ \t]*$", re.M)
PICTURE = re.compile(r" ?(?:\[!\[[^\]]*\]\([^)\s]*(?:\s\"[^\"]*\")?\)\]\([^)]*\)|!\[[^\]]*\]\([^)]*\))")
"""A picture, or a link that shows nothing but one, such as a badge."""

MOST_MARKDOWN_BYTES = 16 << 20
"""Of one file. Its tokens take about thirty times as much memory."""

COMMENT = re.compile(r"<!--.*?-->", re.S)


def read_markdown(path: Path, encoding: str) -> Extracted:
    """Return a title and the outermost blocks of the text, each with its lines unchanged."""
    from markdown_it import MarkdownIt

    text, guessed = read_characters(path, encoding, most=MOST_MARKDOWN_BYTES)
    front = FRONT_MATTER.match(text)
    named = FRONT_TITLE.search(front[1]) if front else None
    text = text[front.end() :] if front else text
    lines = text.split("\n")
    blocks: list[Block] = []
    tokens = MarkdownIt("commonmark").enable("table").disable("inline").parse(text)
    for place, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0 or token.type == "hr":
            continue
        body = "\n".join(lines[token.map[0] : token.map[1]]).strip("\n").rstrip()
        if token.type == "heading_open":
            blocks.append(heading(tokens[place + 1].content, int(token.tag[1])))
        elif token.type == "html_block":
            blocks += parse_page(f"<body>{body}</body>", is_whole=True)[1] if COMMENT.sub("", body).strip() else []
        else:
            kind = MARKDOWN_KINDS.get(token.type, "paragraph")
            body = body if kind == "code" else PICTURE.sub("", body).strip()
            blocks += [Block(body, kind)] if body else []
    title = named[1] if named else find_heading(blocks)
    return Extracted(title or path.stem, tuple(blocks), guessed_encoding=guessed)


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

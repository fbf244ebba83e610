"""Read pages of HTML, Markdown and mail."""

from __future__ import annotations

import codecs
import re
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, BlockKind, Extracted, Unreadable, find_heading, heading
from sftplay.data.ingest.extract.markup.blocks import HEADINGS, find_blocks, inline_text, tidy
from sftplay.data.ingest.extract.text import cut_blocks, guess_encoding, read_characters, split_plain
from sftplay.data.read.encodings import MARKS

MOST_PAGE_BYTES = 32 << 20
"""Of one page. Its tree takes about ten times as much memory."""

DECLARED = re.compile(rb"""(?:charset|encoding)\s*=\s*["']?\s*([\w.:-]+)""", re.I)
BROWSERS = {"iso-8859-1": "cp1252", "latin-1": "cp1252", "latin1": "cp1252", "ascii": "cp1252", "us-ascii": "cp1252"}
"""Names that stand for Windows' encoding in pages; https://encoding.spec.whatwg.org/#names-and-labels."""

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
"""Words of `class` with which widely used templates mark navigation."""

NAVIGATION = frozenset(NAVIGATION_WORDS.split())

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

CONTENTS = re.compile(r"(?:table of )?contents|on this page|in this article", re.I)


def read_page(path: Path, encoding: str) -> Extracted:
    size = path.stat().st_size
    if size > MOST_PAGE_BYTES:
        raise Unreadable("too_large", f"{size >> 20} MiB; pages of up to {MOST_PAGE_BYTES >> 20} MiB are read")
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
    """Whether the page marks an element as navigation."""
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


def without_empty_contents(blocks: list[Block]) -> list[Block]:
    """Return the blocks without the headings of removed tables of contents."""
    kept = []
    for block, after in zip(blocks, [*blocks[1:], Block("", "heading")]):
        if not (block.kind == after.kind == "heading" and CONTENTS.fullmatch(block.text.lstrip("# "))):
            kept.append(block)
    return kept


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


MOST_MAIL_BYTES = 64 << 20


def read_mail(path: Path, encoding: str) -> Extracted:
    size = path.stat().st_size
    if size > MOST_MAIL_BYTES:
        raise Unreadable("too_large", f"{size >> 20} MiB; mails of up to {MOST_MAIL_BYTES >> 20} MiB are read")
    mail = message_from_bytes(path.read_bytes(), policy=policy.default)
    if any(part.get_content_type() == "application/pkcs7-mime" for part in mail.walk()):
        raise Unreadable("encrypted", "the mail is encrypted (S/MIME)")
    if mail.get_content_type() == "multipart/encrypted":
        raise Unreadable("encrypted", "the mail is encrypted (PGP)")
    subject = " ".join(str(mail.get("subject", "")).split())
    blocks: list[Block] = []
    for kinds in (("plain", "html"), ("html",)):
        body = mail.get_body(preferencelist=kinds) if not blocks else None
        blocks = _read_part(body) if isinstance(body, EmailMessage) else blocks
    n_attachments = sum(part.is_attachment() for part in mail.walk() if isinstance(part, EmailMessage))
    notes = (f"attachments that are not read: {n_attachments}",) if n_attachments else ()
    head = [heading(subject, 1)] if subject and blocks else []
    return Extracted(subject or path.stem, (*head, *blocks), notes)


def _read_part(part: EmailMessage) -> list[Block]:
    data = part.get_payload(decode=True) or b""
    charset = part.get_content_charset() or "utf-8"
    try:
        text = bytes(data).decode(charset, "strict")
    except (LookupError, UnicodeDecodeError):
        raise Unreadable("encoding", f"the mail's text is not {charset}, which it names") from None
    if part.get_content_subtype() == "html":
        return parse_page(text)[1] if text.strip() else []
    return split_plain(text.replace("\r\n", "\n"))


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

"""Convert odt, odp and ods to blocks: texts, slides and sheets share one XML vocabulary, which becomes HTML first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sftplay.data.ingest.extract.document import Block, Extracted, Unreadable, find_heading
from sftplay.data.ingest.extract.markup.blocks import BREAK, find_blocks
from sftplay.data.ingest.extract.office.archive import Archive, add_code, add_element, attribute, local

SKIPPED = (
    *("tracked-changes", "annotation", "annotation-end", "sequence-decls", "forms", "table-of-content", "notes"),
    *("user-index", "alphabetical-index", "illustration-index", "table-index", "variable-decls", "shapes"),
)
"""Parts without text of the document: deletions, comments, indexes with page numbers, speaker's notes."""

CODE = ("preformatted", "source", "code")


def read_opendocument(path: Path, encoding: str) -> Extracted:
    """Return title and blocks; slides and sheets are pages."""
    with Archive(path) as archive:
        if b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise Unreadable("encrypted", "the document is locked by a password")
        content, meta = archive.tree("content.xml"), archive.tree("meta.xml")
    body = next((child for child in content if local(child) == "body"), None) if content is not None else None
    if body is None or len(body) == 0:
        raise Unreadable("broken", "the archive holds no OpenDocument")
    reader = _Converter(content)
    named = next((node.text or "" for node in meta.iter() if local(node) == "title"), "") if meta is not None else ""
    blocks: list[Block] = []
    pages = [child for child in body[0] if local(child) in ("page", "table")] if local(body[0]) != "text" else []
    for number, page in enumerate(pages, 1):
        root = content.makeelement("body")
        if local(page) == "table":
            add_element(root, "h2").text = attribute(page, "name") or ""
        reader.add(page, root)
        made = find_blocks(root)
        keeps = len(made) > 1 or (made and not made[0].level)
        blocks += [Block(block.text, block.kind, block.level, number) for block in made if keeps]
    if not pages:
        root = content.makeelement("body")
        reader.add_children(body[0], root)
        blocks = find_blocks(root)
    title = named.strip() or reader.title or find_heading(blocks) or path.stem
    return Extracted(title, tuple(blocks))


class _Converter:
    def __init__(self, content: Any) -> None:
        self.title = ""
        self._parents: dict[str, str] = {}
        self._ordered: dict[tuple[str, int], bool] = {}
        for style in content.iter():
            if local(style) == "style":
                self._parents[attribute(style, "name") or ""] = attribute(style, "parent-style-name") or ""
            elif local(style) in ("list-level-style-number", "list-level-style-bullet"):
                level = int(attribute(style, "level") or "1")
                name = attribute(style.getparent(), "name") or ""
                is_numbered = local(style).endswith("number") and bool(attribute(style, "num-format"))
                self._ordered[name, level] = is_numbered

    def add_children(self, element: Any, parent: Any) -> None:
        for child in element:
            self.add(child, parent)

    def add(self, element: Any, parent: Any) -> None:
        name = local(element)
        if not name or name in SKIPPED:
            return
        if name in ("p", "h"):
            self._add_paragraph(element, parent)
        elif name == "list":
            self._add_list(element, parent)
        elif name == "table":
            self._add_table(element, add_element(parent, "table"))
        else:
            self.add_children(element, parent)

    def _add_paragraph(self, element: Any, parent: Any) -> None:
        text, frames = self._text(element)
        style = self._style(attribute(element, "style-name") or "")
        if text.strip(f" \n{BREAK}"):
            if local(element) == "h" or style == "title":
                level = int(attribute(element, "outline-level") or "1") if style != "title" else 1
                add_element(parent, f"h{min(max(level, 1), 6)}").text = text.replace(BREAK, " ")
                self.title = self.title or (" ".join(text.replace(BREAK, " ").split()) if style == "title" else "")
            elif any(word in style for word in CODE):
                add_code(parent, text.replace(BREAK, "\n"))
            else:
                add_element(parent, "p", text=text.replace("\n", " ").replace(BREAK, "\n"))
        for frame in frames:
            self.add_children(frame, parent)

    def _text(self, element: Any) -> tuple[str, list[Any]]:
        """Return the text of a paragraph, and the frames in it that hold further paragraphs."""
        out, frames = [element.text or ""], []
        for child in element:
            name = local(child)
            if name == "s":
                out.append(" " * min(int(attribute(child, "c") or "1"), 200))
            elif name in ("tab", "line-break"):
                out.append("\t" if name == "tab" else BREAK)
            elif name in ("frame", "text-box", "custom-shape", "g"):
                frames.append(child)
            elif name == "note":
                notes = [self._text(part)[0] for part in child.iter() if local(part) == "p"]
                out.append(f" ({' '.join(notes).strip()})")
            elif name and name not in SKIPPED and name not in ("page-number", "ruby-text", "bookmark-ref"):
                text, inner = self._text(child)
                out.append(text)
                frames += inner
            out.append(child.tail or "")
        return "".join(out), frames

    def _style(self, name: str) -> str:
        """Return a paragraph's named style; an automatic style is replaced by its parent."""
        for _ in range(20):
            if name not in self._parents or not self._parents[name]:
                break
            name = self._parents[name]
        return name.lower().replace("_20_", " ")

    def _add_list(self, element: Any, parent: Any, *, style: str = "", level: int = 1) -> None:
        style = attribute(element, "style-name") or style
        made = add_element(parent, "ol" if self._ordered.get((style, level)) else "ul")
        for item in element:
            if local(item) not in ("list-item", "list-header"):
                continue
            holder = add_element(made, "li")
            for child in item:
                if local(child) == "list":
                    self._add_list(child, holder, style=style, level=level + 1)
                else:
                    self.add(child, holder)

    def _add_table(self, table: Any, made: Any) -> None:
        for row in table.iter():
            if local(row) != "table-row" or next(e for e in row.iterancestors() if local(e) == "table") is not table:
                continue
            cells = [child for child in row if local(child) in ("table-cell", "covered-table-cell")]
            while cells and len(cells[-1]) == 0:  # a sheet's empty cells up to its edge
                cells.pop()
            for _ in range(_count(row, "number-rows-repeated") if cells else 0):
                line = add_element(made, "tr")
                for cell in cells:
                    if local(cell) == "covered-table-cell":
                        continue
                    spans = {"colspan": "number-columns-spanned", "rowspan": "number-rows-spanned"}
                    for _ in range(_count(cell, "number-columns-repeated")):
                        counts = {span: str(_count(cell, name)) for span, name in spans.items()}
                        self.add_children(cell, add_element(line, "td", **counts))


def _count(element: Any, name: str) -> int:
    value = attribute(element, name) or "1"
    # Whole empty sheets are stored as repeats.
    return min(max(int(value), 1), 1_000) if value.isdecimal() and len(value) < 8 else 1

"""Libraries that read documents, side by side on real ones: share of a check list found, seconds, MiB to install.

    make bench-documents ARGS="--folder ../shared/data/documents"

The check lists (tests/data/ingest/check_lists.json) were written from the documents themselves: title, headings,
sentences, rows of tables, items of lists, lines of code, and what must be gone. Every library that is installed takes
part with the formats that it reads; the others are named. Markdown's own signs of emphasis, code and escapes count for
nothing, nor does the kind of white space; a heading, row, item or line of code must be marked as one. CPU seconds are
the best of three readings in a warm process. MiB are what a library brings with all it needs, beside requirements.lock.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LISTS = ROOT / "tests" / "data" / "ingest" / "check_lists.json"
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+(.*)")
LINK = re.compile(r"\[([^\[\]]*)\]\((?:[^()]|\((?:[^()])*\))*\)")
ROUNDS = 3


def plain(text: str) -> str:
    """Text without Markdown's inline signs, with one kind of white space and of quotation marks."""
    text = LINK.sub(r"\1", text)
    text = re.sub(r"[*_`\\]", "", text).replace("’", "'").replace("‘", "'").replace("“", '"').replace("”", '"')
    return " ".join(text.split())


def judge(text: str, title: str, wanted: dict[str, Any]) -> list[tuple[str, bool]]:
    """Each point of a check list with whether the text has it, or is free of it."""
    whole, lines = plain(text), text.split("\n")
    headings = [plain(line) for line in lines if line.startswith("#")]
    rows = [plain(line) for line in lines if line.lstrip().startswith("|")]
    items = [plain(found[1]) for line in lines if (found := ITEM.match(line))]
    code = "\n".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.M | re.S))
    name = plain(wanted["title"])
    points = [(f"title: {name}", name == plain(title) if title else any(name in each for each in headings))]
    points += [(f"heading: {each}", any(plain(each) in head for head in headings)) for each in wanted["headings"]]
    points += [(f"sentence: {each}", plain(each) in whole) for each in wanted["sentences"]]
    for cells in wanted.get("rows", []):
        pattern = r"\s*\|\s*".join(re.escape(plain(cell)) for cell in cells)
        points.append((f"row: {cells}", any(re.search(rf"\|\s*{pattern}\s*\|", row) for row in rows)))
    points += [(f"item: {each}", any(plain(each) in item for item in items)) for each in wanted.get("items", [])]
    points += [(f"code: {each}", each in code) for each in wanted.get("code", [])]
    spaced = " ".join(text.split())
    return points + [(f"absent: {each}", each not in spaced) for each in wanted["absent"]]


@dataclass(frozen=True)
class Library:
    """A way from a document to Markdown."""

    name: str
    packages: tuple[str, ...]
    """What a user installs for it."""

    suffixes: tuple[str, ...]
    read: Callable[[Path], tuple[str, str]]
    """Path -> text, title; the title is empty where the library tells none."""


def read_ours(path: Path) -> tuple[str, str]:
    from sftplay.data.ingest.extract.document import extract

    found = extract(path)
    return "\n\n".join(block.text for block in found.blocks), found.title


def read_markitdown(path: Path) -> tuple[str, str]:
    from markitdown import MarkItDown

    found = MarkItDown().convert(str(path))
    return found.markdown, found.title or ""


def read_kreuzberg(path: Path) -> tuple[str, str]:
    from kreuzberg import ExtractionConfig, extract_file_sync

    found = extract_file_sync(str(path), config=ExtractionConfig(output_format="markdown"))
    return found.content, ""


DOCLING = {
    ".docx": ("msword_backend", "MsWordDocumentBackend", "docx"),
    ".html": ("html_backend", "HTMLDocumentBackend", "html"),
    ".htm": ("html_backend", "HTMLDocumentBackend", "html"),
    ".md": ("md_backend", "MarkdownDocumentBackend", "md"),
}


def read_docling(path: Path) -> tuple[str, str]:
    from docling.datamodel.base_models import InputFormat
    from docling.datamodel.document import InputDocument

    # docling-slim's converter of all formats does not import without torch (2.143); its readers of one format do.
    module, name, kind = DOCLING[path.suffix]
    backend = getattr(importlib.import_module(f"docling.backend.{module}"), name)
    document = InputDocument(path_or_stream=path, format=InputFormat(kind), backend=backend, filename=path.name)
    return document._backend.convert().export_to_markdown(), ""


def read_mammoth(path: Path) -> tuple[str, str]:
    import mammoth
    from markdownify import markdownify

    with path.open("rb") as stream:
        return markdownify(mammoth.convert_to_html(stream).value, heading_style="ATX"), ""


def read_trafilatura(path: Path) -> tuple[str, str]:
    import trafilatura

    page = path.read_text(encoding="utf-8")
    return trafilatura.extract(page, output_format="markdown", include_formatting=True, include_tables=True) or "", ""


def read_pypdfium2(path: Path) -> tuple[str, str]:
    import pypdfium2

    document = pypdfium2.PdfDocument(path)
    text = "\n\n".join(page.get_textpage().get_text_bounded() for page in document)
    return text, document.get_metadata_value("Title")


def read_as_it_is(path: Path) -> tuple[str, str]:
    return path.read_text(encoding="utf-8"), ""


OURS = ("firecrawl-anydoc", "pypdfium2", "openpyxl", "docutils", "ftfy", "py3langid")
LIBRARIES = [
    Library("ours (extra ingest)", OURS, (".txt", ".htm", ".html", ".md", ".rst", ".docx", ".pdf"), read_ours),
    Library("markitdown", ("markitdown",), (".txt", ".htm", ".html", ".md", ".docx", ".pdf"), read_markitdown),
    Library("kreuzberg", ("kreuzberg",), (".txt", ".htm", ".html", ".md", ".rst", ".docx", ".pdf"), read_kreuzberg),
    Library("docling-slim", ("docling-slim",), (".htm", ".html", ".md", ".docx"), read_docling),
    Library("mammoth + markdownify", ("mammoth", "markdownify"), (".docx",), read_mammoth),
    Library("trafilatura", ("trafilatura",), (".htm", ".html"), read_trafilatura),
    Library("pypdfium2's own text", ("pypdfium2",), (".pdf",), read_pypdfium2),
    Library("the file as it is", (), (".txt", ".md", ".rst"), read_as_it_is),
]


def installed_mib(packages: tuple[str, ...]) -> float:
    """What the packages take with all that they need, without what the kit has anyway.

    Raises:
        PackageNotFoundError: one is not installed.
    """
    lock = (ROOT / "requirements.lock").read_text()
    base = {normal(line.partition("==")[0]) for line in lock.splitlines() if "==" in line}
    seen: set[str] = set()

    def size(name: str, is_asked: bool) -> int:
        name = normal(name)
        if name in seen or name in base:
            return 0
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if is_asked:
                raise
            return 0  # of an extra that has not been asked for
        files = [Path(str(found.locate_file(file))) for file in found.files or ()]
        own = sum(file.stat().st_size for file in files if file.is_file())
        return own + sum(size(re.split(r"[\s;<>=!~(\[]", need)[0], False) for need in found.requires or ())

    return sum(size(package, True) for package in packages) / 2**20


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def measure(library: Library, path: Path, wanted: dict[str, Any]) -> tuple[int, int, float]:
    """Points found, points in all, seconds."""
    best, text, title = float("inf"), "", ""
    for _ in range(ROUNDS):
        began = time.process_time()
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            text, title = library.read(path)
        best = min(best, time.process_time() - began)
    points = judge(text, title, wanted)
    return sum(is_met for _, is_met in points), len(points), best


def table(folder: Path) -> Iterator[str]:
    """The Markdown table, a line at a time: a row per library, a column per kind of file."""
    lists = json.loads(LISTS.read_text(encoding="utf-8"))
    kinds = [".docx", ".pdf", ".html", ".rst", ".md", ".txt"]
    yield f"| library | MiB | {' | '.join(kinds)} | CPU seconds, all files |"
    yield "| --- | --- |" + " --- |" * (len(kinds) + 1)
    for library in LIBRARIES:
        try:
            mib = installed_mib(library.packages)
        except metadata.PackageNotFoundError:
            yield f"| {library.name} | not installed |" + " |" * (len(kinds) + 1)
            continue
        found: dict[str, list[int]] = {kind: [0, 0] for kind in kinds}
        seconds = 0.0
        for name, wanted in lists.items():
            if Path(name).suffix in library.suffixes:
                met, total, took = measure(library, folder / name, wanted)
                kind = ".html" if name.endswith(".htm") else Path(name).suffix
                found[kind][0] += met
                found[kind][1] += total
                seconds += took
        shares = [f"{met}/{total}" if total else "-" for met, total in found.values()]
        yield f"| {library.name} | {mib:.0f} | {' | '.join(shares)} | {seconds:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT.parent / "shared" / "data" / "documents")
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.exit(f"{folder}: there is no such folder\n  fix: give the documents with --folder")
    for line in table(folder):
        print(line, flush=True)


if __name__ == "__main__":
    main()

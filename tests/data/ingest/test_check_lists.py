"""Real documents keep their title, headings, sentences, rows, items and code, and lose what is not theirs.

The check lists were written from the documents themselves, not from what the kit makes of them.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.ingest_libraries import LISTS, judge
from sftplay.data.ingest.extract.document import extract
from tests.conftest import SHARED_DATA

DOCUMENTS = SHARED_DATA / "documents"
CHECK_LISTS = json.loads(LISTS.read_text(encoding="utf-8"))
NEEDS = {".docx": "anydoc", ".pdf": "pypdfium2", ".rst": "docutils"}


def lacking(name: str) -> str:
    """The library that a document needs and that is not installed."""
    library = NEEDS.get(Path(name).suffix, "")
    return library if library and find_spec(library) is None else ""


@pytest.mark.skipif(not DOCUMENTS.is_dir(), reason=f"needs the documents at {DOCUMENTS}")
@pytest.mark.parametrize("name", CHECK_LISTS)
def test_a_document_keeps_what_its_check_list_names_and_nothing_else(name):
    if lacking(name):
        pytest.skip(f"needs {lacking(name)}: make install EXTRAS=ingest")
    found = extract(DOCUMENTS / name)
    text = "\n\n".join(block.text for block in found.blocks)
    assert [point for point, is_met in judge(text, found.title, CHECK_LISTS[name]) if not is_met] == []
    pages = {block.page for block in found.blocks}
    assert pages == ({1} if name.endswith(".pdf") else {None})

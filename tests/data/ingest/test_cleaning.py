"""Cleaning changes only what it should in a text."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec

import pytest

from sftplay.data.ingest.children import CLEANING
from sftplay.data.ingest.extract.document import Block
from sftplay.data.ingest.reading import (
    SUSPECT,
    TextCleaner,
    line_keys,
    repeated,
    without_lines,
    write_keys,
)

WITHOUT_FTFY = [step for step in CLEANING if step != "encoding"]
needs_ftfy = pytest.mark.skipif(find_spec("ftfy") is None, reason="needs ftfy, of the extra `ingest`")


def clean(text: str, kind: str = "paragraph", steps: list[str] = WITHOUT_FTFY) -> str:
    return TextCleaner(steps).clean(Block(text, kind))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a  b\t\tc   ", "a b c"),
        ("one\r\ntwo\rthree\x0cfour", "one\ntwo\nthree\nfour"),
        ("no\u00a0break\u2009thin", "no break thin"),
        ("e\u0301 A\u030a", "\u00e9 \u00c5"),
        ("sof\u00adt zero\u200bwidth \ufeffmark\x00\x07", "soft zerowidth mark"),
        ("  - indented   item", "  - indented item"),
        ("a\n\n\n\nb", "a\n\nb"),
        ("می\u200cخواهم \u200fשלום\u200e", "می\u200cخواهم \u200fשלום\u200e"),
        ("👩\u200d👩\u200d👧", "👩\u200d👩\u200d👧"),
        ("x² ﬁ ½ Ⅳ", "x² ﬁ ½ Ⅳ"),
    ],
)
def test_spaces_and_signs_that_show_nothing_go_and_the_rest_stays(given, expected):
    assert clean(given) == expected


def test_code_and_tables_keep_their_columns():
    code = "```\nif x:\n\tprint( 1 )   \n    y   = 2\n```"
    assert clean(code, "code") == "```\nif x:\n\tprint( 1 )\n    y   = 2\n```"
    assert clean("| a    | b |\n| ---- | - |", "table") == "| a    | b |\n| ---- | - |"


BROKEN = ["Ã©tÃ©", "donâ€™t", "GrÃ¶ÃŸe", "â€œquotedâ€\x9d", "Ã  la carte", "Ð¿Ñ€Ð¸Ð²ÐµÑ‚", "ä¸­æ–‡"]


@needs_ftfy
@pytest.mark.parametrize("text", BROKEN)
def test_a_wrong_decoding_is_undone_as_ftfy_does_it(text):
    from ftfy import fix_encoding

    assert SUSPECT.search(text)
    assert clean(f"before {text} behind", steps=["encoding"]) == fix_encoding(f"before {text} behind")


def test_a_line_of_half_of_the_documents_goes_but_no_heading_table_or_code(tmp_path):
    foot = "Printed by the maker in 2024"
    documents = [
        [(f"Text {n}", "paragraph", 0, None), (f"{foot}\nand {n}", "list", 0, None), (foot, "heading", 2, None)]
        for n in range(10)
    ]
    for document in documents[6:]:
        document[1] = ("other words", "list", 0, None)
    paths = [tmp_path / str(n) for n in range(10)]
    for path, document in zip(paths, documents, strict=True):
        write_keys(path, line_keys(document))
    keys, taken = set(repeated(paths)), Counter()
    kept = without_lines(documents[0], keys, taken=taken)
    assert [block[0] for block in kept] == ["Text 0", "and 0", foot]
    assert taken == {foot: 1}
    assert repeated(paths[:4]) == []  # too few documents to tell

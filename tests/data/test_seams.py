"""A long text in parts has the tokens of the whole text; where that cannot be said, it stays whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sftplay.data.records import Source, Text
from sftplay.data.render.render import Renderer
from sftplay.data.render.vocabulary import PART_CHARACTERS, can_be_cut, split_at_seams
from tests.data.conftest import WORDS

PIECES = [
    "\n",
    "\n\n",
    " \n",
    "\r\n",
    "\t",
    "  ",
    "é",
    "e\u0301",
    "\u0301",
    "ǅ",
    "a",
    "Z",
    "7",
    "'s",
    "...",
    "—",
    "日本",
    "x\nAnd",
]
TEXTS = st.lists(st.sampled_from([*PIECES, *WORDS, " the", ".\nThe"]), max_size=80).map("".join)


def changed(text: str, change: Callable[[dict[str, Any]], Any]) -> str:
    state = json.loads(text)
    change(state)
    return json.dumps(state)


@cache
def read_cuttable(text: str, normalizer: str) -> Tokenizer:
    tokenizer = Tokenizer.from_str(changed(text, lambda state: state.update(normalizer=json.loads(normalizer))))
    assert can_be_cut(tokenizer.to_str())
    return tokenizer


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@pytest.mark.parametrize("name", ["modern", "trained"])
@settings(max_examples=40)
@given(text=TEXTS, size=st.integers(1, 60))
def test_the_parts_of_a_text_have_its_tokens(
    request: pytest.FixtureRequest, name: str, normalizer: Any, text: str, size: int
):
    tokenizer = read_cuttable(request.getfixturevalue(name), json.dumps(normalizer))

    def ids(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False).ids)

    parts = split_at_seams(text, ids, size=size)
    assert "".join(parts) == text
    assert [id for part in parts for id in ids(part)] == ids(text)


def test_a_line_is_no_seam_where_a_token_goes_over_it():
    def ids(part: str) -> list[int]:
        return [len(token) for token in re.findall(r"salt\nand|.", part, re.DOTALL)]

    text = "salt\nand\n" * 20
    parts = split_at_seams(text, ids, size=5)
    assert len(parts) > 1
    assert [id for part in parts for id in ids(part)] == ids(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(normalizer={"type": "Lowercase"}),
        lambda state: state.update(normalizer={"type": "Prepend", "prepend": "▁"}),
        lambda state: state.update(pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first"}),
        lambda state: state["pre_tokenizer"].update(add_prefix_space=True),
        lambda state: state["model"].update(dropout=0.1),
        lambda state: state["added_tokens"][0].update(rstrip=True),
        lambda state: state.update(pre_tokenizer=None),
    ],
)  # fmt: skip
def test_tokenizers_that_look_further_than_around_a_word_get_whole_texts(
    trained: str, change: Callable[[dict[str, Any]], Any]
):
    assert not can_be_cut(changed(trained, change))


def test_a_document_longer_than_a_part_has_the_tokens_of_the_whole(tokenizer: Any):
    text = "\n".join(f"The old boat number {n} carries green salt." for n in range(14_000))
    assert len(text) > 2 * PART_CHARACTERS
    (found,) = Renderer.prove(tokenizer, None, samples=[]).render([Text(text, Source("a", 1))])
    assert found.input_ids[:-1] == tokenizer(text, add_special_tokens=False)["input_ids"]

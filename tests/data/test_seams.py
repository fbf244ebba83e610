"""A long text in parts has the tokens of the whole text; where that cannot be said, it stays whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sftplay.data.records import Source, Text
from sftplay.data.render import vocabulary
from sftplay.data.render.render import Renderer
from sftplay.data.render.vocabulary import can_be_cut, split_at_seams
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


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@pytest.mark.parametrize("name", ["modern", "trained"])
@settings(max_examples=40)
@given(text=TEXTS, size=st.integers(1, 60))
def test_the_parts_of_a_text_have_its_tokens(
    request: pytest.FixtureRequest, name: str, normalizer: Any, text: str, size: int
):
    tokenizer = Tokenizer.from_str(
        changed(request.getfixturevalue(name), lambda state: state.update(normalizer=normalizer))
    )
    assert can_be_cut(tokenizer.to_str())

    def ids(part: str) -> list[int]:
        return list(tokenizer.encode(part, add_special_tokens=False).ids)

    parts = split_at_seams(text, ids, size=size)
    assert "".join(parts) == text
    assert [id for part in parts for id in ids(part)] == ids(text)


def test_a_text_without_a_seam_stays_whole_and_one_with_seams_is_cut_near_the_asked_size():
    def ids(part: str) -> list[int]:
        return [ord(letter) for letter in part]

    assert split_at_seams("word " * 100, ids, size=50) == ["word " * 100]
    assert [len(part) for part in split_at_seams("A line of 20 letters\n" * 10, ids, size=50)] == [63, 63, 63, 21]


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


def test_a_long_document_is_rendered_as_without_parts(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    record = Text("\n".join(f"The old boat number {n} carries green salt." for n in range(400)), Source("a", 1))
    renderer = Renderer.prove(tokenizer, None, samples=[])
    (whole,) = renderer.render([record])
    cut = []
    monkeypatch.setattr(vocabulary, "PART_CHARACTERS", 500)
    monkeypatch.setattr(
        vocabulary, "split_at_seams", lambda *given: cut.append(split_at_seams(*given, size=500)) or cut[-1]
    )
    (parted,) = renderer.render([record])
    assert parted == whole
    assert len(cut[0]) > 20
    assert whole.input_ids[:-1] == tokenizer(record.text, add_special_tokens=False)["input_ids"]

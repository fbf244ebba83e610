"""Token rows on a screen: every token's text, the learned ones marked, nothing that steers the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sftplay.data.inspect import decoded, learned_texts, legend, mark_learned, visible
from sftplay.log import has_colours

COLOUR = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_llama)


def row(tokenizer: Any, *parts: tuple[str, bool]) -> tuple[list[int], list[int]]:
    """Ids and labels of texts that are each learned or not."""
    ids, labels = [], []
    for text, is_learned in parts:
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += new
        labels += new if is_learned else [-100] * len(new)
    return ids, labels


PARTS = [("<|im_start|>user\nthe river<|im_end|>\n", False), ("old boats<|im_end|>", True), ("\n", False)]


def test_learned_stretches_stand_between_marks_and_special_tokens_are_there(tokenizer: Any):
    ids, labels = row(tokenizer, *PARTS, ("why", True))
    assert mark_learned(tokenizer, ids, labels=labels, colours=False) == (
        "<|im_start|>user\nthe river<|im_end|>\n\u27e6old boats<|im_end|>\u27e7\n\u27e6why\u27e7"
    )
    assert learned_texts(tokenizer, ids, labels=labels) == ["old boats<|im_end|>", "why"]
    assert "\u27e6 and \u27e7" in legend(colours=False)


def test_without_its_colours_the_painted_text_is_the_decoded_text(tokenizer: Any):
    ids, labels = row(tokenizer, *PARTS)
    text = mark_learned(tokenizer, ids, labels=labels, colours=True)
    assert COLOUR.sub("", text) == tokenizer.decode(ids, skip_special_tokens=False)
    assert "\x1b[1;32mold boats\x1b[0m\x1b[1;32;4m<|im_end|>\x1b[0m" in text
    assert text.startswith("\x1b[2;4m<|im_start|>\x1b[0m\x1b[2muser\x1b[0m\n\x1b[2mthe river\x1b[0m")
    assert COLOUR.sub("", legend(colours=True)) == "learned  only read  special token"


def test_characters_that_steer_a_terminal_and_our_own_marks_are_escaped(tokenizer: Any):
    ids, labels = row(tokenizer, ("\x1b[1;32mfake \u27e6learned\u27e7\x00\u2028\u202e\t\n", False))
    expected = "\\x1b[1;32mfake \\u27e6learned\\u27e7\\x00\\u2028\\u202e\t\n"
    assert mark_learned(tokenizer, ids, labels=labels, colours=False) == visible(decoded(tokenizer, ids)) == expected
    assert "\x1b[1;32m" not in mark_learned(tokenizer, ids, labels=labels, colours=True)


def test_the_space_before_a_word_is_kept_where_a_decoder_drops_it_at_the_beginning():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "?": 2}, "?"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    assert fast.decode([0, 1]) == "a b"
    assert mark_learned(fast, [0, 1, 0], labels=[-100, 1, -100], colours=False) == "a\u27e6 b\u27e7 a"


@pytest.mark.parametrize(
    ("terminal", "no_color", "expected"), [("xterm", None, True), ("dumb", None, False), ("xterm", "1", False)]
)
def test_colours_are_for_terminals_and_for_those_who_did_not_decline(monkeypatch, terminal, no_color, expected):
    stream = io.StringIO()
    monkeypatch.setenv("TERM", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert not has_colours(stream)
    stream.isatty = lambda: True
    assert has_colours(stream) is expected

"""Chats of thousands of turns take time in proportion; a template that does not come to an end is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sftplay.data.pipeline import load_examples
from sftplay.data.records import Chat, Message, Source
from sftplay.data.render import templates
from sftplay.data.render.masks import Marked, labelled
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import CHATML, ChatTemplate
from sftplay.data.render.vocabulary import Vocabulary
from sftplay.errors import DataError

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRAP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": TRAP,
    "a loop without a pass": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


def chat(n_turns: int) -> Chat:
    turns = [
        turn
        for n in range(n_turns // 2)
        for turn in (Message("user", f"Stone {n} asks?"), Message("assistant", f"Salt {n} answers."))
    ]
    return Chat(tuple(turns), Source("rows.jsonl", 1))


@pytest.mark.parametrize("template", [CHATML, PLAIN], ids=["markers", "sentinels"])
def test_four_thousand_turns_take_as_many_renderings_as_four_hundred(tokenizer, monkeypatch, template):
    renderer = Renderer.prove(tokenizer, template, samples=[])
    real, counts = ChatTemplate.render, []

    def counted(self: ChatTemplate, messages: Any, **options: Any) -> Any:
        counts[-1] += 1
        return real(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    for n_turns in (400, 4000):
        counts.append(0)
        (example,) = renderer.render([chat(n_turns)], 2048)
        assert not example.problem
        assert sum(label in renderer.end_token_ids for label in example.labels) == n_turns // 2
    assert counts[0] == counts[1] < 60


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_come_to_an_end_is_refused(tokenizer, monkeypatch, template):
    monkeypatch.setattr(templates, "ROW_S", 0.2)
    with pytest.raises(DataError, match="does not come to an end") as refusal:
        Renderer.prove(tokenizer, template + PLAIN, samples=[])
    assert refusal.value.where == "data.template"


def test_a_row_on_which_the_template_does_not_come_to_an_end_is_refused_by_its_place(
    tokenizer, config, write_rows, monkeypatch, tmp_path
):
    monkeypatch.setattr(templates, "ROW_S", 0.2)
    (tmp_path / "t.jinja").write_text("{% if 'trap' in messages[0]['content'] %}" + TRAP + "{% endif %}" + PLAIN)
    rows = [{"prompt": word, "completion": "stones"} for word in ("boat", "trap", "hill")]
    cfg = config(write_rows(rows), template=str(tmp_path / "t.jinja"), split=0)
    with pytest.raises(DataError, match=r"train\.jsonl:2 takes the chat template longer than") as refusal:
        load_examples(cfg, tokenizer)
    assert "on_bad_row: skip" in refusal.value.fix
    skipped = config(write_rows(rows), template=str(tmp_path / "t.jinja"), split=0, on_bad_row="skip")
    assert load_examples(skipped, tokenizer).report["kept"] == 2


def test_examples_that_begin_alike_and_are_too_long_are_read_once(tokenizer, monkeypatch):
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    beginning = "Stone asks? Salt answers. " * 400
    group = [Marked(beginning + f"Turn {n}. " * n, ((10, 30),)) for n in range(1, 9)]
    read: list[int] = []
    real = Vocabulary.encode
    monkeypatch.setattr(
        Vocabulary, "encode", lambda self, texts: (read.append(sum(map(len, texts))), real(self, texts))[1]
    )
    whole = labelled(vocabulary, [group])
    assert read.pop() == sum(len(marked.text) for marked in group)
    cut = labelled(vocabulary, [group], max_tokens=100)
    assert sum(read) < 2 * len(beginning)
    for short, long in zip(cut, whole, strict=True):
        assert len(long.input_ids) > 1000
        assert (short.input_ids[:100], short.labels[:100]) == (long.input_ids[:100], long.labels[:100])
    # Seven are read to their end.
    read.clear()
    labelled(vocabulary, [group[1:]], max_tokens=100)
    assert sum(read) > 7 * len(beginning)

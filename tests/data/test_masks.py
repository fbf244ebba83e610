"""How masks are found where a template marks nothing, marks it wrongly or rewrites turns; what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_reference import decode_learned, make_chat
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sftplay.data.render.masks import Unproven, read_sentinel_layout
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import CHATML, ChatTemplate, resolve_template
from sftplay.errors import DataError

CHATML_PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "method", "learned"),
    [
        (CHATML, "markers", "First stone.<|im_end|>"),
        (
            CHATML.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}"),
            "sentinels",
            "First stone.<|im_end|>",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
            "{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
            "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
            "sentinels",
            "First stone.<|im_end|>",
        ),
        (
            CHATML_PLAIN.replace("message['content']", "(message['content'] | replace(' ', '\n'))"),
            "prefixes",
            "First\nstone.<|im_end|>",
        ),
    ],
    ids=["marked", "marked without the end token", "marked with the header", "escaped by the template"],
)
def test_marks_are_believed_only_where_they_are_right(tokenizer: Any, template: str, method: str, learned: str):
    renderer = Renderer.prove(tokenizer, template, samples=[])
    (found,) = renderer.render([make_chat("One stone?", "First stone.")])
    assert renderer.method == method
    assert decode_learned(tokenizer, found) == learned


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_end|>' }}{% endfor %}",
            "no method finds reliably",
        ),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}", "learn to stop"),
        (CHATML_PLAIN.replace("{% if add_generation_prompt %}", "{% if false %}"), "ignores add_generation"),
        (CHATML_PLAIN.replace("message['content'] +", "message['content'] | upper +"), "changes or drops"),
        ("{{ raise_exception('never') }}", "refuses it: never"),
        (CHATML_PLAIN.replace("+ '<|im_end|>'", ""), "learn to stop"),
        (CHATML_PLAIN.replace("<|im_start|>assistant", "<|im_start|>bot"), "at inference"),
        (CHATML_PLAIN.replace("assistant\n", "assistant\n<think>\n"), "ends with '<think>'"),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|im_start|>user\n' + m['content'] }}"
            "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{% endif %}{% endfor %}",
            "changes or drops part of the assistant's text",
        ),
    ],
)
def test_template_that_cannot_be_proven_is_refused_with_the_sample(tokenizer: Any, template: str, reason: str):
    sample = make_chat("Where is the boat?", "On the hill.")
    with pytest.raises(DataError) as refusal:
        Renderer.prove(tokenizer, template, samples=[sample])
    assert reason in str(refusal.value)
    assert "sample rows.jsonl:1" in str(refusal.value)


def test_row_that_the_template_refuses_has_the_templates_own_reason(tokenizer: Any):
    renderer = Renderer.prove(tokenizer, GEMMA, samples=[make_chat("Hi?", "Ho.")])
    refused, fine = renderer.render([make_chat("Hi?", "Ho.", system="Be brief."), make_chat("Hi?", "Ho.")])
    assert "no system role" in refused.problem
    assert refused.input_ids == []
    assert not fine.problem


def test_a_template_is_the_tokenizers_own_or_chatml_or_a_file(tokenizer: Any, tmp_path: Path):
    with pytest.raises(DataError, match=r"data\.template: chatml"):
        resolve_template("auto", tokenizer)
    tokenizer.chat_template = LLAMA_3
    assert resolve_template("auto", tokenizer) == LLAMA_3
    file = tmp_path / "mine.jinja"
    file.write_text(GEMMA, encoding="utf-8")
    assert resolve_template(str(file), tokenizer) == GEMMA
    with pytest.raises(DataError, match=r"there is no file 'chatmll'"):
        resolve_template("chatmll", tokenizer)
    file.write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        resolve_template(str(file), tokenizer)
    plain = Tokenizer(models.BPE(vocab={chr(code): code - 33 for code in range(33, 127)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel()
    bare = PreTrainedTokenizerFast(tokenizer_object=plain)
    with pytest.raises(DataError, match=r"<\|im_start\|> is not a single token") as refusal:
        resolve_template("chatml", bare)
    assert (
        refusal.value.fix == "give the path of a Jinja file made of its tokens (configs/templates/alpaca.jinja is one)"
    )
    with pytest.raises(DataError, match="has no chat template") as refusal:
        resolve_template("auto", bare)
    assert (
        refusal.value.fix
        == "set data.template: the path of a Jinja file made of its tokens (configs/templates/alpaca.jinja is one)"
    )
    bare.chat_template = GEMMA
    with pytest.raises(DataError, match=r"use the model's own template \(auto\)"):
        resolve_template("chatml", bare)
    first = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.backend_tokenizer.post_processor = first
    assert resolve_template("chatml", tokenizer) == CHATML


@pytest.mark.parametrize(
    ("template", "appears"),
    [
        ("{% for m in messages[:1] %}{{ m['content'] }}<|im_end|>{% endfor %}", "0"),
        ("{% for m in messages %}{{ m['content'] + m['content'] }}<|im_end|>{% endfor %}", "2"),
        ("{% for m in messages | reverse %}{{ m['content'] }}<|im_end|>{% endfor %}", "1"),
    ],
    ids=["left out", "twice", "the last one first"],
)
def test_a_layout_has_each_text_once_and_in_order(template: str, appears: str):
    with pytest.raises(Unproven, match=rf"message \d appears {appears} times or out of order"):
        read_sentinel_layout(ChatTemplate(template, {}), ["user", "assistant"], end=re.compile(r"<\|im_end\|>"))


def with_merge(tokenizer: Any, left: str, right: str) -> PreTrainedTokenizerFast:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"][left + right] = max(state["model"]["vocab"].values()) + 2
    state["model"]["merges"].append([left, right])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>")


def test_template_whose_prompt_has_other_tokens_than_training_is_refused(tokenizer: Any):
    # As in GPT-2, two line breaks are one piece at the end of a text and two pieces before a word.
    with pytest.raises(DataError, match="joins the prompt's end otherwise"):
        Renderer.prove(with_merge(tokenizer, "Ċ", "Ċ"), LLAMA_3, samples=[])
    assert Renderer.prove(tokenizer, LLAMA_3, samples=[]).method == "sentinels"


def test_row_whose_answer_the_tokenizer_joins_with_the_prompt_is_refused(tokenizer: Any):
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    renderer = Renderer.prove(with_merge(tokenizer, ":", ")"), template, samples=[])
    plain, smiling = renderer.render([make_chat("Why?", "So."), make_chat("Why?", ") So.")])
    assert not plain.problem
    assert smiling.problem == (
        "the tokenizer joins the prompt's end otherwise where ') So.</s>' follows than at inference"
    )
    assert not smiling.input_ids


def test_broken_jinja_is_refused_with_its_line(tokenizer: Any):
    with pytest.raises(DataError, match="line 2"):
        Renderer.prove(tokenizer, "{% for m in messages %}\n{{ m[ }}", samples=[])


def test_cutting_and_padding_set_in_the_tokenizer_file_are_not_applied(tokenizer: Any):
    chat = make_chat("Why? " * 40, "Because. " * 40)
    plain = Renderer.prove(tokenizer, CHATML, samples=[]).render([chat])
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=4096)
    assert Renderer.prove(tokenizer, CHATML, samples=[]).render([chat]) == plain

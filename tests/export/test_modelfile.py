"""Ollama's Modelfile: its grammar, and that its template writes what the Jinja template writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf_models import GEMMA_CHAT, LLAMA3_CHAT, MISTRAL_CHAT
from ollama import parse_modelfile, render_go
from transformers import PreTrainedTokenizerFast

from sftplay.data.render.templates import CHATML
from sftplay.export.gguf.modelfile import NoPieces, Pieces, find_pieces, list_dialogues, write_modelfile

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "data" / "base" / "tiny"


def tokenizer_with(template: str | None, **names: str) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BASE, bos_token="<s>", **names)
    tokenizer.chat_template = template
    return tokenizer


QWEN25 = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA2 = (
    "{{ bos_token }}{% set ns = namespace(before='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.before = '<<SYS>>\n' + m['content'] + '\n<</SYS>>\n\n' %}{% elif m['role'] == 'user' %}"
    "{{ '[INST] ' + ns.before + m['content'] + ' [/INST]' }}{% set ns.before = '' %}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
ODD = (
    "{% for m in messages %}{{ '{{' + m['role'] + '}}\u200b\"\"\"' + m['content'] + '\"\"\"\u00a0\n' }}{% endfor %}"
    '{% if add_generation_prompt %}{{ \'{{assistant}}\u200b"""\' }}{% endif %}'
)
BRACES = (
    "{% for m in messages %}{{ '{' + m['role'] + ':{' + m['content'] + '}}\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '{assistant:{' }}{% endif %}"
)
TEMPLATES = {
    "builtin": (BASE / "chat_template.jinja").read_text(encoding="utf-8"), "chatml": CHATML, "llama3": LLAMA3_CHAT,
    "gemma": GEMMA_CHAT, "mistral": MISTRAL_CHAT, "qwen2.5": QWEN25, "llama2": LLAMA2, "odd": ODD,
    "braces": BRACES,
}  # fmt: skip


def template_of(text: str) -> str:
    return dict(parse_modelfile(text))["TEMPLATE"]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_writes_what_the_jinja_template_writes(name: str, adds_bos: bool):
    tokenizer = tokenizer_with(TEMPLATES[name])
    text, reason = write_modelfile(
        "m.gguf", tokenizer, adds_bos=adds_bos, end_tokens=["<|im_end|>"], system="", sampling={}
    )
    assert reason == ""
    dialogues = list_dialogues(has_system=name != "mistral")
    assert len(dialogues) == (3 if name == "mistral" else 12)
    for dialogue in dialogues:
        expected = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        # Ollama writes the beginning token itself where the file asks for one.
        assert render_go(template_of(text), dialogue) == (expected.removeprefix("<s>") if adds_bos else expected)


LAST_TURN = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[U]' + ('(last)' if loop.last else '') + m['content'] }}"
    "{% else %}{{ '[A]' + m['content'] }}{% endif %}{% endfor %}{{ '[A]' }}"
)
TRIMS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'].split('\n')[0] + '\n' }}{% endfor %}{{ 'assistant: ' }}"
)


@pytest.mark.parametrize("template", [LAST_TURN, TRIMS, "{{ raise_exception('never') }}", "{{ messages | length }}"])
def test_a_template_that_ollama_cannot_say_is_left_out_with_the_reason(template: str):
    tokenizer = tokenizer_with(template)
    with pytest.raises(NoPieces):
        find_pieces(tokenizer)
    text, reason = write_modelfile("m.gguf", tokenizer, adds_bos=False, end_tokens=[], system="", sampling={})
    assert reason
    assert "TEMPLATE" not in dict(parse_modelfile(text))
    assert "# No TEMPLATE" in text


def test_the_modelfile_names_file_end_tokens_system_prompt_and_greedy_sampling():
    system = 'Say "yes".\nAlways. # {{ .X }}'
    text, _ = write_modelfile(
        "my run-q8_0.gguf",
        tokenizer_with(CHATML),
        adds_bos=False,
        end_tokens=["<|im_end|>", 'a"b'],
        system=system,
        sampling={},
    )
    commands = parse_modelfile(text)
    assert [name for name, _ in commands] == [
        "FROM", "TEMPLATE", "SYSTEM", "PARAMETER stop", "PARAMETER stop", "PARAMETER temperature",
        "PARAMETER repeat_penalty",
    ]  # fmt: skip
    values = [value for _, value in commands]
    assert (values[0], values[2:5]) == ("./my run-q8_0.gguf", [system, "<|im_end|>", 'a"b'])
    assert [float(value) for value in values[5:]] == [0.0, 1.0]  # Ollama's own are 0.8, and 1.1 in older releases


def test_sampling_is_that_of_the_generation_config():
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    text, _ = write_modelfile(
        "m.gguf", tokenizer_with(CHATML), adds_bos=False, end_tokens=[], system="", sampling=sampling
    )
    found = {name: float(value) for name, value in parse_modelfile(text) if name.startswith("PARAMETER")}
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20.0, "repeat_penalty": 1.05}
    assert found == {f"PARAMETER {name}": value for name, value in wanted.items()}


@pytest.mark.parametrize("system", ['three """ quotes', "no\u200bbreak"])
def test_a_system_prompt_that_a_modelfile_cannot_hold_is_left_out_and_that_is_said(system: str):
    text, _ = write_modelfile(
        "m.gguf", tokenizer_with(CHATML), adds_bos=False, end_tokens=[], system=system, sampling={}
    )
    assert "SYSTEM" not in dict(parse_modelfile(text))
    assert re.search(r"^# .*system prompt", text, re.M)


def test_a_model_without_a_chat_template_is_asked_with_the_plain_prompt():
    text, _ = write_modelfile("m.gguf", tokenizer_with(None), adds_bos=False, end_tokens=["x"], system="", sampling={})
    assert template_of(text) == "{{ .Prompt }}"


@pytest.mark.parametrize(
    "text",
    [
        'FROM ./a\nTEMPLATE """x',
        "TEMPLATE x",
        "FROM ./a\nTEMP x",
        "FROM a\nPARAMETER hot 1",
        "FROM a\nPARAMETER top_k x",
    ],
)
def test_the_checker_of_the_grammar_refuses_what_ollama_refuses(text: str):
    with pytest.raises(ValueError):
        parse_modelfile(text)


def test_the_pieces_of_a_go_template_are_those_that_render():
    pieces = Pieces(start="S", user=("<u>", "</u>"), assistant=("<a>", "</a>"), answer="<a>", system=("(", ")"))
    dialogue = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    assert pieces.render(dialogue) == render_go(pieces.as_go(), dialogue) == "(x)<u>y</u><a>"

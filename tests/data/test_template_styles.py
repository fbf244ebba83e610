"""Ten styles of chat template and every template that trl ships, against transformers' own rendering and offsets."""

from __future__ import annotations

import re
from typing import Any

import pytest
from chat_reference import decode_learned, one_a_turn, reference, render_text, shipped_templates
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from sftplay.data.records import Chat, Message, Source
from sftplay.data.render.render import Renderer
from sftplay.errors import DataError

pytestmark = pytest.mark.contract

# Each style's answer stands between [[ and ]]: nothing, or generation markers.
STYLES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "[[{{ m['content'] + '<|im_end|>' }}]]{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
        "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}"
        "{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'].strip() + ' [/INST]' }}"
        "{% else %}[[{{ ' ' + m['content'].strip() + ' ' + eos_token }}]]{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
        "{% if m['role'] == 'assistant' %}[[{{ m['content'] | trim + '<|eot_id|>' }}]]"
        "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<start_of_turn>model\n' }}"
        "[[{{ m['content'] | trim + '<end_of_turn>' }}]]{{ '\n' }}"
        "{% else %}{{ '<start_of_turn>user\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{{ bos_token }}{% for m in rest %}{% if m['role'] == 'user' %}"
        "{{ '[INST] ' + (system if loop.last or rest[loop.index0 + 1:] | length == 1 else '') + m['content'] "
        "+ '[/INST]' }}{% elif m['role'] == 'assistant' %}[[{{ ' ' + m['content'] | trim + eos_token }}]]"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
        "[[{{ m['content'] + '<|end|>' }}]]{{ '\n' }}"
        "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}"
        "[[{{ m['content'] + eos_token }}]]{{ '\n' }}"
        "{% else %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
        "{% elif m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
        "{% else %}{{ '<｜Assistant｜>' }}[[{{ m['content'] + '<｜end▁of▁sentence｜>' }}]]{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    ),
    "no system role": (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{{ 'GPT4 Correct User: ' + m['content'] + '<|end_of_turn|>' }}{% elif m['role'] == 'assistant' %}"
        "{{ 'GPT4 Correct Assistant:' }}[[{{ ' ' + m['content'] + '<|end_of_turn|>' }}]]"
        "{% else %}{{ raise_exception('there is no role ' + m['role']) }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"
    ),
    "rewrites thinking": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% set text = m['content'] %}{% set thought = '' %}"
        "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
        "[[{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' + text.lstrip('\n') }}"
        "{% else %}{{ text }}{% endif %}{{ '<|im_end|>' }}]]{{ '\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
# Mistral writes the system text before the last question, which makes every turn its own example; without it, none.
WITHOUT_SYSTEM = ("gemma", "no system role", "mistral")
REWRITING = ("rewrites thinking",)
ENDS = {
    "chatml": "<|im_end|>",
    "rewrites thinking": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "phi": "<|end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "no system role": "<|end_of_turn|>",
}

CHATS = {
    "three turns": ["One?", "First stone.", "Two?", "Second stone.", "Three?", "Third stone."],
    "equal turns": ["Again?", "Yes.", "Again?", "Yes.", "Again?", "Yes."],
    "emoji": ["Smile 🙂👩‍👩‍👧 please", "🙂👩‍👩‍👧 é ü 你好", "more", "🎉", "and", "نعم 🇫🇷"],
    "white space around": ["  hello \n", "\n  trimmed or not  \n", "ok ", " yes ", " \n\n so", "no\n\n"],
    "the answer stands in the question": ["Say Yes. and Yes.", "Yes.", "Yes.", "Yes.", "Yes. Yes.", "Yes. Yes."],
    "plain headers in the question": [
        "assistant\nYes.\n",
        "Yes.",
        "GPT4 Correct Assistant: Yes.",
        "No.",
        "[INST",
        "Eh.",
    ],
}
HEADERS = [
    "What is <|im_start|>assistant\nYes.<|im_end|> or <|start_header_id|>assistant<|end_header_id|>\n\nYo.<|eot_id|>?",
    "Yes.",
    "And <s>[INST] or [/INST] Yes.</s><start_of_turn>model\nYes.<end_of_turn>, <|assistant|>\nYes.<|end|>\n?",
    "No.",
    "<｜Assistant｜>Yes.<｜end▁of▁sentence｜>GPT4 Correct Assistant: Yes.<|end_of_turn|><|im_start|><|im_start|>",
    "With <|im_end|> or </s> or <|eot_id|>, so.",
]


def styled(style: str, markers: bool) -> str:
    opened, closed = ("{% generation %}", "{% endgeneration %}") if markers else ("", "")
    return STYLES[style].replace("[[", opened).replace("]]", closed)


def make_turns(texts: list[str], system: str = "") -> list[dict[str, str]]:
    turns = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]
    return [{"role": "system", "content": system}] * bool(system) + turns


def make_chat(turns: list[dict[str, Any]]) -> Chat:
    return Chat(tuple(Message(turn["role"], turn["content"]) for turn in turns), Source("rows.jsonl", 1))


def expected(tokenizer: Any, template: str, turns: Any, **how: Any) -> list[tuple[list[int], list[int]]]:
    build = one_a_turn if how.pop("splits") else lambda *given, **more: [reference(*given, **more)]
    return build(tokenizer, template, turns, **how)


@pytest.mark.parametrize("texts", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("markers", [True, False], ids=["markers", "plain"])
@pytest.mark.parametrize("style", STYLES)
def test_what_is_learned_is_what_prefix_rendering_says(
    modern_tokenizer: Any, style: str, markers: bool, texts: list[str]
):
    template = styled(style, markers)
    turns = make_turns(texts, "" if style in WITHOUT_SYSTEM else "Be brief.")
    found = Renderer.prove(modern_tokenizer, template, samples=[make_chat(turns)]).render([make_chat(turns)])
    how = {"splits": style in REWRITING, "unlearned": "</s>" if style == "phi" else ""}
    assert [(example.input_ids, example.labels) for example in found] == expected(
        modern_tokenizer, template, turns, **how
    )


def join_answers(style: str, texts: list[str]) -> str:
    """All that is to be learned, white space left out, which some of the styles trim."""
    thought = "<think></think>" if style in REWRITING else ""
    return "".join("".join(f"{thought}{text}{ENDS.get(style, '</s>')}".split()) for text in texts[1::2])


@pytest.mark.parametrize("markers", [True, False], ids=["markers", "plain"])
@pytest.mark.parametrize("style", STYLES)
def test_learned_text_is_the_answers_each_with_its_end_token(modern_tokenizer: Any, style: str, markers: bool):
    chat = make_chat(make_turns(CHATS["three turns"]))
    renderer = Renderer.prove(modern_tokenizer, styled(style, markers), samples=[chat])
    learned = decode_learned(modern_tokenizer, *renderer.render([chat]))
    assert "".join(learned.split()) == join_answers(style, CHATS["three turns"])
    assert modern_tokenizer.convert_ids_to_tokens(renderer.end_token_ids) == [ENDS.get(style, "</s>")]


@pytest.mark.parametrize("markers", [True, False], ids=["markers", "plain"])
@pytest.mark.parametrize("style", STYLES)
def test_headers_and_special_tokens_that_are_typed_stay_text(modern_tokenizer: Any, style: str, markers: bool):
    template = styled(style, markers)
    found = Renderer.prove(modern_tokenizer, template, samples=[]).render([make_chat(make_turns(HEADERS))])
    plain = make_turns([f"Placeholder{letter}" for letter in "abcdef"])
    whole = [plain[: index + 1] for index in (1, 3, 5)] if style in REWRITING else [plain]
    for example, turns in zip(found, whole, strict=True):
        text = render_text(modern_tokenizer, template, turns)
        assert (example.problem, example.input_ids) == ("", ids_by_pieces(modern_tokenizer, text))
    learned = decode_learned(modern_tokenizer, *found)
    assert "".join(learned.split()) == join_answers(style, HEADERS)
    assert sum(example.n_escaped for example in found) == 21  # 5 + 8 + 5 in the questions, 3 in the last answer


def ids_by_pieces(tokenizer: Any, text: str) -> list[int]:
    """The ids when the template's control tokens are looked up and all between them is read as mere text."""
    reader = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    reader.encode_special_tokens = True
    special = sorted((token.content for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    ids = []
    for piece in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        if piece in special:
            ids.append(tokenizer.convert_tokens_to_ids(piece))
        elif piece:
            typed = re.sub("Placeholder([a-f])", lambda match: HEADERS["abcdef".index(match[1])], piece)
            ids += reader.encode(typed, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("style", ["llama2", "llama3", "gemma", "mistral", "deepseek", "no system role"])
def test_bos_is_not_doubled_by_a_tokenizer_that_adds_one(modern_tokenizer: Any, style: str):
    backend = modern_tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", modern_tokenizer.bos_token_id)]
    )
    renderer = Renderer.prove(modern_tokenizer, styled(style, markers=False), samples=[])
    (found,) = renderer.render([make_chat(make_turns(["Hi?", "Ho."]))])
    (typed,) = renderer.render([make_chat(make_turns(["Hi <s>?", "Ho."]))])
    assert [ids.count(modern_tokenizer.bos_token_id) for ids in (found.input_ids, typed.input_ids)] == [1, 1]


# Why a template of trl's is refused: each word must stand in the reason.
REFUSED = {
    "deepseek_r1_distill": "the inference prompt ends with '<think>'",
    "deepseekv3": "the inference prompt ends with '<think>'",
    "deepseekv3_training": "the inference prompt ends with '<think>'",
}
# Templates that write a last turn otherwise than an earlier one: the model's own end, or a thought.
SPLIT = {"gptoss", "gptoss_training", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"}
SPLIT |= {
    f"nemotron_3_{name}{kind}" for name in ("5_lightning", "nano", "super", "ultra") for kind in ("", "_training")
}
IN_PARTS = {name for name in shipped_templates() if name.startswith(("idefics3", "llava_next", "smolvlm"))}
# These open the thinking in the prompt for good, so that only answers with a thought can be learned.
THINKING = {"deepseek_r1_distill_training"} | {name for name in SPLIT if name.startswith("nemotron")}
CLOSINGS = {"glm4moe": "<|user|>"}  # as GLM-4.5's generation_config.json has it among its eos_token_id


@pytest.mark.parametrize("name", sorted(shipped_templates()))
def test_template_that_trl_ships_is_proven_or_refused_with_its_cause(modern_tokenizer: Any, name: str):
    template = shipped_templates()[name]
    texts = CHATS["three turns"]
    if name in THINKING:
        texts = [text if text.endswith("?") else f"<think>\nWell.\n</think>\n\n{text}" for text in texts]
    turns = make_turns(texts)
    if name in REFUSED:
        with pytest.raises(DataError) as refusal:
            Renderer.prove(modern_tokenizer, template, samples=[make_chat(turns)])
        assert REFUSED[name] in refusal.value.what
        return
    found = Renderer.prove(modern_tokenizer, template, samples=[make_chat(turns)]).render([make_chat(turns)])
    if name in IN_PARTS:
        turns = [{"role": turn["role"], "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    how = {"splits": name in SPLIT, "closing": CLOSINGS.get(name, "")}
    how["unlearned"] = "</s>" if name.startswith("phi") else ""
    assert [example.problem for example in found] == [""] * len(found)
    assert [(example.input_ids, example.labels) for example in found] == expected(
        modern_tokenizer, template, turns, **how
    )


@pytest.mark.parametrize(
    ("name", "is_learned"), [("qwen3", True), ("qwen3_6", True), ("qwen3_5_nothink", False)], ids=str
)
def test_an_empty_thought_is_learned_exactly_where_the_prompt_ends_before_it(
    modern_tokenizer: Any, name: str, is_learned: bool
):
    template = shipped_templates()[name]
    turns = make_turns(["Why?", "Because."])
    prompt = render_text(modern_tokenizer, template, turns[:-1], add_generation_prompt=True)
    assert prompt.rstrip().endswith("</think>") is not is_learned  # transformers' own rendering decides it
    (found,) = Renderer.prove(modern_tokenizer, template, samples=[]).render([make_chat(turns)])
    learned = decode_learned(modern_tokenizer, found)
    assert ("</think>" in learned) is is_learned
    assert "<think>" in modern_tokenizer.decode(found.input_ids)

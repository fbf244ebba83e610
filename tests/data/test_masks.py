"""Masks against references that share no code with the kit: transformers' masks, and prefix rendering by offsets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from sftplay.data.records import Chat, Message, Source
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
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] | trim + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
UNMARKED = {
    "chatml": CHATML_PLAIN,
    "llama3": LLAMA_3,
    "gemma": GEMMA,
    "llama2": LLAMA_2,
    "phi": PHI,
    "zephyr": ZEPHYR,
}
# ChatML that drops the thinking of every turn but the last.
FORGETFUL = (
    "{% for m in messages %}{% set text = m['content'] %}{% if not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# ChatML that puts an empty thought before the last answer only, as Qwen3 does.
EMPTY_THOUGHT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONVERSATIONS = {
    "one turn": ["Why do boats carry salt?", "The hill is quiet."],
    "three turns": ["One?", "First stone.", "Two?", "Second stone.", "Three?", "Third stone."],
    "equal turns": ["Again?", "Yes.", "Again?", "Yes.", "Again?", "Yes."],
    "emoji": ["Smile 🙂👩‍👩‍👧 please", "🙂👩‍👩‍👧 é ü 你好", "more", "🎉"],
    "white space around": ["  hello \n", "\n  trimmed or not  \n", "ok ", " yes "],
    "the answer stands in the question": ["Say Yes. and Yes.", "Yes.", "Yes.", "Yes."],
}


def make_chat(texts: list[str], system: str | None = None) -> Chat:
    turns = [Message("assistant" if place % 2 else "user", text) for place, text in enumerate(texts)]
    first = [Message("system", system)] if system else []
    return Chat((*first, *turns), Source("rows.jsonl", 1))


def as_dicts(chat: Chat) -> list[dict[str, str]]:
    return [{"role": turn.role, "content": turn.content} for turn in chat.messages]


def reference(tokenizer: Any, template: str, chat: Chat) -> tuple[list[int], list[int]]:
    """Ids and labels by transformers alone: an answer reaches from the prompt's end to the end of its own rendering."""
    turns = as_dicts(chat)

    def render_text(messages: list[dict[str, str]], prompts: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=prompts
            )
        )

    spans = []
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            end = (
                render_text(turns[: index + 1]).removesuffix("</s>")
                if "<|end|>" in template
                else render_text(turns[: index + 1])
            )
            spans.append((len(render_text(turns[:index], prompts=True)), len(end.rstrip())))
    found = tokenizer(render_text(turns), add_special_tokens=False, return_offsets_mapping=True)
    labels = [
        token if any(start <= left and right <= end for start, end in spans) else -100
        for token, (left, right) in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]
    return found["input_ids"], labels


@pytest.mark.parametrize("texts", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("style", UNMARKED)
def test_masks_without_markers_are_those_of_prefix_rendering(tokenizer: Any, style: str, texts: list[str]):
    chat = make_chat(texts, system=None if style == "gemma" else "Be brief.")
    renderer = Renderer.prove(tokenizer, UNMARKED[style], samples=[chat])
    (found,) = renderer.render([chat])
    assert renderer.method == "sentinels"
    assert (found.input_ids, found.labels) == reference(tokenizer, UNMARKED[style], chat)


@pytest.mark.parametrize("texts", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_masks_by_markers_are_those_of_transformers(tokenizer: Any, texts: list[str]):
    chat = make_chat(texts, system="Be brief.")
    renderer = Renderer.prove(tokenizer, CHATML, samples=[chat])
    (found,) = renderer.render([chat])
    expected = tokenizer.apply_chat_template(
        as_dicts(chat), chat_template=CHATML, return_assistant_tokens_mask=True, return_dict=True
    )
    assert renderer.method == "markers"
    assert found.input_ids == expected["input_ids"]
    assert [label != -100 for label in found.labels] == [bool(bit) for bit in expected["assistant_masks"]]


@pytest.mark.parametrize("style", ["chatml", "llama3", "gemma", "llama2", "zephyr"])
def test_learned_text_is_the_answers_with_their_end_tokens(tokenizer: Any, style: str):
    chat = make_chat(CONVERSATIONS["three turns"])
    (found,) = Renderer.prove(tokenizer, UNMARKED[style], samples=[chat]).render([chat])
    learned = tokenizer.decode([label for label in found.labels if label != -100])
    end = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}.get(style, "</s>")
    assert learned.replace(" ", "") == "".join(f"{n}stone.{end}" for n in ("First", "Second", "Third"))


@pytest.mark.parametrize("style", UNMARKED)
def test_training_prompt_is_the_inference_prompt(tokenizer: Any, style: str):
    chat = make_chat(CONVERSATIONS["three turns"])
    renderer = Renderer.prove(tokenizer, UNMARKED[style], samples=[chat])
    (found,) = renderer.render([chat])
    for turn in (1, 3, 5):
        prompt = renderer.prompt_ids(chat.messages[:turn])
        assert found.input_ids[: len(prompt)] == prompt
        assert found.labels[len(prompt) - 1] == -100
        assert found.labels[len(prompt)] != -100


@pytest.mark.parametrize("style", ["llama3", "gemma", "llama2"])
def test_bos_is_not_doubled(tokenizer: Any, style: str):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    renderer = Renderer.prove(tokenizer, UNMARKED[style], samples=[])
    (found,) = renderer.render([make_chat(["Hi?", "Ho."])])
    assert found.input_ids.count(tokenizer.bos_token_id) == 1


def test_rendered_text_is_that_of_transformers(tokenizer: Any):
    chat = make_chat(CONVERSATIONS["emoji"])
    for template in [*UNMARKED.values(), CHATML, EMPTY_THOUGHT]:
        ours, _ = ChatTemplate(template, tokenizer.special_tokens_map).render(chat.messages)
        assert ours == tokenizer.apply_chat_template(as_dicts(chat), chat_template=template, tokenize=False)


def test_cutting_and_padding_set_in_the_tokenizer_file_are_not_applied(tokenizer: Any):
    chat = make_chat(["Why? " * 40, "Because. " * 40])
    plain = Renderer.prove(tokenizer, CHATML, samples=[]).render([chat])
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=4096)
    assert Renderer.prove(tokenizer, CHATML, samples=[]).render([chat]) == plain


def test_batches_give_the_same_as_one_by_one(tokenizer: Any):
    chats = [make_chat(texts) for texts in CONVERSATIONS.values()]
    renderer = Renderer.prove(tokenizer, LLAMA_3, samples=chats)
    assert renderer.render([]) == []
    batched = renderer.render(chats)
    assert [found.record_index for found in batched] == list(range(len(chats)))
    assert [found.input_ids for found in batched] == [renderer.render([chat])[0].input_ids for chat in chats]


def test_template_that_drops_earlier_thinking_gives_one_example_a_turn(tokenizer: Any):
    chat = make_chat(["One?", "<think>\nhm\n</think>\n\nFirst.", "Two?", "<think>\nah\n</think>\n\nSecond."])
    renderer = Renderer.prove(tokenizer, FORGETFUL, samples=[chat])
    learned = [
        tokenizer.decode([label for label in found.labels if label != -100]) for found in renderer.render([chat])
    ]
    assert learned == ["<think>\nhm\n</think>\n\nFirst.<|im_end|>", "<think>\nah\n</think>\n\nSecond.<|im_end|>"]


def test_text_that_only_the_last_turn_has_gives_one_example_a_turn(tokenizer: Any):
    chat = make_chat(["One?", "First.", "Two?", "Second."])
    renderer = Renderer.prove(tokenizer, EMPTY_THOUGHT, samples=[chat])
    first, second = renderer.render([chat])
    assert renderer.rewrites_turns
    assert (first.record_index, second.record_index) == (0, 0)
    for found, messages in ((first, chat.messages[:1]), (second, chat.messages[:3])):
        prompt = renderer.prompt_ids(messages)
        assert found.input_ids[: len(prompt)] == prompt
        assert all(label != -100 for label in found.labels[len(prompt) : -1])


def test_markers_that_leave_out_the_end_token_are_not_believed(tokenizer: Any):
    template = CHATML.replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}")
    renderer = Renderer.prove(tokenizer, template, samples=[])
    (found,) = renderer.render([make_chat(["One?", "First."])])
    assert renderer.method == "sentinels"
    assert tokenizer.decode([label for label in found.labels if label != -100]) == "First.<|im_end|>"


def test_markers_around_the_header_are_not_believed(tokenizer: Any):
    template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    renderer = Renderer.prove(tokenizer, template, samples=[])
    (found,) = renderer.render([make_chat(["One?", "First."])])
    assert tokenizer.decode([label for label in found.labels if label != -100]) == "First.<|im_end|>"


def test_texts_the_template_escapes_are_found_by_prefixes(tokenizer: Any):
    template = CHATML_PLAIN.replace("message['content']", "(message['content'] | replace(' ', '\n'))")
    renderer = Renderer.prove(tokenizer, template, samples=[])
    (found,) = renderer.render([make_chat(["One stone?", "First stone."])])
    assert renderer.method == "prefixes"
    assert tokenizer.decode([label for label in found.labels if label != -100]) == "First\nstone.<|im_end|>"


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
    sample = make_chat(["Where is the boat?", "On the hill."])
    with pytest.raises(DataError) as refusal:
        Renderer.prove(tokenizer, template, samples=[sample])
    assert reason in str(refusal.value)
    assert "sample rows.jsonl:1" in str(refusal.value)


def test_template_whose_prompt_has_other_tokens_than_training_is_refused(tokenizer: Any):
    # As in GPT-2, two line breaks are one piece at the end of a text and two pieces before a word.
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"]["ĊĊ"] = max(state["model"]["vocab"].values()) + 2
    state["model"]["merges"].append(["Ċ", "Ċ"])
    joining = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>")
    with pytest.raises(DataError, match="joins the prompt's end otherwise"):
        Renderer.prove(joining, LLAMA_3, samples=[])
    assert Renderer.prove(tokenizer, LLAMA_3, samples=[]).method == "sentinels"


def test_row_that_the_template_refuses_has_the_templates_own_reason(tokenizer: Any):
    renderer = Renderer.prove(tokenizer, GEMMA, samples=[make_chat(["Hi?", "Ho."])])
    refused, fine = renderer.render([make_chat(["Hi?", "Ho."], system="Be brief."), make_chat(["Hi?", "Ho."])])
    assert "no system role" in refused.problem
    assert refused.input_ids == []
    assert not fine.problem


def test_noncharacters_that_mark_generation_blocks_are_refused_in_a_row(tokenizer: Any):
    (found,) = Renderer.prove(tokenizer, CHATML, samples=[]).render([make_chat(["Hi \ufdd0?", "Ho \ufdd1."])])
    assert "U+FDD0" in found.problem


def test_end_tokens_are_those_the_template_writes(tokenizer: Any):
    ends = {style: Renderer.prove(tokenizer, text, samples=[]).end_token_ids for style, text in UNMARKED.items()}
    named = {style: tokenizer.convert_ids_to_tokens(ids) for style, ids in ends.items()}
    assert named["llama3"] == ["<|eot_id|>"]
    assert named["phi"] == ["<|end|>"]
    assert named["llama2"] == ["</s>"]


def test_broken_jinja_is_refused_with_its_line(tokenizer: Any):
    with pytest.raises(DataError, match="line 2"):
        Renderer.prove(tokenizer, "{% for m in messages %}\n{{ m[ }}", samples=[])


def test_tokenizer_without_a_template_is_told_how_to_go_on(tokenizer: Any):
    with pytest.raises(DataError, match=r"data\.template: chatml"):
        resolve_template("auto", tokenizer)


def test_auto_takes_the_tokenizers_own_template(tokenizer: Any):
    tokenizer.chat_template = LLAMA_3
    assert resolve_template("auto", tokenizer) == LLAMA_3


def test_chatml_is_refused_where_its_marks_are_many_tokens():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code - 33 for code in range(33, 127)}
    plain = Tokenizer(models.BPE(vocab=letters, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel()
    with pytest.raises(DataError, match=r"<\|im_start\|> is not a single token"):
        resolve_template("chatml", PreTrainedTokenizerFast(tokenizer_object=plain))


def test_template_can_be_a_file(tokenizer: Any, tmp_path: Any):
    (tmp_path / "mine.jinja").write_text(PHI, encoding="utf-8")
    assert resolve_template(str(tmp_path / "mine.jinja"), tokenizer) == PHI
    with pytest.raises(DataError, match=r"there is no file 'chatmll'"):
        resolve_template("chatmll", tokenizer)


def test_row_whose_answer_the_tokenizer_joins_with_the_prompt_is_refused(tokenizer: Any):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["model"]["vocab"][":)"] = max(state["model"]["vocab"].values()) + 2
    state["model"]["merges"].append([":", ")"])
    joining = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), bos_token="<s>")
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    renderer = Renderer.prove(joining, template, samples=[])
    plain, smiling = renderer.render([make_chat(["Why?", "So."]), make_chat(["Why?", ") So."])])
    assert not plain.problem
    assert smiling.problem == (
        "the tokenizer joins the prompt's end otherwise where ') So.</s>' follows than at inference"
    )
    assert not smiling.input_ids


def test_template_file_that_is_not_utf_8_is_refused(tokenizer: Any, tmp_path: Any):
    file = tmp_path / "chat.jinja"
    file.write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        resolve_template(str(file), tokenizer)

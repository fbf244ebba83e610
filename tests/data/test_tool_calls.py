"""Function calls are learned and their results are not: on real rows, checked against the rows themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_reference import decode_learned, render_text, shipped_templates

from sftplay.data.layouts import to_record
from sftplay.data.records import Call, Chat, Message, Source
from sftplay.data.render.render import Renderer
from sftplay.data.render.templates import CHATML
from tests.conftest import SHARED_DATA

GLAIVE = SHARED_DATA / "glaive-toolcall" / "sharegpt_toolcall_200.json"
SGD_CHATS = SHARED_DATA / "sgd-dialogues" / "tool_calls_60.jsonl"
needs_rows = pytest.mark.skipif(not (GLAIVE.exists() and SGD_CHATS.exists()), reason="needs the rows of ../shared/data")

TEMPLATES = {"chatml": CHATML, **{name: shipped_templates()[name] for name in ("qwen2_5", "qwen3", "llama3_1")}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weigh",
        "description": "Weighs a stone",
        "parameters": {"type": "object", "properties": {"stone": {"type": "string"}}},
    },
}

Row = dict[str, Any]


def real_rows() -> Iterator[tuple[Row, Chat]]:
    """Every row in OpenAI's form, with arguments as objects, and the chat that the kit reads."""
    names = {"human": "user", "gpt": "assistant", "observation": "tool"}
    for row in json.loads(GLAIVE.read_text(encoding="utf-8")):
        turns: list[Row] = []
        for turn in row["conversations"]:
            if turn["from"] == "function_call":
                turns.append({"role": "assistant", "content": "", "calls": [json.loads(turn["value"])]})
            else:
                turns.append({"role": names[turn["from"]], "content": turn["value"]})
        tools = json.loads(row["tools"] or "[]")
        given = {"messages": turns, "tools": [{"type": "function", "function": tool} for tool in tools]}
        yield given, to_record(row, Source("rows", 1))
    for line in SGD_CHATS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        turns = []
        for turn in row["messages"]:
            called = [call["function"] for call in turn.get("tool_calls") or []]
            calls = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in called]
            turns.append(
                {"role": turn["role"], "content": turn["content"] or "", **({"calls": calls} if calls else {})}
            )
        yield {"messages": turns, "tools": row["tools"]}, to_record(row, Source("rows", 1))


def said_and_called(template: str, learned: str) -> list[str | Row]:
    """What the learned text says and calls, turn by turn, read by the marks of the template's own format."""
    end = "<|eot_id|>" if template == "llama3_1" else "<|im_end|>"
    turns = learned.split(end)
    assert turns.pop() == ""
    found: list[str | Row] = []
    for turn in turns:
        text = turn.removeprefix("<think>\n\n</think>\n\n")
        if template == "llama3_1" and text.startswith('{"name": '):
            call = json.loads(text)
            found.append({"name": call["name"], "arguments": call["parameters"]})
            continue
        calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S)
        said = re.split(r"\n?<tool_call>", text)[0]
        found += [*([said] if said or not calls else []), *map(json.loads, calls)]
    return found


@needs_rows
@pytest.mark.parametrize("name", ["chatml", "llama3_1"])
def test_what_is_learned_of_real_rows_is_what_the_assistant_says_and_calls(modern_tokenizer: Any, name: str):
    rows, chats = zip(*real_rows(), strict=True)
    renderer = Renderer.prove(modern_tokenizer, TEMPLATES[name], samples=chats[:8])
    learned = [""] * len(rows)
    for example in renderer.render(chats):
        assert example.problem == ""
        learned[example.record_index] += decode_learned(modern_tokenizer, example)
    n_calls = 0
    for row, text in zip(rows, learned, strict=True):
        due: list[str | Row] = []
        for turn in row["messages"]:
            if turn["role"] == "assistant":
                content = turn["content"].strip() if name == "llama3_1" else turn["content"]
                due += [*([content] if content else []), *turn.get("calls", ())]
        assert [item.strip() if isinstance(item, str) else item for item in said_and_called(name, text)] == [
            item.strip() if isinstance(item, str) else item for item in due
        ]
        n_calls += sum(isinstance(item, dict) for item in due)
        for turn in row["messages"]:
            if turn["role"] == "tool":
                repeated = sum(isinstance(item, str) and turn["content"] in item for item in due)
                assert text.count(turn["content"]) == repeated
    assert (len(rows), n_calls) == (260, 337)  # counted with grep: 143 and 194


@needs_rows
@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_text_of_real_rows_is_that_of_transformers(modern_tokenizer: Any, name: str):
    rows, chats = zip(*list(real_rows())[::10], strict=True)
    renderer = Renderer.prove(modern_tokenizer, TEMPLATES[name], samples=[])
    for row, found in zip(rows, renderer.render(chats), strict=True):
        turns = [
            {"role": turn["role"], "content": turn["content"]}
            | ({"tool_calls": [{"function": call} for call in turn["calls"]]} if "calls" in turn else {})
            for turn in row["messages"]
        ]
        text = render_text(modern_tokenizer, TEMPLATES[name], turns, tools=row["tools"] or None)
        assert found.input_ids == modern_tokenizer(text, add_special_tokens=False)["input_ids"]


def weighing(arguments: str = '{"stone": "grey"}', said: str = "", result: str = "7 kg", n_calls: int = 1) -> Chat:
    calls = (Call("weigh", arguments, "call00001"), Call("weigh", '{"stone": "white"}', "call00002"))[:n_calls]
    turns = (
        Message("user", "How heavy is the grey one?"),
        Message("assistant", said, calls),
        *(Message("tool", result, name="weigh", call_id=call.id) for call in calls),
        Message("assistant", "Heavy."),
    )
    return Chat(turns, Source("rows.jsonl", 1), tools=json.dumps([TOOL]))


def test_chatml_writes_tools_in_the_form_of_hermes_and_qwen(modern_tokenizer: Any):
    chat = weighing(said="Let me see.", n_calls=2)
    (found,) = Renderer.prove(modern_tokenizer, CHATML, samples=[]).render([chat])
    text = modern_tokenizer.decode(found.input_ids)
    assert text == (
        "<|im_start|>system\n# Tools\n\nThese functions can be called:\n<tools>\n"
        f"{json.dumps(TOOL)}\n</tools>\n\n"
        "To call one, write its name and its arguments as one JSON object between these tags:\n"
        '<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nHow heavy is the grey one?<|im_end|>\n"
        '<|im_start|>assistant\nLet me see.\n<tool_call>\n{"name": "weigh", "arguments": {"stone": "grey"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "weigh", "arguments": {"stone": "white"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7 kg\n</tool_response>\n<tool_response>\n7 kg\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nHeavy.<|im_end|>\n"
    )
    qwen = Renderer.prove(modern_tokenizer, TEMPLATES["qwen2_5"], samples=[]).render([chat])[0]
    same = modern_tokenizer.decode(qwen.input_ids)
    first = "<|im_start|>user"  # the system turn's prose is ours
    assert text[text.index(first) :] == same[same.index(first) :]


def find_learned(tokenizer: Any, template: str, chat: Chat) -> tuple[str, str]:
    """The learned text of all examples, and the first problem."""
    found = Renderer.prove(tokenizer, template, samples=[]).render([chat])
    return decode_learned(tokenizer, *found), next((example.problem for example in found if example.problem), "")


# A template of its own for each way to lose something; the first writes all.
WHOLE = (
    "{% if tools %}{{ '<|system|>\n' }}{{ tools | tojson }}{{ '</s>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% for call in m['tool_calls'] or [] %}"
    "{{ '[' + call['function']['name'] + ' ' }}{{ call['function']['arguments'] | tojson }}{{ ']' }}{% endfor %}"
    "{{ '</s>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
LOSING = {
    "": WHOLE,
    "does not write the call of 'weigh'": WHOLE.replace("m['tool_calls'] or []", "[]"),
    "changes or drops stone='grey'": WHOLE.replace("{{ call['function']['arguments'] | tojson }}", ""),
    "changes or drops a tool's result: '7 kg'": WHOLE.replace(
        "{{ '<|' + m['role'] + '|>\n' + m['content'] }}",
        "{{ '<|' + m['role'] + '|>\n' + (m['content'] if m['role'] != 'tool' else '') }}",
    ),
    "leaves out the tool 'weigh'": WHOLE.replace("{{ tools | tojson }}", ""),
    "drops the assistant's text next to its calls: 'Let me see.'": WHOLE.replace(
        "{{ '<|' + m['role'] + '|>\n' + m['content'] }}",
        "{{ '<|' + m['role'] + '|>\n' + (m['content'] if not m['tool_calls'] else '') }}",
    ),
}


@pytest.mark.parametrize("reason", LOSING)
def test_row_of_which_the_template_loses_something_is_refused_with_what_is_lost(modern_tokenizer: Any, reason: str):
    learned, problem = find_learned(modern_tokenizer, LOSING[reason], weighing(said="Let me see."))
    assert reason in problem
    assert bool(reason) == bool(problem)
    assert learned == ("" if reason else 'Let me see.[weigh {"stone": "grey"}]</s>Heavy.</s>')


def test_values_of_every_kind_are_found_in_what_is_learned(modern_tokenizer: Any):
    arguments = '{"stone": "it\'s \\"é\\"\\n", "n": 1.50, "on": true, "no": null, "of": {"a": [1, "b\\\\c"]}, "x": {}}'
    for name in ("chatml", "qwen2_5", "qwen3", "llama3_1"):
        learned, problem = find_learned(modern_tokenizer, TEMPLATES[name], weighing(arguments))
        assert problem == ""
        (call,) = [item for item in said_and_called(name, learned) if isinstance(item, dict)]
        assert call["arguments"] == json.loads(arguments)


def test_arguments_are_given_as_text_where_a_template_wants_text(modern_tokenizer: Any):
    wants_text = WHOLE.replace(
        "{{ '[' + call['function']['name'] + ' ' }}{{ call['function']['arguments'] | tojson }}",
        "{{ '[' + call['function']['name'] + ' ' + call['function']['arguments'] }}",
    )
    prints_python = WHOLE.replace("['arguments'] | tojson", "['arguments']")
    for template in (wants_text, prints_python):
        learned, problem = find_learned(modern_tokenizer, template, weighing('{"stone":"grey"}'))
        assert (learned, problem) == ('[weigh {"stone":"grey"}]</s>Heavy.</s>', "")


def test_prompt_after_a_tools_result_is_what_training_has_before_the_answer(modern_tokenizer: Any):
    chat = weighing()
    for name, template in TEMPLATES.items():
        renderer = Renderer.prove(modern_tokenizer, template, samples=[])
        found = renderer.render([chat])
        for turn, example in ((1, found[0]), (3, found[-1])):
            prompt = renderer.prompt_ids(chat.messages[:turn], chat.tools)
            assert example.input_ids[: len(prompt)] == prompt, name
            assert example.labels[len(prompt) - 1] == -100
            assert example.labels[len(prompt)] != -100
        assert '"7 kg' not in renderer.answer_text(chat)
        assert renderer.answer_text(chat).endswith("Heavy.")


def test_calls_may_end_with_a_token_of_their_own(modern_tokenizer: Any):
    template = WHOLE.replace(
        "{{ '</s>\n' }}{% endfor %}", "{{ '<|eom_id|>' if m['tool_calls'] else '</s>' }}{% endfor %}"
    )
    renderer = Renderer.prove(modern_tokenizer, template, samples=[])
    learned, _ = find_learned(modern_tokenizer, template, weighing())
    assert learned == '[weigh {"stone": "grey"}]<|eom_id|>Heavy.</s>'
    assert modern_tokenizer.convert_ids_to_tokens(renderer.end_token_ids) == ["</s>", "<|eom_id|>"]


def test_without_an_end_token_a_last_call_ends_as_before_a_result_and_a_last_answer_as_before_the_user(
    modern_tokenizer: Any,
):
    renderer = Renderer.prove(modern_tokenizer, shipped_templates()["glm4moe"], samples=[])
    asked, called = Message("user", "Heavy?"), Message("assistant", "", (Call("weigh", '{"stone": "grey"}', "call1"),))
    answered = [asked, called, Message("tool", "7 kg", name="weigh", call_id="call1"), Message("assistant", "Yes.")]
    for turns, end in (([asked, called], "<|observation|>"), (answered, "<|user|>")):
        found = renderer.render([Chat(tuple(turns), Source("rows", 1), tools=json.dumps([TOOL]))])[-1]
        assert decode_learned(modern_tokenizer, found).endswith(end)  # both are among GLM-4.5's eos_token_id

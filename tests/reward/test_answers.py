"""Each shipped reward beside answers that try to cheat, which get nothing, and odd but right ones, which get it all."""

import json

import pytest

pytest.importorskip("jsonschema", reason="needs jsonschema: make install EXTRAS=reward")

from sftplay.reward.code_rewards import read_text
from sftplay.reward.math_rewards import solves
from sftplay.reward.text_rewards import (
    exact_match,
    fits_schema,
    has_form,
    has_length,
    is_code,
    matches,
    not_overlong,
    not_repetitive,
)

BLOCK = "```python\ndef f(x):\n    return x\n```"
PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
}

REWARDS = {
    "code_block": lambda texts: has_form(texts),
    "boxed": lambda texts: has_form(texts, form="boxed"),
    "answer_tag": lambda texts: has_form(texts, form="answer_tag"),
    "reasoning": lambda texts: has_form(texts, form="reasoning"),
    "hashes": lambda texts: has_form(texts, form="hashes"),
    "syntax": lambda texts: is_code(texts, entry_point=["f"]),
    "any_syntax": lambda texts: is_code(texts),
    "exact": lambda texts: exact_match(texts, answer=["forty two"]),
    "exact_behind_a_mark": lambda texts: exact_match(texts, answer=["42"], after="####"),
    "regex": lambda texts: matches(texts, pattern=r"(?:yes|no)\.?"),
    "schema": lambda texts: fits_schema(texts, schema=PERSON),
}

CHEATS = {
    "code_block": [
        "", "def f(x): return x", "```\ndef f(x): return x\n```", "```python\n```", BLOCK + "\n" + BLOCK,
        BLOCK + " done", "```python\ndef f(x): return x", "```java\nint f;\n```", "<think>" + BLOCK + "</think>",
        "~~~python\nx\n```",
    ],
    "boxed": ["", "42", "\\boxed{}", "\\boxed{1} \\boxed{2}", "\\boxed{1}\nand more", "\\boxed{42",
              "\\boxed{ }", "\\boxed{\\frac{1}{2}"],
    "answer_tag": [
        "", "42", "<answer></answer>", "<answer>1</answer><answer>2</answer>", "42</answer>",
        "<answer>42</answer> or 43", "</answer>42<answer>", "<ANSWER>42</ANSWER>",
        "<answer><answer>42</answer>", "<answer>" + "x " * 20_000 + "<answer>",
    ],
    "reasoning": [
        "", "42", "<think></think>42", "<think>a</think>", "a</think>42", "<think>a</think><think>b</think>42",
        "so <think>a</think>42", "<think><think>a</think></think>42", "<think>a</think><think>b",
        "<think>a</think>" + "x " * 20_000 + "</think><think>",
    ],
    "hashes": ["", "42", "####", "#### ", "#### 42\nmore", "#### 1\n#### 2", "### 42", "####\n42", "#### #### 42"],
    "syntax": [
        "", "```python\ndef g(x): return x\n```", "```python\ndef f(x) return x\n```",
        "```python\n# def f(x): pass\n```", "```python\nclass A:\n    def f(self): pass\n```",
        "```python\nif True:\n    def f(x): pass\n```", "```python\ndef f(x):\n```",
        "<think>" + BLOCK + "</think> done", "```python\n" + "(" * 5000 + "\n```",
        "```python\ndef f(x): pass\x00\n```",
    ],
    "any_syntax": ["", "no code at all", "```python\n1 +\n```"],
    "exact": [
        "", "forty two or forty three", "the answer is forty two", "Forty two", "forty  two", "forty two.",
        "<think>forty two</think>",
    ],
    "exact_behind_a_mark": [
        "", "42", "#### 43", "#### 42 or 43", "#### 42 #### 43", "####", "#### 42\nno: 43", "<think>#### 42</think>",
    ],
    "regex": ["", "yes no", "yes or no", "yesno", "YES.", "yes..", "<think>yes</think>"],
    "schema": [
        "", "{}", '{"name": "A"}', '{"name": "A", "age": "3"}', '{"name": "A", "age": -1}',
        '{"name": "A", "age": NaN}', '{"name": "A", "age": 3, "age": 4}',
        '{"name": "A", "age": 3} {"name": "B", "age": 4}', '{"name": "A", "age": 3, "more": 1}',
        '"{\\"name\\": \\"A\\", \\"age\\": 3}"', '{"name": "", "age": 3}', 'Here: {"name": "A", "age": 3}',
        '{"name": "A", "age": 1e999}', "[" * 100_000, '{"name": "A", "age": true}',
    ],
}  # fmt: skip

RIGHT = {
    "code_block": [
        BLOCK, "Here:\n" + BLOCK, "```py\nx = 1\n```", "~~~python\nx = 1\n~~~", "````python\n'''```'''\n````",
        "```Python\nx = 1\n```", "<think>```python\nx\n```</think>" + BLOCK, "```python title=a\nx = 1\n```",
    ],
    "boxed": [
        "\\boxed{42}", "So \\boxed{42}.", "$\\boxed{\\frac{1}{2}}$", "\\boxed{x^2}", "\\[\\boxed{42}\\]",
        "\\boxed{42 \\text{ cm}}",
    ],
    "answer_tag": [
        "<answer>42</answer>", "<answer>\n42\n</answer>", "<think>a</think><answer>42</answer>",
        "<answer>a < b</answer>", "a\nb\n<answer>c</answer>",
    ],
    "reasoning": ["<think>a</think>42", " <think>a</think>42", "<think>a\nb</think>\n42", "<think>`x`</think>```y```"],
    "hashes": ["#### 42", "####42", "#### $1,000", "a #### 42", "####\t42"],
    "syntax": [
        BLOCK, "def f(x): return x", "```\ndef f(x): return x\n```", "```python\ndef f(x): return x",
        "```python\nf = lambda x: x\n```", "```python\nasync def f(x): pass\n```", "```python\nclass f: pass\n```",
        "```python\nfrom math import floor as f\n```", "<think>hm</think>" + BLOCK,
    ],
    "any_syntax": [BLOCK, "```python\nx = 1\n```"],
    "exact": [
        "forty two", "<think>a</think>forty two", "<think>forty</think>\nforty two\n", "\xa0forty two",
        "<think></think>forty two",
    ],
    "exact_behind_a_mark": [
        "#### 42", "####42", "6*7\n#### 42", "#### 41 #### 42", "####\n42", "<think>#### 41</think>#### 42",
    ],
    "regex": ["yes", "no", "yes.", "no.", " yes ", "\nno", "<think>no</think>yes"],
    "schema": [
        '{"name": "A", "age": 3}', ' {"name":"A","age":3} ', '```json\n{"name": "A", "age": 3}\n```',
        '<think>{}</think>{"name": "A", "age": 3}', '{"name": "\\u00e9", "age": 3}', '{"name": "A", "age": 3.0}',
    ],
}  # fmt: skip


def pay(reward, answers):
    return {answer: REWARDS[reward]([answer])[0] for answer in answers}


@pytest.mark.parametrize("reward", CHEATS)
def test_an_answer_that_cheats_gets_nothing(reward):
    assert pay(reward, CHEATS[reward]) == dict.fromkeys(CHEATS[reward], 0)


@pytest.mark.parametrize("reward", RIGHT)
def test_an_odd_but_right_answer_gets_all(reward):
    assert pay(reward, RIGHT[reward]) == dict.fromkeys(RIGHT[reward], 1)


def test_the_penalty_for_length_is_the_line_of_its_paper():
    # DAPO, eq. 13, with most 10 and soft 4: free up to 6, then a quarter a token
    texts = [" ".join("a" * n) for n in (1, 6, 7, 8, 9, 10, 11, 50)]
    assert not_overlong(texts, most=10, soft=4) == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert not_overlong(["x", "x"], most=10, soft=0, completion_ids=[[0] * 10, [0] * 11]) == [0, -1]


def test_words_or_tokens_and_repeated_runs_are_counted():
    assert has_length(["a b c", "don't", "a-b-c-d", "a\nb\nc\nd", " "], most=3) == [1, 1, 1, 0, 0]
    assert has_length(["one", "one"], most=3, completion_ids=[[5, 6, 7], [5, 6, 7, 8]]) == [1, 0]
    # runs of two: ab ba ab ba ab, of which three came before
    assert not_repetitive(["a b a b a b", "a b c d", "", "A b a B"], words=2) == [-0.6, 0, 0, pytest.approx(-1 / 3)]


def test_a_chat_s_completion_is_its_last_message():
    messages = [{"role": "assistant", "content": "17"}, {"role": "assistant", "content": "#### 18"}]
    assert read_text(messages) == "#### 18"
    assert solves([messages], answer=["18"]) == [1.0]
    assert read_text([]) == read_text([{"role": "assistant", "content": None}]) == ""


def test_a_schema_may_be_text():
    assert fits_schema(["3", '"a"'], schema=json.dumps({"type": "integer"})) == [1, 0]

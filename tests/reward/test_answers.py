"""Each shipped reward beside answers that try to cheat, which get nothing, and odd but right ones, which get it all."""

import json

import pytest

pytest.importorskip("jsonschema", reason="needs jsonschema: make install EXTRAS=reward")

from sftplay.reward.code_answer import read_text
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


def code_block(text):
    return has_form([text])[0]


def boxed(text):
    return has_form([text], form="boxed")[0]


def answer_tag(text):
    return has_form([text], form="answer_tag")[0]


def reasoning(text):
    return has_form([text], form="reasoning")[0]


def hashes(text):
    return has_form([text], form="hashes")[0]


def syntax(text):
    return is_code([text], entry_point=["f"])[0]


def exact(text):
    return exact_match([text], answer=["forty two"])[0]


def exact_behind_a_mark(text):
    return exact_match([text], answer=["42"], after="####")[0]


def regex(text):
    return matches([text], pattern=r"(?:yes|no)\.?")[0]


def schema(text):
    return fits_schema([text], schema=PERSON)[0]


def math(text):
    return solves([text], answer=["... so 9 * 2 = $<<9*2=18>>18 ####  18"])[0]


def length(text):
    return has_length([text], most=3)[0]


def overlong(text):
    return 1 + not_overlong([text], most=6, soft=3)[0]


def repetition(text):
    return float(not_repetitive([text], words=2)[0] == 0)


CHEATS = {
    overlong: [
        "a " * 6,
        "a b c d e f g",
        "42 " + "so " * 5,
        "\n".join("abcdef"),
        "\t".join("abcdefgh"),
        "a\u00a0b\u00a0c\u00a0d\u00a0e\u00a0f",
        "a\u3000b\u3000c\u3000d\u3000e\u3000f",
        "a\vb\fc\vd\fe\vf",
        ". . . . . .",
        "<think> a b c d e f </think> 42",
        "word " * 1000,
    ],
    code_block: [
        "",
        "def f(x): return x",
        "```\ndef f(x): return x\n```",
        "```python\n```",
        BLOCK + "\n" + BLOCK,
        BLOCK + " done",
        "```python\ndef f(x): return x",
        "```java\nint f;\n```",
        "`python def f(x)`",
        "<think>" + BLOCK + "</think>",
        "~~~python\nx\n```",
        BLOCK + "\n```python\n```",
    ],
    boxed: [
        "",
        "42",
        "\\boxed{}",
        "\\boxed{1} \\boxed{2}",
        "\\boxed{1}\nand more",
        "boxed{42}",
        "\\boxed 42",
        "\\boxed{42",
        "\\boxed{1}\n\\boxed{1}",
        "\\boxed{1}\n\nSo it is.",
        "$\\box{42}$",
    ],
    answer_tag: [
        "",
        "42",
        "<answer></answer>",
        "<answer> </answer>",
        "<answer>1</answer><answer>2</answer>",
        "<answer>42",
        "42</answer>",
        "<answer>42</answer> or 43",
        "</answer>42<answer>",
        "<ANSWER>42</ANSWER>",
        "<answer><answer>42</answer></answer>",
    ],
    reasoning: [
        "",
        "42",
        "<think></think>42",
        "<think>a</think>",
        "<think>a</think>  ",
        "a</think>42",
        "<think>a 42",
        "<think>a</think><think>b</think>42",
        "42<think>a</think>",
        "so <think>a</think>42",
        "<think><think>a</think></think>42",
    ],
    hashes: [
        "",
        "42",
        "####",
        "#### ",
        "#### 42\nmore",
        "#### 1\n#### 2",
        "### 42",
        "##### 42",
        "####\n42",
        "#### 42 # 43",
        "#### #### 42",
    ],
    syntax: [
        "",
        "f",
        "```python\ndef g(x): return x\n```",
        "```python\ndef f(x) return x\n```",
        "```python\n# def f(x): pass\n```",
        "```python\n'def f(x): pass'\n```",
        "```python\nclass A:\n    def f(self): pass\n```",
        "```python\nif True:\n    def f(x): pass\n```",
        "```python\ndef f(x):\n```",
        "I would define f(x).",
        "<think>" + BLOCK + "</think> done",
        "```python\n" + "(" * 5000 + "\n```",
        "```python\ndef f(x): pass\0\n```",
    ],
    exact: [
        "",
        "forty",
        "forty two forty two",
        "forty two or forty three",
        "the answer is forty two",
        "Forty two",
        "forty  two",
        "forty two.",
        "'forty two'",
        "<think>forty two</think>",
        "forty\ntwo",
        "42",
    ],
    exact_behind_a_mark: [
        "",
        "42",
        "#### 43",
        "#### 42 or 43",
        "#### 42 #### 43",
        "### 42",
        "####",
        "#### 42.0",
        "#### 42\nno: 43",
        "<think>#### 42</think>",
        "42 ####",
    ],
    regex: [
        "",
        "yes no",
        "yes or no",
        "yesno",
        "Yes",
        "YES.",
        "yes!",
        "yes..",
        "maybe",
        "<think>yes</think>",
        "yes\nno",
    ],
    schema: [
        "",
        "{}",
        '{"name": "A"}',
        '{"name": "A", "age": "3"}',
        '{"name": "A", "age": -1}',
        '{"name": "A", "age": NaN}',
        '{"name": "A", "age": 3, "age": 4}',
        '{"name": "A", "age": 3} {"name": "B", "age": 4}',
        '{"name": "A", "age": 3, "more": 1}',
        '[{"name": "A", "age": 3}]',
        '"{\\"name\\": \\"A\\", \\"age\\": 3}"',
        "{'name': 'A', 'age': 3}",
        '{"name": "", "age": 3}',
        '{"name": "A", "age": 3.5}',
        'Here: {"name": "A", "age": 3}',
        '{"name": "A", "age": 1e999}',
        "[" * 100_000,
        '{"name": "A", "age": true}',
    ],
    math: [
        "",
        "18",
        "I think 18",
        "\\boxed{17}",
        "\\boxed{18 or 17}",
        "\\boxed{17, 18}",
        "\\boxed{9*2}",
        "\\boxed{9+9}",
        "\\boxed{18} \\boxed{17}",
        "#### 18\n#### 17",
        "\\boxed{}",
        "\\boxed{x}",
        "\\boxed{18x}",
        "\\boxed{-18}",
        "\\boxed{1.8}",
        "\\boxed{nan}",
        "\\boxed{\\infty}",
        "\\boxed{18 not 17}",
        "\\boxed{[17, 19]}",
        "\\boxed{18 19}",
        "\\boxed{1" + "8" * 600 + "}",
        "The answer is 17 or 18",
        "<think>\\boxed{18}</think>",
        "\\boxed{18^{1}}",
        "\\boxed{18",
        "\\boxed{36/2+0}",
        "\\boxed{18\\%}",
    ],
    length: ["", "a b c d", "a " * 50, "a\nb\nc\nd", "a\tb\tc\td", " ", "\n", "1 2 3 4", "a b c d e f", "\u3000"],
    repetition: [
        "a b a b",
        "x x x",
        "go on go on",
        "A b a B",
        "1 2 3 1 2",
        "a b\na b",
        "the cat the cat sat",
        "no no no no",
        "a  b a   b",
        "so it is so it goes",
    ],
}

RIGHT = {
    code_block: [
        BLOCK,
        "Here:\n" + BLOCK,
        BLOCK + "\n\n",
        "```py\nx = 1\n```",
        "```python3\nx = 1\n```",
        "~~~python\nx = 1\n~~~",
        "````python\n'''```'''\n````",
        "```Python\nx = 1\n```",
        "<think>```python\nx\n```</think>" + BLOCK,
        "```python title=a\nx = 1\n```",
        "text with `code`\n" + BLOCK,
    ],
    boxed: [
        "\\boxed{42}",
        "So \\boxed{42}.",
        "$\\boxed{\\frac{1}{2}}$",
        "a\nb\n\\boxed{42}",
        "\\boxed{42}\n",
        "\\boxed{x^2}",
        "\\[\\boxed{42}\\]",
        "\\boxed{ 42 }",
        "\\boxed{42 \\text{ cm}}",
        "\\boxed{{1,2}}",
    ],
    answer_tag: [
        "<answer>42</answer>",
        "so <answer>42</answer>",
        "<answer> 42 </answer>\n",
        "<answer>\n42\n</answer>",
        "<think>a</think><answer>42</answer>",
        "<answer>a < b</answer>",
        "<answer>x</answer>   ",
        "a\nb\n<answer>c</answer>",
        "<answer>0</answer>",
        "<b>x</b><answer>42</answer>",
    ],
    reasoning: [
        "<think>a</think>42",
        " <think>a</think>42",
        "<think>a\nb</think>\n42",
        "<think>a</think> 42 ",
        "<think>1<2</think>3",
        "<think>a</think>\n\n42\n",
        "<think>?</think>!",
        "<think> x </think>y",
        "<think>a</think>a b c",
        "<think>`x`</think>```y```",
    ],
    hashes: [
        "#### 42",
        "a\n#### 42",
        "####42",
        "#### 42\n",
        "#### 4 2",
        "#### $1,000",
        "#### -3",
        "a #### 42",
        "####\t42",
        "a\n\nb\n#### x",
    ],
    syntax: [
        BLOCK,
        "def f(x): return x",
        "```\ndef f(x): return x\n```",
        "```python\ndef f(x): return x",
        "```python\nf = lambda x: x\n```",
        "```python\nasync def f(x): pass\n```",
        "```python\nclass f: pass\n```",
        "```python\nfrom math import floor as f\n```",
        BLOCK + "\nand so\n```python\nprint(f(1))\n```",
        "<think>hm</think>" + BLOCK,
        "~~~py\ndef f(x): pass\n~~~",
    ],
    exact: [
        "forty two",
        " forty two",
        "forty two\n",
        "\tforty two ",
        "\n\nforty two",
        "<think>a</think>forty two",
        "<think>forty</think>\nforty two\n",
        "forty two\r\n",
        "\u00a0forty two",
        "<think></think>forty two",
    ],
    exact_behind_a_mark: [
        "#### 42",
        "####42",
        "6*7\n#### 42",
        "#### 41 #### 42",
        "a #### 42 ",
        "#### 42\n",
        "####\n42",
        "####\t42",
        "<think>#### 41</think>#### 42",
        "so #### 42",
    ],
    regex: ["yes", "no", "yes.", "no.", " yes ", "yes\n", "\nno", "<think>no</think>yes", "\tyes.", "no.\n\n"],
    schema: [
        '{"name": "A", "age": 3}',
        ' {"name":"A","age":3} ',
        '{"age": 0, "name": "B"}',
        '```json\n{"name": "A", "age": 3}\n```',
        '```\n{"name": "A", "age": 3}\n```',
        '<think>{}</think>{"name": "A", "age": 3}',
        '{"name": "\\u00e9", "age": 3}',
        '{\n  "name": "A",\n  "age": 3\n}',
        '{"name": "A", "age": 3.0}',
        '{"name": "or", "age": 30}',
    ],
    math: [
        "\\boxed{18}",
        "#### 18",
        "The answer is 18.",
        "answer: $18",
        "\\boxed{18.0}",
        "\\boxed{\\$18}",
        "\\boxed{18 dollars}",
        "\\boxed{17} no, \\boxed{18}",
        "\\boxed{36/2}",
        "\\boxed{\\frac{36}{2}}",
        "\\boxed{x = 18}",
        "#### $18.00",
        "\\boxed{18\\text{ eggs}}",
        "$$\\boxed{ 18 }$$",
        "\\fbox{18}",
        "<think>17</think>The answer is **18**.",
        "\\boxed{1.8 \\times 10^1}",
        "\\boxed{018}",
        "\\boxed{+18}",
    ],
    length: ["a", "a b c", "a\nb", "42", "don't", " a ", "a-b-c-d", "a\tb", "```x```", "\u00e9"],
    overlong: [
        "",
        "a",
        "a b c",
        "a\nb\nc",
        "  a  b  ",
        "42",
        "don't stop",
        "a-b-c-d-e-f-g",
        "```x```",
        "\u00e9 \u00e9",
        "1.\t2.",
    ],
    repetition: ["", "a", "a b", "a b c d", "a a", "b a a c", "one two three four", "A B C", "1 2 3", "x\ny\nz"],
}


@pytest.mark.parametrize(("reward", "answer"), [(reward, each) for reward, all_ in CHEATS.items() for each in all_])
def test_an_answer_that_cheats_gets_nothing(reward, answer):
    assert reward(answer) == 0


@pytest.mark.parametrize(("reward", "answer"), [(reward, each) for reward, all_ in RIGHT.items() for each in all_])
def test_an_odd_but_right_answer_gets_all(reward, answer):
    assert reward(answer) == 1


def test_each_reward_is_tried_with_ten_answers_of_either_kind():
    assert CHEATS.keys() == RIGHT.keys()
    assert min(len(set(answers)) for table in (CHEATS, RIGHT) for answers in table.values()) >= 10


def test_the_penalty_for_length_is_the_line_of_its_paper():
    # DAPO, eq. 13, with most 10 and soft 4: free up to 6, then a quarter a token
    texts = [" ".join("a" * n) for n in (1, 6, 7, 8, 9, 10, 11, 50)]
    assert not_overlong(texts, most=10, soft=4) == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert not_overlong(["x", "x"], most=10, soft=0, completion_ids=[[0] * 10, [0] * 11]) == [0, -1]


def test_repetition_counts_the_runs_that_came_before():
    # runs of two: ab ba ab ba ab, of which three came before
    assert not_repetitive(["a b a b a b"], words=2) == [-0.6]


def test_tokens_are_counted_where_their_ids_are_known():
    assert has_length(["one", "one"], most=3, completion_ids=[[5, 6, 7], [5, 6, 7, 8]]) == [1, 0]


def test_a_chat_s_completion_is_its_last_message():
    messages = [{"role": "assistant", "content": "17"}, {"role": "assistant", "content": "#### 18"}]
    assert read_text(messages) == "#### 18"
    assert solves([messages], answer=["18"]) == [1.0]
    assert read_text([]) == read_text([{"role": "assistant", "content": None}]) == ""


def test_a_schema_may_differ_by_row_and_be_text():
    schemas = [json.dumps({"type": "integer"}), {"type": "string"}]
    assert fits_schema(["3", '"a"'], schema=schemas) == [1, 1]
    assert fits_schema(['"a"', "3"], schema=schemas) == [0, 0]

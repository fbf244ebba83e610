"""The reward code_tests: right programs in the forms that chats have get all, wrong ones and cheats get nothing."""

import ast

import pytest
from patience import PATIENT_BOX
from processes import HANG_S

from sftplay.config.run import RunConfig
from sftplay.reward.code_rewards import LONGEST_CODE, find_code, is_program
from sftplay.reward.reward_set import RewardSet
from sftplay.sandbox.pool import SAFE, find_problem

needs_boxes = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

TESTED = {"name": "tests", "use": "code_tests", "deadline": HANG_S}
TESTS = ["assert add(1, 2) == 3", "assert add(-4, 4) == 0", "assert add([1], [2]) == [1, 2]"]

ADD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
HELPED = "def add(a, b):\n    return plus(a, b)\n"
PLUS = "def plus(a, b):\n    return a + b\n"
METHOD = "class Solution:\n    def f(self):\n        pass\n"


def block(code, label="python", fence="```"):
    return f"{fence}{label}\n{code}{fence}"


def shift(text, by="    "):
    return "".join(by + line for line in text.splitlines(keepends=True))


CHEATS = [
    "",
    "import os\nos._exit(0)",
    "def add(*args): raise SystemExit(0)",
    "def add(a, b): print('all tests passed')",
    "class Any(int):\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n"
    "def add(a, b): return Any(41)",
    "import builtins\nbuiltins.AssertionError = type('Other', (BaseException,), {})\ndef add(a, b): return 41",
    "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 41",
    "def add(a, b):\n    import sys\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals.update(passed=3)\n        frame = frame.f_back\n    return 41",
    'def add(a, b):\n    import os\n    for fd in range(3, 20):\n        try: os.write(fd, b\'{"status": "ok"}\')\n'
    "        except OSError: pass\n    return 41",
    "add = 3",
    ADD + "del add\n",
]
"""As the program of a block; none of them adds."""

RIGHT = [
    # fences in odd places
    "1. Write it:\n\n" + shift(block(ADD), "   ") + "\n2. Run it.",
    "- ```python\n  def add(a, b):\n      return a + b\n  ```",
    "```python\ndef add(a, b):\n    return a + b```\nThis adds both.",
    "```python\ndef add(a, b):\n    return a + b\n``` Hope this helps!",
    "Here is the code: ```python\ndef add(a, b):\n    return a + b\n```",
    "> Here it is:\n>\n> ```python\n> def add(a, b):\n>     return a + b\n> ```",
    block(ADD, fence="~~~"),
    block(ADD).replace("\n", "\r\n"),
    block(shift(ADD)),
    # labels
    *(block(ADD, label) for label in ("python3.11", "ipython", "text", "Python", "{.python}", "solution.py", "")),
    block(ADD, 'python title="add.py"'),
    # sessions
    block(">>> def add(a, b):\n...     return a + b\n...\n>>> add(1, 2)\n3\n"),
    block("In [1]: def add(a, b):\n   ...:     return a + b\n   ...:\n\nIn [2]: add(1, 2)\nOut[2]: 3\n", "ipython"),
    ">>> def add(a, b):\n...     return a + b\n>>> add(1, 2)\n3",
    block("%matplotlib inline\n" + ADD),
    # several blocks
    "The helper:\n" + block(PLUS) + "\nand with it:\n" + block(HELPED),
    "The solution:\n" + block(HELPED) + "\nIt needs:\n" + block(PLUS),
    block("import operator\n") + "\nthen\n" + block("def add(a, b):\n    return operator.add(a, b)\n"),
    block(ADD) + "\nUsage:\n" + block("from solution import add\nprint(add(1, 2))\n"),
    block(BAD) + "\nThat subtracts. Mended:\n" + block(ADD),
    block("pip install nothing\n", "bash") + "\n" + block(ADD),
    "In JavaScript:\n" + block("const add = (a, b) => a + b\n", "js") + "\nIn Python:\n" + block(ADD),
    # fences within
    block('def add(a, b):\n    """Add.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b\n'),
    block("# ``` is no fence here\n" + ADD),
    # without a fence
    "Here is the code:\n\n" + ADD + "\nIt adds the two numbers.",
    "Here is the code:\n\n" + shift(ADD),
    "Here is the code:\n\n" + shift(ADD) + "\nIt adds the two numbers.",
    "Solution: def add(a, b): return a + b",
    "Use `add = lambda a, b: a + b`.",
    "First import what is needed.\n\nimport operator\n\ndef add(a, b):\n    return operator.add(a, b)\n\nThat is all.",
    "As a class:\n\nclass Solution:\n    def add(self, a, b):\n        return a + b\n\nIt adds the two numbers.",
    "[PYTHON]\n" + ADD + "[/PYTHON]",
    # the rest
    "<think>Maybe\n" + block(BAD) + "\nno.</think>\n" + block(ADD),
    block("class Solution:\n    def add(self, a, b):\n        return a + b\n"),
    block(ADD + "if __name__ == '__main__': raise SystemExit\n"),
    block("import sys, warnings\nwarnings.warn('odd')\nsys.stderr.write('x')\n" + ADD),
    "```python\n" + ADD + "\ndef main():\n    print(add(1,",
]

WRONG = [
    "I cannot help with that.",
    # programs that do something else
    block(BAD),
    block("def add(a, b):\n    print(a + b)\n"),
    block("def add(a, b):\n    return a + c\n"),
    block("def add(a, b):\n    yield a + b\n"),
    block("async def add(a, b):\n    return a + b\n"),
    # another name, another place
    block("'''\ndef add(a, b):\n    return a + b\n'''\n"),
    block(HELPED),
    # no Python
    block("def add(a, b):\n    return (a + b\n"),
    block(ADD + "This adds both numbers.\n"),
    "```python\ndef add(a, b):\n    total = a + b\n    return (",
    block(ADD, "java"),
    # taken back, or only thought
    "<think>" + block(ADD) + "</think>" + block(BAD),
    block(ADD) + "\nNo, better:\n" + block(BAD),
    ADD + "\nThat is wrong. Rather:\n\n" + BAD,
    # leaving
    block("import sys\nsys.exit(0)\n" + ADD),
]


def score(answers, box=PATIENT_BOX, shown=None):
    content = {"model": {"name": "builtin:tiny"}, "rewards": [TESTED], "sandbox": box}
    columns = {"tests": [TESTS] * len(answers), "entry_point": ["add"] * len(answers)}
    with RewardSet(RunConfig.model_validate(content)) as rewards:
        return rewards.score(answers, columns | {"shown": shown or [1] * len(answers)})


@pytest.fixture(scope="module")
def values():
    answers = [*RIGHT, *WRONG, *map(block, CHEATS)]
    return dict(zip(answers, score(answers).by_name["tests"].values, strict=True))


@needs_boxes
def test_a_right_program_is_paid_in_whatever_form_it_is_written(values):
    assert [answer for answer in RIGHT if values[answer] != 1] == []


@needs_boxes
def test_a_wrong_program_is_paid_in_no_form(values):
    assert [answer for answer in WRONG if values[answer] != 0] == []


@needs_boxes
def test_programs_that_cheat_get_nothing(values):
    assert [program for program in CHEATS if values[block(program)] != 0] == []
    loops = score([block("def add(a, b):\n    while True: pass\n")], {"timeout": 2.0, "test_timeout": 1.5})
    assert loops.by_name["tests"].values == [0.0]


@needs_boxes
def test_a_verdict_says_whether_all_tests_that_the_question_hides_are_passed():
    answers = [
        "def add(a, b): return a + b",
        "def add(a, b): return a + b if b != 2 else 0",
        "def add(a, b): return 3",
        "?",
    ]
    scored = score([*answers, answers[0]], shown=[1, 1, 1, 1, 3])
    assert [each["hidden_pass"] for each in scored.verdicts if each] == [True, True, False, False, None]
    assert scored.by_name["tests"].values == [1.0, pytest.approx(0.8), pytest.approx(0.2), 0.0, 1.0]


@needs_boxes
def test_a_row_without_tests_says_nothing_of_a_program():
    content = {"model": {"name": "builtin:tiny"}, "rewards": [TESTED]}
    with RewardSet(RunConfig.model_validate(content)) as rewards:
        found = rewards.score([block(ADD)] * 2, {"tests": [None, []]}).by_name["tests"]
    assert (found.values, found.reasons) == ([None, None], ["a row has no tests"])


@pytest.mark.parametrize(
    ("text", "how"),
    [
        (block(ADD), "labelled"),
        (block(ADD, ""), "unlabelled"),
        ("```python\n" + ADD, "unclosed"),
        (ADD, "whole_text"),
        ("no code", "none"),
        (block("x" * (LONGEST_CODE + 1) + "\n"), "none"),
    ],
)
def test_an_answer_says_how_its_program_was_found(text, how):
    found = find_code(text, "add")
    assert (found.code, found.how) == ("" if how == "none" else ADD, how)


@pytest.mark.parametrize(
    ("blocks", "program"),
    [
        (["A = 2\n", "B = A + 1\n", "def f():\n    return B\n"], "A = 2\nB = A + 1\ndef f():\n    return B\n"),
        (["total = 9\n", "def f():\n    total = 1\n    return total\n"], "def f():\n    total = 1\n    return total\n"),
        (["def f():\n    return 1\n", "from solution import f\nprint(f())\n"], "def f():\n    return 1\n"),
        (
            ["from math import gcd as f\n", "class Solution:\n    def f(self):\n        pass\n"],
            "from math import gcd as f\n",
        ),
    ],
    ids=["what others need first", "its own names stay", "defined, not imported", "imported, not a method"],
)
def test_a_program_of_several_blocks_is_the_best_one_with_what_it_lacks(blocks, program):
    assert find_code("\n".join(map(block, blocks)), "f").code.strip() == program.strip()


@pytest.mark.parametrize("code", ["(" * 10_000, "-" * 100_000 + "1", "x = " + "9" * 50_000, "\0", "def"])
def test_text_that_the_parser_cannot_take_is_no_program(code):
    assert not is_program(code, "f")


@pytest.mark.parametrize("many", ["```python\n", "```python\nx(\n```\n", "x = (\n", "def f(:\n", "a = 1\nb b\n"])
def test_the_parser_is_asked_a_bounded_number_of_times(many, monkeypatch):
    asked, parse = [], ast.parse
    with monkeypatch.context() as patched:
        patched.setattr(ast, "parse", lambda code, **named: asked.append(code) or parse(code, **named))
        find_code(many * 200, "f")
    assert len(asked) < 8_000

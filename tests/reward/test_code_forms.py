"""Sixty right answers in the forms that chats have, which get all, and sixty wrong ones, which get nothing."""

import pytest
from patience import PATIENT_BOX
from processes import HANG_S

from sftplay.config.run import RunConfig
from sftplay.reward.reward_set import RewardSet
from sftplay.sandbox.choose import SAFE, find_problem

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

TESTS = ["assert add(1, 2) == 3", "assert add(-4, 4) == 0", "assert add(7, 7) == 14"]

ADD = "def add(a, b):\n    return a + b\n"
BAD = "def add(a, b):\n    return a - b\n"
HELPED = "def add(a, b):\n    return plus(a, b)\n"
PLUS = "def plus(a, b):\n    return a + b\n"


def block(code, label="python", fence="```"):
    return f"{fence}{label}\n{code}{fence}"


def shift(text, by="    "):
    return "".join(by + line for line in text.splitlines(keepends=True))


RIGHT = [
    # fences in odd places
    "1. Write it:\n\n" + shift(block(ADD), "   ") + "\n2. Run it.",
    "- The function:\n  " + shift(block(ADD), "  ").strip() + "\n- Done",
    "- ```python\n  def add(a, b):\n      return a + b\n  ```",
    "1. ```python\n   def add(a, b):\n       return a + b\n   ```",
    "Sure!\n```python\ndef add(a, b):\n    return a + b```",
    "```python\ndef add(a, b):\n    return a + b```\nThis adds both.",
    "```python\ndef add(a, b):\n    return a + b\n``` Hope this helps!",
    "Here is the code: ```python\ndef add(a, b):\n    return a + b\n```",
    "> Here it is:\n>\n> ```python\n> def add(a, b):\n>     return a + b\n> ```",
    ">```python\n>def add(a, b):\n>    return a + b\n>```",
    "> > ```python\n> > def add(a, b):\n> >     return a + b\n> > ```",
    shift(block(ADD), "\t"),
    block(ADD, fence="~~~"),
    block(ADD, fence="````"),
    block(ADD).replace("\n", "\r\n"),
    block(ADD.replace("    ", "\t")),
    block(shift(ADD)),
    "```python\n\n\n" + ADD + "\n\n```",
    # labels
    block(ADD, "python3.11"),
    block(ADD, "ipython"),
    block(ADD, "text"),
    block(ADD, "Python"),
    block(ADD, "py3"),
    block(ADD, "{.python}"),
    block(ADD, 'python title="add.py"'),
    block(ADD, "solution.py"),
    block(ADD, "ipython3"),
    block(ADD, "plaintext"),
    block(ADD, ""),
    "**python**\n\n" + block(ADD, ""),
    # sessions
    block(">>> def add(a, b):\n...     return a + b\n...\n>>> add(1, 2)\n3\n"),
    block(">>> def add(a, b):\n...     return a + b\n", "pycon"),
    block("In [1]: def add(a, b):\n   ...:     return a + b\n   ...:\n\nIn [2]: add(1, 2)\nOut[2]: 3\n", "ipython"),
    ">>> def add(a, b):\n...     return a + b\n>>> add(1, 2)\n3",
    block("%matplotlib inline\n" + ADD),
    # several blocks
    "The helper:\n" + block(PLUS) + "\nand with it:\n" + block(HELPED),
    "The solution:\n" + block(HELPED) + "\nIt needs:\n" + block(PLUS),
    block("import operator\n") + "\nthen\n" + block("def add(a, b):\n    return operator.add(a, b)\n"),
    block(ADD) + "\nOutput of `add(1, 2)`:\n" + block("3\n", ""),
    block(ADD) + "\nUsage:\n" + block("from solution import add\nprint(add(1, 2))\n"),
    block(ADD) + "\nTests:\n" + block("def test_add():\n    assert add(1, 2) == 3\n"),
    block(BAD) + "\nThat subtracts. Mended:\n" + block(ADD),
    block(ADD) + "\nRun it:\n" + block("python add.py\n", "bash"),
    block("pip install nothing\n", "bash") + "\n" + block(ADD),
    block("x = 1 +\n") + "\n" + block(ADD),
    "In JavaScript:\n" + block("const add = (a, b) => a + b\n", "js") + "\nIn Python:\n" + block(ADD),
    # fences within
    block('def add(a, b):\n    """Add.\n\n    ```python\n    add(1, 2)\n    ```\n    """\n    return a + b\n'),
    block('def add(a, b):\n    """Add.\n\n```\nadd(1, 2)\n```\n"""\n    return a + b\n'),
    block("# ``` is no fence here\n" + ADD),
    # without a fence
    "Here is the code:\n\n" + ADD + "\nIt adds the two numbers.",
    "Here is the code:\n\n" + shift(ADD),
    "Solution: def add(a, b): return a + b",
    "Use `add = lambda a, b: a + b`.",
    "First import what is needed.\n\nimport operator\n\ndef add(a, b):\n    return operator.add(a, b)\n\nThat is all.",
    "<answer>\n" + ADD + "</answer>",
    "[PYTHON]\n" + ADD + "[/PYTHON]",
    "We write a helper first:\n\n" + PLUS + "\nThen the function itself:\n\n" + HELPED + "\nDone.",
    # the rest
    "<think>Maybe\n" + block(BAD) + "\nno.</think>\n" + block(ADD),
    block("class Solution:\n    def add(self, a, b):\n        return a + b\n"),
    "```python\n" + ADD + "\ndef main():\n    print(add(1,",
    "```python\n" + ADD,
    "### Solution\n\n**Code:**\n" + block(ADD) + "\n\n### Complexity\n\n- Time: O(1)",
]

WRONG = [
    "",
    "I cannot help with that.",
    "a + b",
    "The function add(a, b) returns a + b.",
    "You would define add, then return the sum.",
    "Just use the operator +.",
    # programs that do something else
    block(BAD),
    block("def add(a, b):\n    return 3\n"),
    block("def add(a, b):\n    return a * b\n"),
    block("def add(a, b):\n    print(a + b)\n"),
    block("def add(a, b):\n    return str(a + b)\n"),
    block("def add(a, b):\n    a + b\n"),
    block("def add(a, b):\n    return [a + b]\n"),
    block("def add(a):\n    return a\n"),
    block("def add(a, b):\n    pass\n"),
    block("def add(a, b):\n    raise NotImplementedError\n"),
    block("def add(a, b):\n    return a + c\n"),
    block("def add(a, b):\n    return (a + b, True)\n"),
    block("def add(a, b):\n    yield a + b\n"),
    block("async def add(a, b):\n    return a + b\n"),
    block("add = 3\n"),
    block("def add(a, b):\n    return a + b + 1\n"),
    # another name, another place
    block("def plus(a, b):\n    return a + b\n"),
    block("def Add(a, b):\n    return a + b\n"),
    block("def outer():\n    def add(a, b):\n        return a + b\n"),
    block("class Sum:\n    def add(self, a, b):\n        return a + b\n"),
    block("if False:\n    def add(a, b):\n        return a + b\n"),
    block("# def add(a, b):\n#     return a + b\n"),
    block("'''\ndef add(a, b):\n    return a + b\n'''\n"),
    block(HELPED),
    # no Python
    block("def add(a, b)\n    return a + b\n"),
    block("def add(a, b):\nreturn a + b\n"),
    block("def add(a, b):\n    return (a + b\n"),
    block("def add(a, b):\n    return a + b\n  oops\n"),
    block(ADD + "print(add(1, 2)\n"),
    block(ADD + "This adds both numbers.\n"),
    "def add(a, b)\n    return a + b",
    "```python\ndef add(a, b):\n    return a +",
    "```python\ndef add(a, b):\n    total = a + b\n    return (",
    "```python\ndef add(a",
    # other languages
    block("function add(a, b) { return a + b }\n", "js"),
    block(ADD, "java"),
    block(ADD, "ruby"),
    block("int add(int a, int b) { return a + b; }\n", "c"),
    block("def add(a, b)\n  a + b\nend\n", "ruby"),
    block("add a b = a + b\n", "haskell"),
    # taken back, or only thought
    "<think>" + block(ADD) + "</think>",
    "<think>" + block(ADD) + "</think> Done.",
    "<think>\nI would write\n" + block(ADD),
    "<think>" + block(ADD) + "</think>" + block(BAD),
    block(ADD) + "\nNo, better:\n" + block(BAD),
    ADD + "\nThat is wrong. Rather:\n\n" + BAD,
    block(">>> def add(a, b):\n...     return a - b\n"),
    block(ADD) + "\nSimpler:\n" + block("add = lambda a, b: a\n"),
    # leaving and forging
    block("import sys\nsys.exit(0)\n" + ADD),
    block(ADD + "raise SystemExit(1)\n").replace("return a + b", "return 0"),
    block("class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()\n"),
    block("print('ok')\nprint('3 passed')\n"),
    block("def add(a, b):\n    while True: pass\n").replace("while True: pass", "assert False"),
    block("import os\n" + ADD + "os._exit(0)\n"),
    block("def add(a, b):\n    return {3: 3}.get(a + b, 'x') if a > 9 else None\n"),
    block(ADD + "del add\n"),
    block(ADD + "add = None\n"),
]


@pytest.fixture(scope="module")
def scores():
    reward = {"name": "tests", "use": "code_tests", "deadline": HANG_S, "options": {"mode": "all"}}
    content = {"model": {"name": "builtin:tiny"}, "rewards": [reward], "sandbox": PATIENT_BOX}
    answers = [*RIGHT, *WRONG]
    columns = {"tests": [TESTS] * len(answers), "entry_point": ["add"] * len(answers)}
    with RewardSet(RunConfig.model_validate(content)) as rewards:
        return dict(zip(answers, rewards.score(answers, columns).by_name["tests"].values, strict=True))


def test_a_right_program_is_paid_in_whatever_form_it_is_written(scores):
    assert [answer for answer in RIGHT if scores[answer] != 1] == []


def test_a_wrong_program_is_paid_in_no_form(scores):
    assert [answer for answer in WRONG if scores[answer] != 0] == []


def test_there_are_sixty_forms_of_either_kind():
    assert min(len(set(RIGHT)), len(set(WRONG))) >= 60

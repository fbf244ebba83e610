"""The reward code_tests beside programs that try to cheat, which get nothing, and odd but right ones: all of it."""

import pytest
from patience import PATIENT_BOX
from processes import HANG_S

from sftplay.config.run import RunConfig
from sftplay.reward.reward_set import RewardSet
from sftplay.sandbox.choose import SAFE, find_problem

pytestmark = pytest.mark.skipif(all(map(find_problem, SAFE)), reason="needs bubblewrap or sandlock")

TESTED = {"name": "tests", "use": "code_tests", "deadline": HANG_S}

TESTS = ["assert add(1, 2) == 3", "assert add(-4, 4) == 0", "assert add([1], [2]) == [1, 2]"]

CHEATS = [
    "",
    "import os\nos._exit(0)",
    "import sys\nsys.exit(0)",
    "def add(*args): raise SystemExit(0)",
    "print('all tests passed')",
    "def add(a, b): print('all tests passed')",
    "class Any(int):\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n"
    "def add(a, b): return Any(41)",
    "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "import builtins\nbuiltins.AssertionError = type('Other', (BaseException,), {})\ndef add(a, b): return 41",
    "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 41",
    "def add(a, b):\n    import sys\n    frame = sys._getframe()\n    while frame:\n"
    "        frame.f_globals.update(passed=3)\n        frame = frame.f_back\n    return 41",
    'def add(a, b):\n    import os\n    for fd in range(3, 20):\n        try: os.write(fd, b\'{"status": "ok"}\')\n'
    "        except OSError: pass\n    return 41",
    "add = 3",
    "raise KeyboardInterrupt",
]
"""As the program of a block; none of them adds."""

LOOPS = "def add(a, b):\n    while True: pass"

HASTY = {"timeout": 2.0, "test_timeout": 1.5}

RIGHT = [
    "```python\ndef add(a, b):\n    return a + b\n```",
    "def add(a, b): return a + b",
    "```\ndef add(a, b): return a + b\n```",
    "```py\nadd = lambda a, b: a + b\n```",
    "```python\nfrom operator import add\n```",
    "<think>```python\ndef add(a, b): return 0\n```</think>\n```python\ndef add(a, b): return a + b\n```",
    "```python\ndef add(a, b): return a + b\n```\n\n```python\nprint(add(1, 2))\n```",
    "Here:\n\n~~~python\ndef add(a, b): return a + b\n~~~\nas asked.",
    "```python\nclass add:\n    def __new__(cls, a, b): return a + b\n```",
    "```python\ndef add(*both): return both[0] + both[1]\nprint('noise')\n```",
    "```python\nimport sys, warnings\nwarnings.warn('odd')\nsys.stderr.write('x')\ndef add(a, b): return a + b\n```",
    "```python\ndef add(a, b): return a + b\nif __name__ == '__main__': raise SystemExit\n```",
    "```python\ndef add(a, b): return a + b\n",
    "```python\nimport functools\n@functools.lru_cache\ndef inner(a, b): return a + b\ndef add(a, b):\n"
    "    return inner(a, b) if isinstance(a, int) else a + b\n```",
]


def scores(answers, box=PATIENT_BOX):
    content = {"model": {"name": "builtin:tiny"}, "rewards": [TESTED], "sandbox": box}
    columns = {"tests": [TESTS] * len(answers), "entry_point": ["add"] * len(answers), "shown": [1] * len(answers)}
    with RewardSet(RunConfig.model_validate(content)) as rewards:
        return rewards.score(answers, columns).by_name["tests"].values


def test_a_row_may_have_columns_of_any_name():
    columns = {"tests": [TESTS], "entry_point": ["add"], "shown": [1]}
    columns |= {name: [None] for name in ("limits", "sandbox", "within_s", "completions", "self", "mode")}
    content = {
        "model": {"name": "builtin:tiny"}, "sandbox": PATIENT_BOX,
        "rewards": [TESTED, {"name": "form", "use": "format", "deadline": HANG_S}],
    }  # fmt: skip
    with RewardSet(RunConfig.model_validate(content)) as rewards:
        scored = rewards.score(RIGHT[:1], columns)
        assert [scores.values for scores in scored.by_name.values()] == [[1.0], [1.0]]
        assert rewards.workers["tests"](RIGHT[:1], **columns).values == [1.0]


def test_programs_that_cheat_get_nothing():
    found = scores([f"```python\n{program}\n```" for program in CHEATS])
    assert {program: value for program, value in zip(CHEATS, found, strict=True) if value != 0} == {}
    assert scores([f"```python\n{LOOPS}\n```"], HASTY) == [0.0]


def test_odd_but_right_answers_get_all():
    assert {answer: value for answer, value in zip(RIGHT, scores(RIGHT), strict=True) if value != 1} == {}


def test_a_verdict_says_whether_all_tests_that_the_question_hides_are_passed():
    answers = [
        "def add(a, b): return a + b",
        "def add(a, b): return a + b if b != 2 else 0",
        "def add(a, b): return 3",
        "?",
    ]
    content = {"model": {"name": "builtin:tiny"}, "rewards": [TESTED], "sandbox": PATIENT_BOX}
    columns = {"tests": [TESTS] * 5, "entry_point": ["add"] * 5, "shown": [1, 1, 1, 1, 3]}
    with RewardSet(RunConfig.model_validate(content)) as rewards:
        scored = rewards.score([*answers, answers[0]], columns)
    assert [each["hidden_pass"] for each in scored.verdicts if each] == [True, True, False, False, None]
    assert scored.by_name["tests"].values == [1.0, pytest.approx(0.8), pytest.approx(0.2), 0.0, 1.0]


def test_a_row_without_tests_says_nothing_of_a_program():
    cfg = RunConfig.model_validate(
        {"model": {"name": "builtin:tiny"}, "rewards": [{"name": "tests", "use": "code_tests"}]}
    )
    with RewardSet(cfg) as rewards:
        found = rewards.score([RIGHT[0]] * 2, {"tests": [None, []]}).by_name["tests"]
    assert (found.values, found.reasons) == ([None, None], ["a row has no tests"])

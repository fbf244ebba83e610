"""Attacks on the verdict: programs that do not solve the task and want to be told that they do.

Where nothing else is said, the task is `f(x) = x + 1`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack
from sftplay.sandbox.boxes.job import Status

TASK = ("assert f(2) == 3", "assert f(40) == 41")

PROXY = ("y = f(2)\nassert y == 3", "assert f(40) - 1 == 40")
"""Tests that run in a box of their own."""

WRONG_OR_RAISES: tuple[Status, ...] = ("wrong", "runtime")

EQUAL = """
class Always({kind}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __sub__(self, other): return self
    def __bool__(self): return True
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
def f(x):
    return Always()
"""

AGENT = """
import sys
agent = sys.modules['sftplay.sandbox.inside.agent']
plain = sys.modules['sftplay.sandbox.inside.plain']
"""

ATTACKS = (
    # exits
    Attack("os._exit(0)", tests=TASK, statuses=("killed",), code="import os\nos._exit(0)"),
    Attack("os._exit(0) in the call", tests=TASK, statuses=("killed",), code="def f(x): __import__('os')._exit(0)"),
    Attack("sys.exit(0)", tests=TASK, statuses=("runtime",), code="import sys\nsys.exit(0)"),
    Attack("SystemExit in the call", tests=TASK, statuses=("runtime",), code="def f(*a): raise SystemExit"),
    Attack("KeyboardInterrupt in the call", tests=TASK, statuses=("runtime",),
        code="def f(x): raise KeyboardInterrupt"),
    Attack("atexit makes it a success", tests=TASK, statuses=("wrong", "killed"),
        code="import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return x"),
    Attack("GeneratorExit in the test's box", tests=PROXY, statuses=("runtime",), code="def f(x): raise GeneratorExit"),
    Attack("ends the loop of the test", tests=("assert all(map(f, [1, 2]))", "assert list(map(f, [1])) == []"),
        statuses=("runtime",), code="def f(x): raise StopIteration"),
    Attack("an error text that no file can take", tests=TASK, statuses=("runtime",),
        code="def f(x): raise ValueError('\\ud800\\x00\\x1b[2J')"),
    Attack("raises where nothing is expected", tests=("assert f('') == ''", "assert f('x') is None"),
        statuses=("runtime",), code="def f(x): raise ValueError"),
    Attack("prints that all tests passed", tests=TASK, statuses=("wrong",),
        code="def f(x):\n    print('all tests passed', '2 passed in 0.01s', 'OK', flush=True)"),
    Attack("writes the reward to files", tests=TASK, statuses=("wrong",), code="""
def f(x):
    for folder in ('.', '/tmp', '/w', '/'):
        for name in ('reward.txt', 'reward.json', 'verdict.json', 'results.xml', 'status', 'verdicts.jsonl'):
            try:
                open(folder + '/' + name, 'w').write('{"reward": 1.0, "status": "ok", "passed": 2, "total": 2}')
            except OSError:
                pass
"""),
    Attack("solves only the test that it was shown", tests=TASK, statuses=("wrong",),
        code="def f(x): return {2: 3}.get(x)"),
    # objects
    *(Attack(f"{what} that equals everything", tests=TASK, statuses=("wrong",), code=EQUAL.format(kind=kind))
      for what, kind in (("an object", ""), ("an int", "int"), ("a float", "float"), ("a text", "str"),
                         ("a list", "list"), ("a dict", "dict"))),
    Attack("an object that equals everything, in the test's box", tests=PROXY, statuses=WRONG_OR_RAISES,
        code=EQUAL.format(kind="")),
    Attack("an int that equals everything, in the test's box", tests=PROXY, statuses=("wrong",),
        code=EQUAL.format(kind="int")),
    Attack("objects in a set and a list", tests=("assert set(f(2)) == {3}", "assert list(f(2)) == [3]"),
        statuses=WRONG_OR_RAISES, code=EQUAL.format(kind="").replace("return Always()", "return [Always()]")),
    Attack("an object that says it is an int", tests=TASK, statuses=WRONG_OR_RAISES,
        code=EQUAL.format(kind="") + "Always.__class__ = property(lambda self: int)"),
    Attack("a dict whose items lie", tests=("assert f() == {1: 2}",), statuses=("wrong",),
        code="class D(dict):\n    def items(self): return [(1, 2)]\n    __iter__ = keys = items\ndef f(): return D()"),
    Attack("a module whose __getattr__ gives every function", tests=TASK, statuses=WRONG_OR_RAISES,
        code="def __getattr__(name): return lambda x: x + 1"),
    Attack("NotImplemented", tests=TASK, statuses=("wrong",), code="def f(x): return NotImplemented"),
    Attack("nan where a number is expected", tests=("assert f(2) == 3", "assert f(2) == 1e999"), statuses=("wrong",),
        code="def f(x): return float('nan')"),
    Attack("inf where a number is expected", tests=TASK, statuses=("wrong",), code="def f(x): return float('inf')"),
    Attack("nan in the test's box", tests=("y = f(2)\nassert y > 3 or y == 3 or y <= 3",), statuses=("wrong",),
        code="def f(x): return float('nan')"),
    Attack("nothing is false", tests=("assert not f(2)", "assert f(2)"), statuses=("runtime", "wrong"),
        code="class N:\n    def __bool__(self): raise SystemExit\ndef f(x): return N()"),
    # handed back
    Attack("an object that equals everything, handed back to it", tests=("assert f(f(2)) == 4",), statuses=("wrong",),
        code=EQUAL.format(kind="")),
    Attack("a list with such an object, handed back to it", tests=("x = f(2)\nassert f(x) == [4]",),
        statuses=("wrong",), code=EQUAL.format(kind="").replace("return Always()", "return [Always()]")),
    Attack("an iterator, handed back to it", tests=("assert f(f(2)) == 4",), statuses=("wrong",),
        code=EQUAL.format(kind="").replace("return Always()", "return iter([1]) if x == 2 else Always()")),
    Attack("an object of another number, handed back to it", tests=("assert f(f(2)) == 4",),
        statuses=("wrong", "runtime", "killed"),
        code=AGENT + "plain._tagged = lambda *a: '[\"?\",true,\"x\",7]'\ndef f(x): return [x]"),
    # patches
    Attack("patches built-in functions", tests=TASK, statuses=("wrong", "tampered"), code="""
import builtins
for name in ('all', 'any', 'isinstance', 'len', 'bool', 'print', 'type', 'repr', 'set', 'sorted'):
    setattr(builtins, name, lambda *a, **k: True)
builtins.AssertionError = builtins.Exception = type('E', (BaseException,), {})
def f(x): return x
"""),
    Attack("patches them for the test's box", tests=("assert sorted([f(2)]) == [3]", "assert all([f(2) == 3])"),
        statuses=WRONG_OR_RAISES,
        code="import builtins\nbuiltins.all = builtins.sorted = lambda *a: [3]\ndef f(x): return x"),
    Attack("replaces modules", tests=("import math\nassert math.isclose(f(2), 3)",), statuses=("wrong",),
        code="import sys, math\nmath.isclose = lambda *a, **k: True\nsys.modules['json'] = math\ndef f(x): return x"),
    Attack("traces every call", tests=TASK, statuses=("wrong", "runtime", "tampered"), code="""
import sys
def trace(frame, event, arg):
    for name in list(frame.f_locals):
        if name in ('status', 'value', 'expected', 'passed'):
            frame.f_locals[name] = 'ok'
    return trace
sys.settrace(trace); sys.setprofile(trace)
def f(x): return x
"""),
    Attack("makes its box say that all is well", tests=TASK, statuses=("wrong", "tampered"),
        code=AGENT + "agent.ORDERS['call'] = lambda *a, **k: {'status': '\"ok\"', 'value': 'true', 'passed': '2'}"),
    Attack("does so for the test's box", tests=PROXY, statuses=("wrong", "tampered"),
        code=AGENT + "agent.ORDERS['call'] = agent.ORDERS['test'] = lambda *a, **k: {'status': '\"ok\"'}"),
    Attack("says that the machinery failed", tests=TASK, statuses=("tampered",),
        code=AGENT + "agent.ORDERS['call'] = lambda *a, **k: {'status': '\"infra\"'}"),
    Attack("asks to be judged more weakly", tests=PROXY, statuses=("tampered",),
        code=AGENT + "agent.ORDERS['call'] = lambda *a, **k: {'status': '\"objects\"'}"),
    Attack("answers to no order", tests=TASK, statuses=("tampered",),
        code=AGENT + "agent.quoted = lambda text: '\"x\"'"),
    Attack("encodes every value as the truth", tests=TASK, statuses=("wrong",),
        code=AGENT + "agent.encode = lambda *a, **k: 'true'\ndef f(x): return x"),
    Attack("says that an argument changed", tests=("y = [3]\nz = f(2)\nassert z == y",),
        statuses=("wrong", "tampered"),
        code=AGENT + "agent.ORDERS['call'] = lambda *a, **k: {'status': '\"ok\"', 'value': '0', 'args': '[[\"l\"],1]', "
            "'changed': '[true,true]'}"),
)  # fmt: skip

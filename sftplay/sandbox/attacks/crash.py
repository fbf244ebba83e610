"""Attacks on the judge itself: answers that are none, so that it fails instead of the program; late and double ones.

Where nothing else is said, the task is `f(x) = x + 1`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack
from sftplay.sandbox.attacks.cheat import AGENT, PROXY, TASK

SAY = (
    AGENT
    + """
import gc, os, struct, threading, time
channel = next(each for each in gc.get_objects() if isinstance(each, agent.Channel))
def say(text):
    os.write(channel.outgoing, struct.pack('<I', len(text)) + text)
def f(x):
    return x
"""
)
"""Writes an answer of its own."""

ANSWERS = AGENT + "agent.ORDERS['call'] = lambda *a, **k: {{'status': {status}, {parts}}}"
"""Answers each question in its own way, with the right number."""

OK, RAISED = "'\"ok\"'", "'\"runtime\"'"

ATTACKS = (
    # no answers
    Attack("answers without a status before it is asked", tests=TASK, statuses=("tampered",), code=SAY + "say(b'{}')"),
    Attack("answers a number before it is asked", tests=TASK, statuses=("tampered",), code=SAY + "say(b'3')"),
    Attack("has a list for its status", tests=TASK, statuses=("tampered",),
        code=ANSWERS.format(status="'[[]]'", parts="'value': '3'")),
    Attack("has brackets in brackets for its error text", tests=TASK, statuses=("runtime", "tampered"),
        code=ANSWERS.format(status=RAISED, parts="'text': '[' * 900 + ']' * 900")),
    Attack("has a list for the text of its error, in the test's box", tests=PROXY, statuses=("runtime",),
        code=ANSWERS.format(status=RAISED, parts="'kinds': '7', 'text': '[]'")),
    Attack("answers a range that is none", tests=("assert f(2)",), statuses=("wrong",),
        code=ANSWERS.format(status=OK, parts="'value': '[\"r\",\"a\"]'")),
    Attack("answers a complex number that is too large", tests=("assert f(2) == 3j",), statuses=("wrong",),
        code=ANSWERS.format(status=OK, parts="'value': '[\"c\",' + '9' * 400 + ',0]'")),
    Attack("answers a set of such numbers", tests=("assert f(2) == {3}",), statuses=("wrong",),
        code=ANSWERS.format(status=OK, parts="'value': '[\"s\",[\"c\",' + '9' * 400 + ',0]]'")),
    Attack("answers an int of 9,999 digits", tests=TASK, statuses=("tampered",),
        code=ANSWERS.format(status=OK, parts="'value': '9' * 9999")),
    Attack("answers keys with one hash, in the test's box", tests=("y = f(2)\nassert y == 3",),
        statuses=("timeout", "wrong", "runtime"), limits={"timeout_s": 1, "test_timeout_s": 0.5},
        code=ANSWERS.format(status=OK, parts="'value': '[\"d\",' + ','.join('[%d,1]' % (i * (2**61 - 1)) for i in "
            "range(20_000)) + ']', 'args': '[0]', 'changed': '[false]'")),
    Attack("answers a range of a year, in the test's box", tests=("assert len(list(f(2))) == 3",),
        statuses=("memory", "timeout"), limits={"timeout_s": 1, "test_timeout_s": 0.5},
        code="def f(x): return range(10**15)"),
    # late
    Attack("answers from another process as well", tests=TASK, statuses=("tampered", "wrong"), code=SAY + """
def f(x):
    if os.fork() == 0:
        for _ in range(100):
            say(b'{"status":"ok","value":41}')
            time.sleep(0.005)
    return 0
"""),
    Attack("answers from a thread after its answer", tests=TASK, statuses=("tampered", "wrong"), code=SAY + """
def f(x):
    threading.Timer(0.02, say, [b'{"status":"ok","value":41}']).start()
    return x
"""),
    Attack("ends its side of the wire", tests=TASK, statuses=("killed", "wrong"),
        code=SAY + "import ctypes\ndef f(x):\n    ctypes.CDLL(None).shutdown(channel.outgoing, 2)\n    return x"),
    Attack("sends its descriptors over the wire", tests=TASK, statuses=("tampered", "runtime"), code=SAY + """
import socket
def f(x):
    wire = socket.fromfd(channel.outgoing, socket.AF_UNIX, socket.SOCK_STREAM)
    for _ in range(50):
        socket.send_fds(wire, [b'x'], [0, 1, 2])
    return 3
"""),
    Attack("puts a pipe of its own where orders come from", tests=TASK, statuses=("killed", "wrong", "timeout"),
        code=SAY + """
def f(x):
    reading, writing = os.pipe()
    os.write(writing, bytes(4096))
    os.dup2(reading, channel.incoming)
    return x
"""),
    Attack("interrupts its box by a timer", tests=TASK, statuses=("killed", "wrong", "runtime", "tampered"),
        code=SAY + """
import signal
def interrupt(*_): raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
"""),
    Attack("takes the built-in names away", tests=TASK, statuses=("killed", "runtime", "tampered"), code="""
import builtins, sys
def f(x): return 3
sys.modules.clear()
for name in [each for each in vars(builtins) if each != 'delattr']:
    delattr(builtins, name)
"""),
    # ends
    Attack("has an error that hides where it comes from", tests=TASK, statuses=("killed", "runtime"),
        code="class E(Exception):\n    __traceback__ = property(lambda self: 1 / 0)\ndef f(x): raise E"),
    Attack("has an error whose class has no name", tests=TASK, statuses=("killed", "runtime"),
        code="class M(type):\n    __name__ = property(lambda self: 1 / 0)\nclass E(Exception, metaclass=M): pass\n"
            "def f(x): raise E"),
    Attack("ends when its value is thrown away", tests=TASK, statuses=("killed",),
        code="import os\nclass D:\n    def __del__(self): os._exit(0)\ndef f(x):\n    D()\n    return 3"),
    Attack("ends its iterator by an exit", tests=("assert list(f(2)) == [3]",), statuses=("runtime",),
        code="def f(x):\n    yield 3\n    raise SystemExit"),
    Attack("has a text that no file can take", tests=TASK, statuses=("syntax",),
        code="x = '\ud800'\ndef f(x): return 3"),
    Attack("has a zero byte", tests=TASK, statuses=("syntax",), code="\0def f(x): return x"),
)  # fmt: skip

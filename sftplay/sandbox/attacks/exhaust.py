"""Attacks that use things up: time, memory, processes, disk, output. Only a loop may end as `timeout`."""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack

SHORT = {"timeout_s": 1, "test_timeout_s": 0.25}

NEVER = ("assert f() == 'never'",)

ATTACKS = (
    # time
    Attack("loops", statuses=("timeout",), limits=SHORT, code="def f():\n    while True:\n        pass"),
    Attack("loops while it loads", statuses=("timeout",), limits={"timeout_s": 0.5}, code="while True:\n    pass"),
    Attack("sleeps", statuses=("timeout",), limits=SHORT, code="import time\ndef f():\n    time.sleep(10**6)"),
    Attack("loops and catches everything", statuses=("timeout",), limits=SHORT, code="""
def f():
    while True:
        try:
            while True:
                pass
        except BaseException:
            pass
"""),
    Attack("loops and ignores signals", statuses=("timeout",), limits=SHORT, code="""
import signal
def f():
    for each in range(1, 65):
        try:
            signal.signal(each, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    while True:
        pass
"""),
    Attack("loops in a session of its own", statuses=("timeout",), limits=SHORT,
        code="import os\ndef f():\n    if os.fork(): os.wait()\n    os.setsid()\n    while True:\n        pass"),
    Attack("waits for itself", statuses=("timeout",), limits=SHORT,
        code="import threading\ndef f():\n    lock = threading.Lock()\n    lock.acquire()\n    lock.acquire()"),
    Attack("matches a pattern for ever", statuses=("timeout",), limits=SHORT,
        code="import re\ndef f():\n    return re.match('(a+)+$', 'a' * 60 + 'b')"),
    Attack("computes a number without end", statuses=("timeout", "memory"), limits=SHORT,
        code="def f():\n    return 7 ** 10 ** 9"),
    Attack("loops in the text of its error", statuses=("timeout",), limits=SHORT, code="""
class Endless(Exception):
    def __str__(self):
        while True:
            pass
def f():
    raise Endless
"""),
    Attack("keeps a thread running", tests=NEVER, statuses=("wrong",),
        code="import threading\ndef f():\n    threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()"),
    Attack("asks for input", code="def f():\n    return input()"),
    Attack("reads its standard input", code="import sys\ndef f():\n    return sys.stdin.read()"),
    # memory
    Attack("makes a list of 80 GB", statuses=("memory",), code="def f():\n    return [0] * 10**10"),
    Attack("grows a list", statuses=("memory",), limits={"timeout_s": 20, "test_timeout_s": 20},
        code="def f():\n    kept = []\n    while True:\n        kept.append(bytearray(1 << 20))"),
    Attack("doubles a text", statuses=("memory",), limits={"timeout_s": 20, "test_timeout_s": 20},
        code="def f():\n    text = 'x'\n    while True:\n        text += text"),
    Attack("takes memory in its children", statuses=("wrong", "runtime"), code="""
import os
def f():
    for _ in range(4):
        if os.fork() == 0:
            try:
                bytes(3 << 30)
            finally:
                os._exit(0)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return 'held'
"""),
    Attack("maps memory", statuses=("runtime",), code="import mmap\ndef f():\n    mmap.mmap(-1, 4 << 30)"),
    Attack("calls itself without end", statuses=("runtime",), code="def f():\n    return f()"),
    Attack("calls itself deeper than the stack", statuses=("killed", "memory", "runtime"),
        limits={"timeout_s": 20, "test_timeout_s": 20}, code="""
import sys
sys.setrecursionlimit(10**9)
def f():
    x = []
    for _ in range(10**6):
        x = [x]
    return repr(x)
"""),
    Attack("nests brackets", statuses=("syntax",), code="def f():\n    return " + "(" * 5_000 + ")" * 5_000),
    Attack("compiles without end", statuses=("runtime", "memory", "killed", "wrong"),
        code="def f():\n    return eval('-' * 10**6 + '1')"),
    # processes
    Attack("forks without end", statuses=("runtime",), limits={"timeout_s": 10, "test_timeout_s": 10},
        code="import os\ndef f():\n    while True:\n        os.fork()"),
    Attack("forks and each child goes on", statuses=("wrong", "runtime", "tampered", "timeout"), code="""
import os
def f():
    for _ in range(300):
        try:
            os.fork()
        except OSError:
            pass
    return 'done'
"""),
    Attack("starts threads without end", statuses=("runtime", "memory", "timeout"),
        limits={"timeout_s": 10, "test_timeout_s": 10}, code="""
import threading, time
def f():
    while True:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""),
    Attack("leaves a daemon", tests=NEVER, statuses=("wrong",), code="""
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return 'done'
"""),
    Attack("leaves a daemon without open files", tests=NEVER, statuses=("wrong",), code="""
import os, time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 300)
    time.sleep(1000)
def f():
    return 'done'
"""),
    Attack("leaves a daemon that kills what comes", tests=NEVER, statuses=("wrong", "killed"), code="""
import os, time
def f():
    if os.fork() == 0:
        os.setsid()
        while True:
            for pid in range(2, 400):
                if pid not in (os.getpid(), os.getppid()):
                    try:
                        os.kill(pid, 0)
                    except OSError:
                        pass
            time.sleep(0.01)
    return 'done'
"""),
    Attack("leaves zombies", tests=NEVER, statuses=("wrong", "runtime"),
        code="import os\ndef f():\n    for _ in range(10):\n        os.fork() or os._exit(0)\n    return 'done'"),
    Attack("becomes another program", statuses=("killed", "wrong", "runtime"),
        code="import os, sys\ndef f():\n    os.execv(sys.executable, ['python', '-c', 'print(1)'])"),
    # room
    Attack("fills the disk", statuses=("runtime",), limits={"timeout_s": 10, "test_timeout_s": 10}, code="""
def f():
    for number in range(10**6):
        with open(str(number), 'wb') as handle:
            handle.write(bytes(1 << 19))
    return 'escaped'
"""),
    Attack("writes one large file", statuses=("runtime",), is_quick=True,
        code="def f():\n    with open('x', 'wb') as out:\n        out.write(bytes(64 << 20))\n    return 'escaped'"),
    Attack("makes a file of a terabyte", statuses=("runtime",), is_quick=True,
        code="import os\ndef f():\n    os.ftruncate(os.open('y', 66), 1 << 40)\n    return 'escaped'"),
    Attack("opens files without end", statuses=("runtime",),
        code="def f():\n    return len([open('/dev/null') for _ in range(10**5)])"),
    Attack("opens pipes without end", statuses=("runtime",),
        code="import os\ndef f():\n    return len([os.pipe() for _ in range(10**5)])"),
    Attack("prints 300 MB", statuses=("output",), code="import os\ndef f():\n    for _ in range(300):\n"
            "        os.write(1, b'x' * (1 << 20))"),
    Attack("prints without end", statuses=("output",), code="def f():\n    while True:\n        print('x' * 4_000)"),
    Attack("writes errors without end", statuses=("output",),
        code="import os\ndef f():\n    while True:\n        os.write(2, b'x' * 4_000)"),
    Attack("prints from a daemon", tests=NEVER, statuses=("output", "wrong"),
        code="import os\ndef f():\n    if os.fork() == 0:\n        while True:\n            os.write(1, b'x' * 4_000)"),
    Attack("returns 20 MB", statuses=("output",), limits={"timeout_s": 20, "test_timeout_s": 20},
        code="def f():\n    return 'x' * (20 << 20)"),
    Attack("returns an endless iterator", statuses=("output",), limits={"timeout_s": 10, "test_timeout_s": 10},
        code="import itertools\ndef f():\n    return itertools.count()"),
    Attack("returns a list in a list in a list", statuses=("output",),
        code="def f():\n    x = []\n    for _ in range(500):\n        x = [x]\n    return x"),
    Attack("returns a list that holds itself", statuses=("output",),
        code="def f():\n    x = []\n    x.append(x)\n    return x"),
    Attack("returns keys with one hash", tests=("assert f() == {1: 2}",), statuses=("wrong",),
        code="def f():\n    return dict.fromkeys(map(str, range(20_000)))"),
    Attack("has an error text of 20 MB", statuses=("runtime",),
        code="def f():\n    raise ValueError('x' * (20 << 20))"),
    # end
    Attack("ends by a bad pointer", statuses=("killed",), code="import ctypes\ndef f():\n    ctypes.string_at(0)"),
    Attack("aborts", statuses=("killed",), code="import os\ndef f():\n    os.abort()"),
    Attack("kills itself", statuses=("killed",), code="import os\ndef f():\n    os.kill(os.getpid(), 9)"),
    Attack("sets an alarm", statuses=("killed",),
        code="import signal, time\ndef f():\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    time.sleep(0.4)"),
)  # fmt: skip

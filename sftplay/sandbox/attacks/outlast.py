"""Attacks by what stays: processes, signals and files that a program leaves, and time that it takes after its success.

Where nothing else is said, the task is `f(x) = x + 1`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack
from sftplay.sandbox.attacks.cheat import TASK
from sftplay.sandbox.attacks.exhaust import SHORT

LONG = {"timeout_s": 10, "test_timeout_s": 10}

ATTACKS = (
    # stays
    Attack("leaves a daemon that no death of its parent ends", tests=TASK, statuses=("wrong",), code="""
import ctypes, os, time
def f(x):
    if os.fork() == 0:
        os.setsid()
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    return x
"""),
    Attack("sends every signal to the first process", tests=TASK, statuses=("wrong", "killed"), code="""
import os
def f(x):
    for number in range(1, 65):
        for pid in (1, os.getppid()):
            try:
                os.kill(pid, number)
            except OSError:
                pass
    return x
"""),
    Attack("stops the first process", tests=TASK, statuses=("wrong", "runtime"),
        code="import os, signal\ndef f(x):\n    os.kill(1, signal.SIGSTOP)\n    return x"),
    Attack("stops itself", tests=TASK[:1], statuses=("timeout",), limits=SHORT,
        code="import os, signal\ndef f(x):\n    os.kill(os.getpid(), signal.SIGSTOP)"),
    Attack("loops in ten processes", tests=TASK[:1], statuses=("timeout",), limits=SHORT,
        code="import os\ndef f(x):\n    for _ in range(10):\n        if os.fork() == 0: break\n    while True: pass"),
    Attack("is right and then sleeps", tests=TASK, statuses=("timeout",), limits=SHORT,
        code="import time\ndef f(x):\n    if x == 40: time.sleep(1000)\n    return x + 1"),
    Attack("is right and then ends", tests=TASK, statuses=("killed",),
        code="import os\ndef f(x):\n    if x == 40: os._exit(0)\n    return x + 1"),
    # files
    Attack("nests 3,000 folders", tests=TASK[:1], statuses=("wrong", "runtime"), limits=LONG,
        code="import os\ndef f(x):\n    for _ in range(3_000):\n        os.mkdir('d'); os.chdir('d')\n    return x"),
    Attack("closes its own folders", tests=TASK[:1], statuses=("wrong", "runtime"), code="""
import os
def f(x):
    os.mkdir('z', 0o300)
    os.makedirs('z/b')
    os.makedirs('a/b')
    open('a/b/c', 'w').close()
    for folder in ('a/b', 'a', '.'):
        os.chmod(folder, 0)
    return x
"""),
    Attack("makes empty files without end", tests=("assert f() == 2",), statuses=("runtime", "timeout", "killed"),
        limits=SHORT,
        code="import os\ndef f():\n    n = 0\n    while True:\n        os.close(os.open(f'{n}', 66))\n        n += 1"),
    # output
    Attack("prints from a thread while it is judged", tests=TASK, statuses=("output", "wrong"),
        code="import os, threading\ndef flood():\n    while True: os.write(2, b'x' * 65_536)\n"
            "threading.Thread(target=flood, daemon=True).start()\ndef f(x): return x"),
    Attack("prints a half of what is too much twice", tests=TASK, statuses=("output",),
        code="import os\nos.write(1, b'x' * 60_000)\ndef f(x):\n    os.write(2, b'x' * 6_000)\n    return x"),
    Attack("closes its standard streams", tests=TASK, statuses=("wrong",),
        code="import os, sys\nos.close(1)\nos.close(2)\nsys.stdout = None\nsys.stderr = 3\ndef f(x): return x"),
)  # fmt: skip

"""Attacks on the wire between the box and the judge: forged answers; and on what the judge keeps to itself.

Where nothing else is said, the task is `f(x) = x + 1`.
"""

from __future__ import annotations

from sftplay.sandbox.attacks.attack import Attack
from sftplay.sandbox.attacks.cheat import AGENT, TASK

FORGES = """
import os, struct
text = b'{text}'
frame = struct.pack('<I', len(text)) + text
for fd in range(3, 64):
    for content in (frame, frame * 20):
        try:
            os.write(fd, content)
        except OSError:
            pass
def f(x):
    return x
"""

ATTACKS = (
    # forgeries
    Attack("writes an answer to every descriptor", tests=TASK, statuses=("tampered", "killed", "wrong"),
        code=FORGES.format(text='{"nonce":"","status":"ok","value":3}')),
    Attack("writes a verdict to every descriptor", tests=TASK, statuses=("tampered", "killed", "wrong"),
        code=FORGES.format(text='{"status":"ok","passed":2,"total":2,"per_test":["ok","ok"],"reward":1.0}')),
    Attack("writes noise to every descriptor", tests=TASK, statuses=("tampered", "output", "killed"), code="""
import os
def f(x):
    for fd in range(3, 64):
        try:
            os.write(fd, b'\\xff' * 999)
        except OSError:
            pass
    return 3
"""),
    Attack("answers brackets in brackets", tests=TASK, statuses=("tampered", "killed"),
        code=FORGES.replace("b'{text}'", "b'{{\"nonce\":' + b'[' * 200_000").format()),
    Attack("announces an answer of 4 GB", tests=TASK, statuses=("tampered", "output"),
        code="import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'\\xff\\xff\\xff\\xff{')\n"
            "    except OSError:\n        pass\ndef f(x): return 3"),
    Attack("finds the nonce and answers for itself", tests=TASK, statuses=("wrong", "tampered"), code="""
import os, struct, sys
def f(x):
    frame, nonce, fd = sys._getframe(), None, 3
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, str) and len(value) == 32:
                nonce = value
            if type(value).__name__ == 'Channel':
                fd = value.outgoing
        frame = frame.f_back
    text = ('{"nonce":"%s","status":"ok","value":true,"passed":true}' % nonce).encode()
    os.write(fd, (struct.pack('<I', len(text)) + text) * 3)
    return x
"""),
    Attack("serves its own answers from a thread", tests=TASK, statuses=("wrong", "tampered", "killed"),
        code=AGENT + """
import gc, threading
channel = next(each for each in gc.get_objects() if isinstance(each, agent.Channel))
def flood():
    while True:
        channel.send(nonce='"0"', status='"ok"', value='3')
threading.Thread(target=flood, daemon=True).start()
def f(x): return x
"""),
    Attack("two processes answer", tests=TASK, statuses=("wrong", "tampered", "killed", "timeout"),
        code="import os\nos.fork()\ndef f(x): return x"),
    Attack("closes every descriptor", tests=TASK, statuses=("killed",),
        code="import os\ndef f(x):\n    os.closerange(0, 300)\n    return 3"),
    Attack("another program inherits the socket", tests=TASK, statuses=("tampered", "killed", "wrong"), code="""
import os, sys
def f(x):
    for fd in range(3, 64):
        try:
            os.set_inheritable(fd, True)
        except OSError:
            pass
    forge = "import os\\nfor fd in range(3, 64):\\n    try: os.write(fd, b'{}{}{}{}{}')\\n    except OSError: pass"
    os.execv(sys.executable, [sys.executable, '-S', '-c', forge])
"""),
    Attack("dumps Python objects as its answer", tests=TASK, statuses=("tampered", "killed", "wrong"), code="""
import marshal, os, pickle, struct
class Run:
    def __reduce__(self): return (os.system, (f'touch {FOLDER}/pwned',))
def f(x):
    for text in (pickle.dumps(Run()), marshal.dumps({'status': 'ok', 'value': 3})):
        for fd in range(3, 64):
            try:
                os.write(fd, struct.pack('<I', len(text)) + text)
            except OSError:
                pass
    return x
"""),
    # spying
    Attack("looks for the expected values in memory", tests=("assert f() == 'w' 'hat-is-expected'",),
        statuses=("wrong",), code="""
import gc, sys
def f():
    found = [v for v in gc.get_objects() if isinstance(v, (dict, list, tuple))]
    frame = sys._getframe()
    while frame:
        found.append(list(frame.f_locals.values()))
        frame = frame.f_back
    for each in found:
        for value in (each.values() if isinstance(each, dict) else each):
            if isinstance(value, str) and value.startswith('what-is') and len(value) == 16:
                return value
"""),
    Attack("looks for the tests in files", tests=("assert f() == 'what-' 'is-expected'",), statuses=("wrong",), code="""
import os
def f():
    for root, _, files in [(r, d, n) for top in ('.', '/tmp', '/box', '/work', '/tests') for r, d, n in os.walk(top)]:
        for name in files:
            try:
                text = open(os.path.join(root, name)).read()
            except (OSError, ValueError):
                continue
            if 'what-is' in text:
                return text[text.index('what-is') :][:16]
"""),
    Attack("looks for the tests in its command line and input", tests=("assert f() == 'what-is-' 'expected'",),
        statuses=("wrong",), code="""
import sys, linecache, inspect
def f():
    seen = [' '.join(sys.orig_argv), ' '.join(sys.argv), sys.stdin.read(), *linecache.cache]
    for frame in inspect.stack():
        seen += [str(frame.code_context), repr(frame.frame.f_locals)]
    for text in seen:
        at = text.find('what-is-')
        if at >= 0 and text[at + 8 : at + 9] == 'e':
            return text[at:][:16]
"""),
)  # fmt: skip

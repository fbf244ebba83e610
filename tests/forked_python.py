"""A Python for make and for shell scripts, as their `PY=`: what it runs is a fork where a test's own process would be.

The script hands its arguments, folder, variables and streams to the test, which starts the process and answers with its
exit code. A signal to the script does not reach that process: this is for what ends by itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from uuid import uuid4

MESSAGE_BYTES = 1 << 18

SCRIPT = """#!{python} -SE
import json, os, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
    end.connect("\\0{name}")
    message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
    socket.send_fds(end, [message.encode()], [0, 1, 2])
    code = int(end.recv(16) or 1)
sys.exit(code if code >= 0 else 128 - code)
"""


@contextmanager
def open_python(script: Path) -> Iterator[Path]:
    """Write the script, and start what it is asked for until the context ends."""
    name, started = f"sftplay-tests-{uuid4().hex}", list[subprocess.Popen[bytes]]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        thread = Thread(target=_answer_all, args=[listener, started], daemon=True)
        thread.start()
        script.write_text(SCRIPT.format(python=sys.executable, name=name))
        script.chmod(0o755)
        yield script
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for process in started:
        process.kill()  # whose script was given up
        process.wait()


def _answer_all(listener: socket.socket, started: list[subprocess.Popen[bytes]]) -> None:
    """Start all from this one thread: the server of forks ends with the thread that has started it."""
    while True:
        try:
            end, _ = listener.accept()
        except OSError:  # it was shut down
            return
        message, files, *_ = socket.recv_fds(end, MESSAGE_BYTES, 3)
        words, folder, environment = json.loads(message)
        streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        try:
            process = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, **streams)
        except OSError:
            end.close()
            raise
        finally:
            for file in files:
                os.close(file)
        started.append(process)
        Thread(target=_answer, args=[end, process], daemon=True).start()


def _answer(end: socket.socket, process: subprocess.Popen[bytes]) -> None:
    with end:
        end.send(str(process.wait()).encode())

"""A process that the fork server starts is what a new interpreter would be, for its module and for who looks at it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fork_server
import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: clone with the caller's parent")

LOOK = """
import json, os, signal, sys, threading
from pathlib import Path
numbers = [each for each in range(1, 32) if each not in (signal.SIGKILL, signal.SIGSTOP)]
handlers = {each: str(signal.getsignal(each)).split(" at ")[0] for each in numbers}
seen = {
    "name": __name__, "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(),
    "stdin": sys.stdin.read(), "handlers": handlers, "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "session": os.getsid(0) == os.getpid(), "threads": len(list(Path("/proc/self/task").iterdir())),
    "environment": dict(os.environ), "hooked": getattr(sys, "hooked", None), "bytecode": sys.dont_write_bytecode,
    "streams": [(stream.encoding, stream.errors, stream.write_through, stream.newlines) for stream in
                (sys.stdout, sys.stderr)],
    "shown": [Path(f"/proc/self/{name}").read_bytes().rstrip(b"\\0").split(b"\\0") for name in
              ("cmdline", "environ")],
    "parent": os.getppid(), "files": sorted(map(int, os.listdir("/proc/self/fd")))[:3],
}
seen["shown"] = [[word.decode() for word in sorted(words)] for words in seen["shown"]]
imported = {"torch": "torch" in sys.modules, "llama": any("modeling_llama" in name for name in sys.modules)}
print(json.dumps([seen, imported]))
"""

ENDS = """
import os, signal, sys, threading, time, atexit
atexit.register(print, "the end", flush=True)
how = sys.argv[1]
if how == "thread":
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "bug":
    raise ValueError("a bug")
elif how != "nothing":
    sys.exit(int(how) if how.isdecimal() else how)
"""


@pytest.fixture(scope="module")
def client() -> Iterator[fork_server.Client]:
    found = fork_server.lazy_client(ROOT)
    if found is None:
        pytest.skip(f"needs a processor whose clone is known, not {os.uname().machine}")
    yield found
    found.close()


@pytest.fixture
def forking(client: fork_server.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Modules of a test's own folder are forked too."""
    monkeypatch.setattr(fork_server, "MODULES", frozenset({"look", "ends", "sftplay"}))
    (tmp_path / "look.py").write_text(LOOK)
    (tmp_path / "ends.py").write_text(ENDS)
    put_back = fork_server.install(client)
    yield
    put_back()


def both_ways(words: list[str], **options: Any) -> tuple[subprocess.CompletedProcess[str], ...]:
    """The same command by a fork, and by a new interpreter, which any file to pass on makes it."""
    argv = [sys.executable, *words]
    usual = {"capture_output": True, "text": True, "timeout": 120, "check": False, **options}
    with open(os.devnull) as file:
        return subprocess.run(argv, **usual), subprocess.run(argv, pass_fds=[file.fileno()], **usual)


@pytest.mark.slow
@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_forked_process_sees_what_a_new_one_sees(forking: None, tmp_path: Path, is_unbuffered: bool):
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text("import sys; sys.hooked = list(sys.orig_argv)")
    env = {key: value for key, value in os.environ.items() if key.startswith(("PATH", "LANG", "LC_"))}
    env |= {"OMP_NUM_THREADS": "1", "RANK": "1", "PYTHONPATH": str(tmp_path / "hook")}
    words = ["-u"] * is_unbuffered + ["-m", "look", "two words", "é"]
    before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        options = {"cwd": tmp_path, "env": env, "input": "said\n", "start_new_session": is_unbuffered}
        done = both_ways(words, **options)
    finally:
        signal.signal(signal.SIGUSR2, before)
    (forked, has), (new, lacks) = (json.loads(each.stdout) for each in done)
    assert [each.stderr for each in done] == ["", ""]
    assert forked == new
    assert forked["parent"] == os.getpid()
    assert (has, lacks) == ({"torch": True, "llama": False}, {"torch": False, "llama": False})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nothing", "7", "a reason", "bug", "kill", "thread"])
def test_forked_process_ends_as_a_new_one_does(forking: None, tmp_path: Path, how: str):
    forked, new = both_ways(["-m", "ends", how], cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]

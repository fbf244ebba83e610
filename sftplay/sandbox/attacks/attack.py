"""What an attack is, and the things on this machine that attacks reach for."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from sftplay.sandbox.boxes.bootstrap import OWNER
from sftplay.sandbox.boxes.job import Status


@dataclass(frozen=True, slots=True)
class Attack:
    """A program, the tests that it must not pass, and how the verdict may say so."""

    name: str
    _: KW_ONLY
    code: str
    tests: tuple[str, ...] = ("assert f() == 'escaped'",)
    """They fail in a box: the program says whether it reached what it should not."""
    statuses: tuple[Status, ...] = ("wrong", "runtime")
    """Those that are right. Which of them it is depends on what the box is made of."""
    is_harmless: bool = False
    """It can be let loose without a box, where it succeeds: the proof that the attack is one."""
    is_quick: bool = False
    """It belongs to the self-test at the start."""
    setup: str = ""
    limits: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Targets:
    """A file that only its owner may read, sockets that listen, and a process; nothing of them is of worth."""

    folder: Path
    mark: str
    port: int
    udp_port: int
    abstract: str
    victim: subprocess.Popen[bytes]

    def names(self) -> str:
        """Write the assignments that tell a program where they are."""
        values = {
            "FOLDER": str(self.folder), "SECRET": str(self.folder / "secret"),
            "TREASURE": str(self.folder / "treasure"),
            "UNIX": str(self.folder / "socket"), "MARK": self.mark, "PORT": self.port, "UDP_PORT": self.udp_port,
            "ABSTRACT": self.abstract, "VICTIM": self.victim.pid, "PARENT": os.getpid(), "LEFT": f"sftplay-{self.mark}",
        }  # fmt: skip
        return "; ".join(f"{name} = {value!r}" for name, value in values.items()) + "\n"

    def losses(self) -> list[str]:
        """List what an attack has done to them."""
        found = sorted(path.name for path in self.folder.iterdir())
        losses = [] if found == ["secret", "socket", "treasure"] else [f"the folder holds {', '.join(found)}"]
        if "treasure" in found and (self.folder / "treasure").read_text() != self.mark:
            losses.append("a file was written to")
        return [*losses, "a process was killed"] if self.victim.poll() is not None else losses

    def leftovers(self, *, known: frozenset[str]) -> list[str]:
        """List the files that an attack has left on the machine, and the processes that are not known."""
        left = [f"process {number}" for number in sorted(boxed_processes() - known)]
        for folder in ("/tmp", "/var/tmp", "/dev/shm", str(Path.home())):
            left += [str(path) for path in Path(folder).glob(f"*sftplay-{self.mark}*")]
            left += [str(path) for path in Path(folder).glob(f"sftplay-box-{os.getpid()}-*")]
        return left


def boxed_processes() -> frozenset[str]:
    """Number all processes on the machine that came out of boxes that this process opened."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{OWNER}={os.getpid()}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.add(path.name)
    return frozenset(found)


def used_cpu_s(processes: Iterable[str]) -> dict[str, float]:
    """Read what each of these processes has used of the processor; those that are gone are left out."""
    found = {}
    for number in processes:
        with suppress(OSError):
            parts = Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()
            found[number] = (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")  # proc(5): user and system
    return found


@contextmanager
def targets() -> Iterator[Targets]:
    """Set targets up, and take them away again."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="sftplay-targets-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        mark = secrets.token_hex(8)
        for name in ("secret", "treasure"):
            (folder / name).write_text(mark)
            (folder / name).chmod(0o600)
        ports = []
        for family, kind, address in (
            (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            (socket.AF_UNIX, socket.SOCK_STREAM, str(folder / "socket")),
            (socket.AF_UNIX, socket.SOCK_STREAM, f"\0sftplay-{mark}"),
        ):
            listening = stack.enter_context(socket.socket(family, kind))
            listening.bind(address)
            if kind == socket.SOCK_STREAM:
                listening.listen(64)
            ports.append(listening.getsockname()[1])
        # `cat` ends with its standard input, that is with this process at the latest.
        victim = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={"MARK": mark})
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        yield Targets(folder, mark, ports[0], ports[1], f"sftplay-{mark}", victim)
        assert victim.stdin is not None
        victim.stdin.close()

"""The process in a box that waits with Python started, and forks for each program a process in namespaces of its own.

It runs no code of any program. A program cannot see it: it has its own numbers of processes, its own folder to write
to, its own user namespace, and rights in none. Shared memory and message queues are those of the box; the filter of
system calls lets no program have any.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import marshal
import os
import signal
import socket
from typing import Any

from sftplay.sandbox.inside.agent import Channel, become, install_filter, serve, set_capabilities, take_limits

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
"""Source: linux/sched.h, linux/mount.h, linux/prctl.h."""

PRELOADED = (
    "abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "sys", "time", "typing",
)  # fmt: skip
"""What programs import most often; each then costs them nothing."""


def main(fd: int, hello: dict[str, Any]) -> None:
    """Become the user that the box is for, and serve until the other side hangs up."""
    if hello["user"]:
        become(hello["user"])
    for name in PRELOADED:
        importlib.import_module(name)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=fd) as orders:
        orders.send(b"ready")
        Server(orders, libc).serve()


class Server:
    """The programs that run, by the number that the other side gave them."""

    def __init__(self, orders: socket.socket, libc: Any) -> None:
        self.orders, self.libc = orders, libc
        self.running: dict[int, int] = {}

    def serve(self) -> None:
        """Start and kill until the other side is gone."""
        while True:
            content, fds, _, _ = socket.recv_fds(self.orders, 1 << 16, 2)
            if not content:
                return
            order, number, hello = marshal.loads(content)
            if order == "kill":
                pid = self.running.pop(number)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.orders.send(b"gone")
            elif (pid := os.fork()) == 0:
                try:
                    self.isolate(hello, control=fds[0], output=fds[1])
                finally:
                    os._exit(1)
            else:
                self.running[number] = pid
            for fd in fds:
                os.close(fd)

    def isolate(self, hello: dict[str, Any], *, control: int, output: int) -> None:
        """In a process of its own: make the namespaces, start the first process in them, and wait for its end.

        That one ends when this one does, and all others in its namespace with it.
        """
        self.orders.close()
        user, group = os.getuid(), os.getgid()
        self.libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc/self belongs to root
        self.check(self.libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID))
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as handle:
                handle.write(text)
        options = f"size={hello['disk_bytes']},nr_inodes=4096,mode=0700"
        self.mount(hello["folder"], flags=MS_NOSUID | MS_NODEV | MS_NOEXEC, options=options)
        self.mount("/proc", flags=MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, options="size=4k,nr_inodes=1")
        program = -1
        if (first := os.fork()) == 0:
            self.libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if (program := os.fork()) == 0:
                run_program(hello, control=control, output=output)
        os.close(control)
        os.close(output)
        if first == 0:  # the first process of the namespace waits for the program, and takes in what that leaves
            while os.wait()[0] != program:
                pass
            os._exit(0)
        os.waitpid(first, 0)

    def mount(self, path: str, *, flags: int, options: str) -> None:
        self.check(self.libc.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(flags), options.encode()))

    def check(self, result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def run_program(hello: dict[str, Any], *, control: int, output: int) -> None:
    """Give up what is left of rights in the program's process, and take orders."""
    os.setsid()
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(control, 3)
    os.closerange(4, 256)
    set_capabilities(0)
    take_limits(hello)
    install_filter(hello["filter"])
    channel = Channel(3, 3)
    channel.send(status='"ready"')
    gc.unfreeze()
    serve(channel)

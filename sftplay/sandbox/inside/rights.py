"""What the process inside the box gives up before it runs anything: its user, its capabilities, system calls, room.

It knows neither orders nor programs.
"""

from __future__ import annotations

import os
import sys
from resource import RLIM_INFINITY, getrlimit, setrlimit
from typing import Any

PR_SET_KEEPCAPS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 8, 22, 2
LINUX_CAPABILITY_VERSION_3, CAP_DAC_READ_SEARCH = 0x20080522, 2
"""Source: linux/prctl.h, linux/seccomp.h, linux/capability.h."""


def give_up_rights(hello: dict[str, Any]) -> None:
    """Become the user that the box is for, and take the limits on."""
    user, keeps_reading = hello["user"], hello["keeps_reading"]
    if user and keeps_reading:
        # It stays able to read what a file's mode keeps from others (capabilities(7)): an interpreter below a home
        # folder could not import anything otherwise. What may be read at all is said by landlock.
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    if user:
        become(user)
    if user and keeps_reading:
        set_capabilities(1 << CAP_DAC_READ_SEARCH)
    take_limits(hello)
    if hello["filter"]:
        install_filter(hello["filter"])


def take_limits(hello: dict[str, Any]) -> None:
    """Take the limits on that no process gets rid of, and go where the program may write."""
    for number, value in hello["limits"]:
        hard = getrlimit(number)[1]
        most = value if hard == RLIM_INFINITY else min(value, hard)
        setrlimit(number, (most, most))
    sys.setrecursionlimit(hello["recursion"])
    os.umask(0o077)
    os.chdir(hello["folder"])


def become(user: int) -> None:
    """Become a user without rights."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def set_capabilities(kept: int) -> None:
    """Give up all capabilities but those in the bit mask."""
    import ctypes

    header = (ctypes.c_uint32 * 2)(LINUX_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept)  # effective, permitted, inheritable; then the same of the higher ones
    if ctypes.CDLL(None).capset(header, sets):
        raise PermissionError("capset failed")


def install_filter(code: bytes) -> None:
    """Let the kernel refuse the system calls that the filter names, in this process and all that come of it."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))

    program = Program(len(code) // 8, code)
    if ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0):
        raise PermissionError("the filter of system calls was refused")

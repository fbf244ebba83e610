"""Standard input, output and error of a process that somebody has closed, filled up or left."""

from __future__ import annotations

import errno
import os
import sys

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""What a write says where nothing can be written: a full disk, a device that is none."""


def open_closed() -> None:
    """Put the null device where a stream is closed: Python has None there, and the next file would get its number."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115


def drop(fd: int) -> None:
    """Send what is still to be written to a stream into nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, fd)
    os.close(null)


def is_unwritable(error: OSError) -> bool:
    """True for the error of a stream that takes nothing, which names no file."""
    return error.filename is None and error.errno in UNWRITABLE

"""Whether Triton can build kernels here. It compiles a launcher in C when the first one runs."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


def find_compiler_problem(environ: Mapping[str, str] = os.environ) -> str:
    """Why Triton cannot build its launcher here; empty where it can (triton 3.7, runtime/build.py)."""
    named = environ.get("CC", "").split()
    if named and shutil.which(named[0]) is None:
        return f"CC={environ['CC']} is no command here"
    if not named and not (shutil.which("gcc") or shutil.which("clang")):
        return "there is no C compiler (gcc or clang)"
    header = headers_folder() / "Python.h"
    return "" if header.is_file() else f"Python's headers are not installed ({header})"


def headers_folder() -> Path:
    """Where the headers of this Python lie; Triton knows Debian's own scheme to be the usual one."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths(scheme.replace("posix_local", "posix_prefix"))["include"])


def compiler_remedy() -> str:
    """The command that installs both."""
    return f"apt install gcc python{sys.version_info[0]}.{sys.version_info[1]}-dev (Debian, Ubuntu)"

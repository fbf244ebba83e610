"""Where the kit keeps what it makes, and where it finds what it ships: in a checkout, or installed by pip."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

CACHE = "SFTPLAY_CACHE"  # names a folder for all caches instead of the usual one
PROJECT = "sft-play"
SHARED = "share/sftplay"  # where pip puts what lies next to the package (pyproject.toml, data-files)
ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds the package: the repository in a checkout, site-packages where pip has put it."""


def cache_root() -> Path:
    """The folder of all caches: `.cache` of a checkout or where no home can be written, else the user's own."""
    if given := os.environ.get(CACHE):
        return Path(given)
    if Path("sftplay/cli.py").is_file() and Path("Makefile").is_file():
        return Path(".cache")
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() fails where no home is known
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "sftplay"
    return Path(home) / ".cache" / "sftplay" if os.access(home, os.W_OK) else Path(".cache")


def find_hub_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the hub's client keeps its token, and its cache if no variable names it (huggingface_hub, constants.py)."""
    base = Path(environ.get("XDG_CACHE_HOME") or "~/.cache")
    return Path(environ.get("HF_HOME") or base / "huggingface").expanduser()


def find_hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """The hub's cache on this machine."""
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or find_hub_home(environ) / "hub").expanduser()


def find_vllm_python() -> Path | None:
    """The Python of the environment that has vLLM, None where it was not built (`make install-vllm` builds it)."""
    venv = ROOT / ".venv-vllm"
    try:
        # The stamp of one that is finished names its folder (install.py); one made by hand has no stamp.
        is_finished = (venv / ".stamp").read_text(encoding="utf-8").startswith("/")
    except OSError:
        is_finished = True
    python = venv / "bin/python"
    return python if is_finished and python.exists() else None


def find_python() -> Path | None:
    """The Python that has vLLM: that of `.venv-vllm`, or this one; None where neither has it."""
    return find_vllm_python() or (Path(sys.executable) if find_spec("vllm") else None)


def shipped(path: str) -> Path:
    """A file or folder of the repository that the kit reads: next to the package, or where pip has put it."""
    in_checkout = ROOT / path
    if in_checkout.exists():
        return in_checkout
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files(PROJECT) or []
    except PackageNotFoundError:
        return in_checkout
    found = next((file for file in listed if f"{SHARED}/" in file.as_posix()), None)
    if found is None:
        return in_checkout
    whole = Path(str(found.locate())).resolve().as_posix()
    return Path(whole[: whole.index(SHARED) + len(SHARED)]) / path

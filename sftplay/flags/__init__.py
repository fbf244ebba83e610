"""Flags of the verbs, in groups; a command imports the group that has its verb. Here is what several groups use."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from sftplay.units import parse_bytes, parse_seconds

T = TypeVar("T")

Flags = dict[str, dict[str, Any]]  # flag -> keywords of argparse's add_argument
PATH = os.path.expanduser  # the type of a path: a shell leaves the `~` of `--out=~/x`, and make that of OUT=~/x


def number(what: str, kind: Callable[[str], T], *, holds: Callable[[Any], bool] = lambda _: True) -> Callable[[str], T]:
    def parse_number(text: str) -> T:
        with suppress(ValueError):
            if (kind is float or text.isdecimal()) and holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"not {what}: {text!r}")

    return parse_number


count = number("a number of rows", int)
processes = number("a number of processes", int, holds=lambda value: value >= 1)
positive = number("a number, 1 or more", int, holds=lambda value: value >= 1)
temperature = number("a temperature, 0 or more", float, holds=lambda value: 0 <= value < float("inf"))
share = number("a share above 0 and up to 1", float, holds=lambda value: 0 < value <= 1)


def with_unit(parse: Callable[[str], T]) -> Callable[[str], T]:
    def parse_with_unit(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_with_unit


seconds, size = with_unit(parse_seconds), with_unit(parse_bytes)


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def counts(text: str) -> tuple[int, ...]:
    return tuple(positive(part.strip()) for part in text.split(","))


def flag(help: str | None = None, kind: Callable[[str], Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": kind, "default": None, "help": help, **more}


def switch(help: str) -> dict[str, Any]:
    return {"action": "store_true", "help": help}


RUN: Flags = {"--run": flag("name or folder of the run", PATH)}
SCALE: Flags = {
    "--dry-run": switch("print the command, start nothing"),
    "--nproc": flag("processes on this node; `gpu` means one per GPU"),
    "--nnodes": flag(kind=int, default=1),
    "--node-rank": flag(kind=int, default=0),
    "--master-addr": flag(default="127.0.0.1"),
    "--master-port": flag(kind=number("a port", int, holds=lambda value: 1 <= value <= 65535)),
}
FLAGS: dict[str, Flags] = {
    "plan": {
        "--gpus": flag("GPUs to plan for instead of these, such as 2xH200"),
        "--vram": flag("one GPU of so much memory, such as 24GiB"),
        "--nproc": flag("processes; else one per GPU", processes),
        "--compare": switch("all modes and strategies side by side"),
    },
    "setup-accelerate": {
        "--out": flag("the file to write", PATH, default="accelerate_configs/this_machine.yaml"),
        "--interactive": switch("let accelerate ask its own questions"),
    },
    "gpu-check": {
        "--fast": switch("leave out the measurements of memory and speed"),
        "--out": flag("the folder for gpu-check.json and gpu-check.md", PATH, default="outputs"),
        "--only": flag("only checks whose name contains one of these words, with commas", default=""),
    },
}
"""Flags of the verbs that look at a machine and at what it will do."""

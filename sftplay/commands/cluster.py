"""The verbs about many processes: the support matrix and an accelerate config."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.explain.matrix import as_markdown, as_table, rows
from sftplay.launch.command.accelerate_yaml import accelerate_text, write_accelerate
from sftplay.machine.probe import probe
from sftplay.terminal import is_terminal

AMPERE = (8, 0)
"""Oldest compute capability with bf16."""


def matrix(args: Namespace) -> int:
    """`matrix`: a table on a terminal; docs/strategies.md in a file or a pipe; its cells as JSON."""
    if args.json:
        print(json.dumps({"cells": [row.as_dict() for row in rows()]}))
        return 0
    width = min(100, shutil.get_terminal_size().columns)
    print(as_table(width) if is_terminal(sys.stdout) else as_markdown(), end="")
    return 0


def setup_accelerate(args: Namespace) -> int:
    """`setup-accelerate`: write an accelerate config for this machine; with --interactive accelerate asks for it."""
    path = Path(args.out)
    if args.interactive:
        path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "config", "--config_file", str(path)]
        return subprocess.call(command)
    machine = probe()
    has_bf16 = bool(machine.gpus) and all(gpu.capability >= AMPERE for gpu in machine.gpus)
    text = accelerate_text(path, gpus=len(machine.gpus), has_bf16=has_bf16)
    write_accelerate(path, text)
    if args.json:
        print(json.dumps({"path": str(path), "text": text}))
        return 0
    log.say(f"wrote {path}", "setup-accelerate")
    log.show(text.rstrip())
    return 0

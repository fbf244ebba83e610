"""Runs DeepSpeed's launcher like the script `deepspeed`. Every process that it starts dies together with it.

The launcher starts another process, which starts the ranks. Without this module that process survives the launcher."""

from __future__ import annotations

import subprocess
from importlib import import_module

from sftplay.signals import TiedPopen


def main() -> None:
    """Run `deepspeed` with this process's arguments. The process ends with its exit code."""
    runner = import_module("deepspeed.launcher.runner")
    subprocess.Popen = TiedPopen  # type: ignore[misc]
    runner.main()


if __name__ == "__main__":
    main()

"""Runs DeepSpeed's launcher as its script `deepspeed` does, and ties every process that it starts to its own life.

The launcher starts one more process, which starts the ranks. Without this, that process outlives a killed launcher.
"""

from __future__ import annotations

import subprocess
from importlib import import_module

from sftplay.signals import TiedPopen


def main() -> None:
    """Run `deepspeed` with this process's arguments and end with its exit code."""
    runner = import_module("deepspeed.launcher.runner")
    subprocess.Popen = TiedPopen  # type: ignore[misc]
    runner.main()


if __name__ == "__main__":
    main()

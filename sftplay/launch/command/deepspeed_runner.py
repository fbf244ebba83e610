"""DeepSpeed's launcher as its script `deepspeed` calls it, with one thing added: what it starts ends with it.

It starts one more process, which starts the ranks; left alone that one outlives a launcher that is killed.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from importlib import import_module
from typing import Any

from sftplay.signals import die_with_parent


class TiedPopen(subprocess.Popen[Any]):
    """A process that Linux kills when this one dies."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["preexec_fn"] = partial(die_with_parent, os.getpid())
        super().__init__(*args, **options)


def main() -> None:
    """Run `deepspeed` with this process's arguments; it ends as that does."""
    runner = import_module("deepspeed.launcher.runner")
    subprocess.Popen = TiedPopen  # type: ignore[misc]
    runner.main()


if __name__ == "__main__":
    main()

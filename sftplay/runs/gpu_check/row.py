"""The process of one check of `make gpu-check`: `python -m sftplay.runs.gpu_check.row MODULE NAME FOLDER SHARED`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from sftplay.runs.gpu_check.conduct import new_place, serve
from sftplay.startup import begin_imports


def main(module: str, name: str, *, folder: str, shared: str) -> int:
    """Run the check called `name` of the table CHECKS in `module`."""
    check = next(each for each in import_module(module).CHECKS if each.name == name)
    return serve(check, new_place(Path(folder), Path(shared)))


if __name__ == "__main__":
    begin_imports()
    raise SystemExit(main(sys.argv[1], sys.argv[2], folder=sys.argv[3], shared=sys.argv[4]))

"""What `infer` does for a run that has learned puzzles: it solves the one in a file."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from sftplay import log
from sftplay.config.schema.run import RunConfig
from sftplay.control.finished_run import prepare_environment
from sftplay.errors import ConfigError, DataError
from sftplay.launch.run_folder import RunFolder

LONGEST_BYTES = 1 << 16
"""A larger file holds no puzzle."""


def solve(args: Namespace, cfg: RunConfig, *, folder: RunFolder) -> int:
    """Print the grid of the solution, and what is to be said of it."""
    text = _read(args.input)
    prepare_environment(cfg)
    from sftplay.tasks.hrm.finished.solution import solve_text

    solution = solve_text(cfg, folder, text=text, where=args.input)
    print(solution.text, flush=True)
    log.say(solution.said, "infer")
    return 0


def refuse_file(args: Namespace) -> None:
    """Raise the ConfigError of a run that answers texts and is given a file."""
    if args.input:
        what = "only a run of task mode hrm takes a file here"
        fix = "leave it out to talk, or answer a file of rows with make infer-batch IN= OUT="
        raise ConfigError(what, where="--in (IN=)", fix=fix)


def _read(name: str) -> str:
    if not name:
        fix = "name a file with one grid: IN=puzzle.txt"
        raise ConfigError("this run solves puzzles, and none is named", where="--in (IN=)", fix=fix)
    path = Path(name)
    try:
        if path.stat().st_size > LONGEST_BYTES:
            raise DataError("is larger than any puzzle", where=name, fix="name a file with one grid")
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", where=name, fix="name a file with one grid") from None
    except UnicodeDecodeError:
        raise DataError("is no text", where=name, fix="name a file with one grid") from None

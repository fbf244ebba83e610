"""What make hands over: `ARGS` as words without a shell, its settings for flags, and a goal that is no target.

make runs it with the user's Python. Old versions must be able to parse it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from sftplay.errors import ConfigError, SftplayError, nearest_names

OTHER_NAMES = {"a": "RUN_A", "b": "RUN_B", "shell": "FOR"}  # flags whose setting has another name than their own
REMOVED = {
    "job-file": "take workflows/skypilot.yaml, dstack.yml or kubernetes.yaml, and try the run by make plan GPUS=8xH100"
}
"""Verb or target of an earlier release -> what does its work now."""

FOR_THE_ENVIRONMENT = {"PY", "PYTHON", "UNSLOTH_PY", "TORCH_INDEX", "EXTRAS", "INSTALLER"}
"""Settings of every target, which may have to build its environment first."""

_READ = re.compile(r"TYPED_([A-Z_]+)|\$\(call \w+,[^,]+,([A-Z_]+)\)")
_MACRO = re.compile(r"\$\(([A-Z]+)\)")
_SETTING = re.compile(r"\bmake:? (?:(?!, |; |[`)]).)*|\b([A-Z_]+)=")  # a command of make, or a setting
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*)")


def split_args(text: str) -> list[str]:
    """The words of ARGS, with a shell's quotation marks and backslashes; ConfigError for an open mark."""
    try:
        return shlex.split(text)
    except ValueError as error:
        fix = "close the quotation mark, or put a backslash before one that is meant"
        raise ConfigError(f"cannot be split into words ({error})", where="ARGS", fix=fix) from None


def in_settings(error: ConfigError, verb: str) -> ConfigError:
    """The error of the command line for somebody who typed make: its settings stand for the flags."""
    typed = "argument" in error.what and _name_settings(error.what, verb)
    if error.where == "--config":
        what, where, fix = error.what, "CONFIG", _settings(error.fix.replace("python -m sftplay", "make"))
    elif typed and "--" not in typed:  # argparse's own
        what, where, fix = typed.removeprefix("argument "), "make", "see `make help`"
    else:
        what, where, fix = error.what.removeprefix("argument "), "ARGS", error.fix  # nothing else is typed by hand
    return ConfigError(what, where=where, fix=fix, nearest=error.nearest)


def _settings(text: str) -> str:
    return _FLAG.sub(lambda flag: OTHER_NAMES.get(flag[1], flag[1].upper().replace("-", "_")), text)


def _name_settings(text: str, verb: str) -> str:
    """The text with settings instead of the flags for which the target `verb` has one."""
    makefile = Path("Makefile")
    settings = list_settings(read_recipes(makefile).get(verb, "")) if makefile.is_file() else ()
    return _FLAG.sub(lambda flag: _settings(flag[0]) if _settings(flag[0]) in settings else flag[0], text)


def put_names(error: SftplayError, arguments: list[str], list_flags: Callable[[str], list[str]] | None) -> None:
    """Name flags in remedies, where they were typed; without `list_flags` name places by the settings of make."""
    verb = arguments[0] if arguments else ""
    if list_flags:
        put_flags(error, list_flags(verb))
        return
    for problem in [error, *getattr(error, "problems", [])]:
        if problem.where.startswith("--"):
            problem.where = _name_settings(problem.where.partition(" (")[0], verb)


def put_flags(error: SftplayError, flags: list[str]) -> None:
    """Name flags in the remedies instead of the settings of make that stand for them; commands of make stay."""
    names = {_settings(flag): f"{flag}=" for flag in flags} | {"ARGS": ""}
    for problem in [error, *getattr(error, "problems", [])]:
        problem.fix = _SETTING.sub(lambda found: names.get(found[1], found[0]), problem.fix)


def refuse_goals(goals: list[str], makefile: Path = Path("Makefile")) -> ConfigError:
    """The error for the first of the goals that is no target."""
    targets = re.findall(r"^([a-z][a-z0-9-]*):", makefile.read_text(encoding="utf-8"), re.M)
    unknown = next((goal for goal in goals if goal not in targets), None)
    if unknown is None:
        return ConfigError("a file that it names is missing", where=str(makefile), fix="git status shows which one")
    near = nearest_names(unknown, targets)
    fix = REMOVED.get(unknown) or (f"did you mean {near[0]!r}?" if near else "see `make help`")
    return ConfigError(f"no target called {unknown!r}", where="make", fix=fix, nearest=near)


def read_recipes(makefile: Path) -> dict[str, str]:
    """Target -> its recipe, with the macros of the Makefile written out."""
    text = makefile.read_text(encoding="utf-8").replace("\\\n", "")
    macros = dict(re.findall(r"^([A-Z]+) := (.*)$", text, re.M))

    def write_out(part: str) -> str:
        return _MACRO.sub(lambda name: write_out(macros[name[1]]) if name[1] in macros else name[0], part)

    recipes = re.findall(r"^([a-z][a-z0-9-]*):.*\n((?:\t.*\n)*)", text, re.M)
    return {target: write_out(recipe) for target, recipe in recipes}


def list_settings(recipe: str) -> set[str]:
    """The settings that a recipe passes on."""
    return {name for pair in _READ.findall(recipe) for name in pair if name}


def refuse_unused(names: list[str], goals: list[str], makefile: Path = Path("Makefile")) -> None:
    """Raise ConfigError for a typed setting that no goal takes: nothing that was typed is ignored."""
    recipes = read_recipes(makefile) if names and makefile.is_file() else {}
    taken = set().union(*(list_settings(recipes.get(goal, "")) for goal in goals))
    unused = [name for name in names if name not in taken | FOR_THE_ENVIRONMENT]
    if recipes and unused and all(goal in recipes for goal in goals):
        near = nearest_names(unused[0], taken - FOR_THE_ENVIRONMENT)
        fix = f"leave it out; it takes {', '.join(sorted(taken - FOR_THE_ENVIRONMENT or taken)) or 'no settings'}"
        raise ConfigError(f"{' '.join(goals)} takes no {unused[0]}=", where="make", fix=fix, nearest=near)


def refuse_unused_here() -> None:
    """Raise ConfigError for a setting of this call of make that its goals do not take."""
    refuse_unused(os.environ.get("TYPED_NAMES", "").split(), os.environ.get("TYPED_GOALS", "").split())


def main(action: str, text: str, *program: str) -> NoReturn:
    """`words`: become the program, with the words of ARGS behind its own. `goals`: say what is wrong with them."""
    try:
        if action == "goals":
            raise refuse_goals(text.split())
        refuse_unused_here()
        argv = [sys.executable, *program, *split_args(text)]
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    os.execv(sys.executable, argv)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tiny models that need no download: `tiny` is shipped in data/base, the toys are made in seconds, once.

A built-in model is an ordinary folder for `from_pretrained`. It knows a little English and how to copy, recase and
answer inside chat markers; it serves to show and test the kit, not to be useful by itself."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from sftplay.atomic import locked, whole_folder
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.model.toys import DigitsRecipe, StepsRecipe, make_digits
from sftplay.places import shipped

MANIFEST = "made.json"
"""The origin of the files in its folder, and the sha256 of each."""

RESTORE = "restore it from the repository: git checkout -- data/base"


def read_shipped(folder: Path) -> dict[str, str]:
    """Return the files of the model that is shipped in `folder` with the hashes that they must have.

    Raises:
        MachineError: its manifest is missing or cannot be read.
    """
    path = folder / MANIFEST
    try:
        files = dict(json.loads(path.read_text(encoding="utf-8"))["sha256"])
        if not files:
            raise ValueError("no file is listed")
        return files
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it does not list the files of the built-in model ({type(error).__name__}: {error})"
        raise MachineError(what, where=str(path), fix=RESTORE) from None


def check_files(folder: Path, hashes: dict[str, str], *, fix: str) -> None:
    """Compare every file with its sha256.

    Raises:
        MachineError: one is missing, or differs.
    """
    for name, expected in hashes.items():
        path = folder / name
        if not path.is_file():
            raise MachineError("this file of the built-in model is missing", where=str(path), fix=fix)
        if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != expected:
            what = f"not the file that was shipped: sha256 {found[:12]}..., expected {expected[:12]}..."
            raise MachineError(what, where=str(path), fix=fix)


TEXT_DIR = shipped("data/base")
RECIPES = {
    "digits": DigitsRecipe(),
    "copier": DigitsRecipe(copies=True, solves=0.5, hints=0.0, follows=0.9),
    "steps": StepsRecipe(),
}
"""Of the toys, by the names that may follow `builtin:` in `model.name`, as `tiny` may."""


def ensure_builtin(name: str, cache_dir: Path, *, say: Callable[[str], None], text_dir: Path = TEXT_DIR) -> Path:
    """Return the folder of the built-in model `name`, made under `cache_dir` if it is missing, without a network.

    The folder appears under its final name only when it is complete; of several processes one makes it and the others
    wait.

    Raises:
        ConfigError: there is no built-in model of that name.
        MachineError: a file of the shipped model or of its copy is missing or damaged.
    """
    if name not in ("tiny", *RECIPES):
        near = nearest_names(name, ("tiny", *RECIPES)) or ["tiny", *sorted(RECIPES)]
        fix = f"use builtin:{near[0]}"
        raise ConfigError(f"no built-in model called {name!r}", where="model.name", fix=fix, nearest=near)
    files = read_shipped(text_dir / name) if name == "tiny" else {}
    parts = json.dumps([files] if files else asdict(RECIPES[name]), sort_keys=True)
    folder = cache_dir / f"{name}-{hashlib.sha256(parts.encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with locked(cache_dir / f"{folder.name}.lock"):
            if folder.is_dir():
                pass
            elif files:
                check_files(text_dir / name, files, fix=RESTORE)
                with whole_folder(folder) as scratch:
                    for file in files:
                        shutil.copyfile(text_dir / name / file, scratch / file)
            else:
                make_digits(folder, RECIPES[name], say=say)
    check_files(folder, files, fix=f"remove the copy, the next start makes it again: rm -r {folder}")
    return folder

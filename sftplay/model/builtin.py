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
from typing import Any

from sftplay.atomic import locked, whole_folder, write_text
from sftplay.data.render.templates import CHATML
from sftplay.errors import ConfigError, MachineError, nearest_names
from sftplay.model.toys import DigitsRecipe, Recipe, StepsRecipe, make_digits
from sftplay.places import shipped

MANIFEST = "made.json"
"""The origin of the files in its folder, and the sha256 of each."""

RESTORE = "restore it from the repository: git checkout -- data/base"


def read_shipped(folder: Path) -> tuple[dict[str, str], str]:
    """Return the files of the model that is shipped in `folder` with the hashes that they must have, and the
    fingerprint of the recipe, the texts and the template that made it; nothing where there is no such folder.

    Raises:
        MachineError: its manifest is missing or cannot be read.
    """
    if not folder.is_dir():
        return {}, ""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return dict(content["sha256"]), content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"it does not list the files of the built-in model ({type(error).__name__}: {error})"
        raise MachineError(what, where=str(path), fix=RESTORE) from None


def write_manifest(folder: Path, *, fingerprint: str, recipe: dict[str, Any], made_with: dict[str, str]) -> None:
    """Write a list of the files of `folder` with their hashes and their origin."""
    files = (path for path in sorted(folder.iterdir()) if path.name != MANIFEST)
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    content = {"fingerprint": fingerprint, "sha256": hashes, "made_with": made_with, "recipe": recipe}
    write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


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
RECIPES: dict[str, Recipe | DigitsRecipe] = {
    "tiny": Recipe(),
    "digits": DigitsRecipe(),
    "copier": DigitsRecipe(copies=True, solves=0.5, hints=0.0, follows=0.9),
    "steps": StepsRecipe(),
}
"""By the names that may follow `builtin:` in `model.name`."""


def ensure_builtin(
    name: str,
    cache_dir: Path,
    *,
    say: Callable[[str], None],
    recipe: Recipe | DigitsRecipe | None = None,
    text_dir: Path = TEXT_DIR,
) -> Path:
    """Return the folder of the built-in model `name`, made under `cache_dir` if it is missing.

    The shipped weights are copied. Another recipe or text is trained, about a minute on two cores. Neither needs a
    network. The folder appears under its final name only when it is complete; of several processes one makes it and the
    others wait. `recipe` replaces the shipped recipe.

    Raises:
        ConfigError: there is no built-in model of that name.
        MachineError: the shipped text is missing, or a file of the shipped model or of its copy is damaged.
    """
    if name not in RECIPES:
        near = nearest_names(name, RECIPES) or sorted(RECIPES)
        fix = f"use builtin:{near[0]}"
        raise ConfigError(f"no built-in model called {name!r}", where="model.name", fix=fix, nearest=near)
    chosen = recipe or RECIPES[name]
    mark = fingerprint(chosen, text_dir)
    files, made_of = read_shipped(text_dir / name) if isinstance(chosen, Recipe) else ({}, "")
    if files and made_of != mark:
        say(f"{text_dir / name} was made of another text or recipe")
        files = {}
    if files:  # twelve hex digits that change with any file
        mark = hashlib.sha256(json.dumps([made_of, files]).encode()).hexdigest()[:12]
    folder = cache_dir / f"{name}-{mark}"
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
            elif isinstance(chosen, Recipe):
                from sftplay.model.base_training import make_base

                make_base(folder, recipe=chosen, files=text_files(text_dir), say=say)
            else:
                make_digits(folder, chosen, say=say)
    check_files(folder, files, fix=f"remove the copy, the next start makes it again: rm -r {folder}")
    return folder


def fingerprint(recipe: Recipe | DigitsRecipe, text_dir: Path = TEXT_DIR) -> str:
    """Return twelve hex digits that change with the shipped text, the chat template or the recipe."""
    parts = [json.dumps(asdict(recipe), sort_keys=True), CHATML]
    if isinstance(recipe, Recipe):
        parts += [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in text_files(text_dir)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def text_files(text_dir: Path) -> list[Path]:
    """Return the shipped texts in the order of their names."""
    if files := sorted(text_dir.glob("*.txt")):
        return files
    fix = "run from a full checkout, or name a model folder instead of builtin:tiny"
    raise MachineError(f"the text of the built-in models is missing from {text_dir}", where="model.name", fix=fix)

"""The weights of a built-in model as files of the repository, each known by its hash, so that nobody trains them."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sftplay.atomic import whole_folder, write_text
from sftplay.errors import MachineError

MANIFEST = "made.json"
"""The origin of the files in its folder, and the sha256 of each."""

RESTORE = "restore it from the repository: git checkout -- data/base"


@dataclass(frozen=True)
class ShippedModel:
    """A folder of model files and the hashes that they must have."""

    folder: Path
    files: dict[str, str]
    fingerprint: str
    """Of the recipe, the texts and the template that made it."""

    @property
    def mark(self) -> str:
        """Twelve hex digits that change with any file."""
        return hashlib.sha256(json.dumps([self.fingerprint, self.files]).encode()).hexdigest()[:12]

    def copy_to(self, folder: Path) -> None:
        """Copy it to `folder`, whole or not at all. Raises what `check_files` raises."""
        check_files(self.folder, self.files, fix=RESTORE)
        with whole_folder(folder) as scratch:
            for name in self.files:
                shutil.copyfile(self.folder / name, scratch / name)


def read_shipped(folder: Path) -> ShippedModel | None:
    """Return the model that is shipped in `folder`; None where there is no such folder.

    Raises:
        MachineError: its manifest is missing or cannot be read.
    """
    if not folder.is_dir():
        return None
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return ShippedModel(folder, dict(content["sha256"]), content["fingerprint"])
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

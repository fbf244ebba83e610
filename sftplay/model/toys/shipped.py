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
        """Copy it to `folder`, whole or not at all.

        Raises:
            MachineError: a shipped file is missing, or is not the one that was shipped.
        """
        check_files(self.folder, self.files, fix="restore it from the repository: git checkout -- data/base")
        with whole_folder(folder) as scratch:
            for name in self.files:
                shutil.copyfile(self.folder / name, scratch / name)

    def check_copy(self, folder: Path) -> None:
        """Refuse a copy that has changed.

        Raises:
            MachineError: a file is missing, or has another content.
        """
        check_files(folder, self.files, fix=f"remove the copy, the next start makes it again: rm -r {folder}")


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
        fix = "restore it from the repository: git checkout -- data/base"
        raise MachineError(what, where=str(path), fix=fix) from None


def write_manifest(folder: Path, *, fingerprint: str, recipe: dict[str, Any], made_with: dict[str, str]) -> None:
    """Write a list of the files of `folder` with their hashes and their origin."""
    hashes = {path.name: compute_sha256(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
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
        if (found := compute_sha256(path)) != expected:
            what = f"not the file that was shipped: sha256 {found[:12]}..., expected {expected[:12]}..."
            raise MachineError(what, where=str(path), fix=fix)


def compute_sha256(path: Path) -> str:
    """Return the hex sha256 of a file's content."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()

"""The digest of a large file is kept until the file changes, and is always that of its bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sftplay.data import cache
from sftplay.data.cache import content_digest, kept_digest


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of files that are read; every file counts as large, and as changed long ago."""
    read: list[str] = []
    monkeypatch.setattr(cache, "WORTH_BYTES", 1)
    monkeypatch.setattr(cache, "GRAIN_NS", -(10**12))
    monkeypatch.setattr(cache, "content_digest", lambda path: read.append(path) or content_digest(path))
    return read


def test_an_unchanged_file_is_read_once_and_a_changed_one_again_as_with_a_broken_note(
    tmp_path: Path, hashed: list[str]
):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n')
    first = kept_digest(str(file), str(tmp_path / "kept"))
    assert kept_digest(str(file), str(tmp_path / "kept")) == first == content_digest(str(file))
    assert len(hashed) == 1
    status = file.stat()
    file.write_text('{"text": "b"}\n')
    while file.stat().st_ctime_ns == status.st_ctime_ns:  # within the clock's grain
        os.utime(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # its size and time are as before
    changed = kept_digest(str(file), str(tmp_path / "kept"))
    assert changed == content_digest(str(file)) != first
    assert len(hashed) == 2
    (note,) = (tmp_path / "kept" / cache.DIGESTS).iterdir()
    note.write_text('{"stamps": ')
    assert kept_digest(str(file), str(tmp_path / "kept")) == changed
    assert len(hashed) == 3


def test_a_file_that_joins_a_folder_changes_its_digest(tmp_path: Path, hashed: list[str]):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}\n')
    first = kept_digest(str(folder), str(tmp_path / "kept"))
    (folder / "b.jsonl").write_text('{"text": "b"}\n')
    assert kept_digest(str(folder), str(tmp_path / "kept")) == content_digest(str(folder)) != first
    assert len(hashed) == 2

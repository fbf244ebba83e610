"""Digests of starting weights differ where the weights do, for a file read whole and for one read in chunks."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from sftplay.model import start_point
from sftplay.model.start_point import weights_digest, weights_digests


def test_digest_of_a_file_is_sha256_of_its_size_and_bytes_and_not_of_its_time(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    content = os.urandom(3 * start_point.CHUNK_BYTES + 17)
    path.write_bytes(content)
    expected = hashlib.sha256(str(len(content)).encode() + content).hexdigest()
    assert weights_digest(path) == expected
    os.utime(path, (1, 1))
    assert weights_digest(path) == expected


def test_of_a_large_file_both_ends_and_pieces_between_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(start_point, "CHUNK_BYTES", 10)
    path, content = tmp_path / "model.safetensors", bytearray(1000)
    path.write_bytes(content)
    before = weights_digest(path, whole_bytes=100, chunks=3)
    # Three chunks of 10 bytes, evenly spaced: they begin at 0, 495 and 990.
    for place, is_seen in ((0, True), (9, True), (10, False), (495, True), (505, False), (990, True), (999, True)):
        changed = bytearray(content)
        changed[place] = 1
        path.write_bytes(changed)
        assert (weights_digest(path, whole_bytes=100, chunks=3) != before) is is_seen, place


def test_weights_configs_and_adapters_of_a_folder_count_and_names_on_a_hub_do_not(tmp_path: Path):
    for name in ("model-1.safetensors", "config.json", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text(name)
    assert set(weights_digests(str(tmp_path))) == {str(tmp_path / n) for n in ("model-1.safetensors", "config.json")}
    assert weights_digests("org/model") == weights_digests(None) == {}

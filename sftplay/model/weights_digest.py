"""Digests of the files of weights that a run starts from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from sftplay.model.source import ADAPTER_CONFIG

WHOLE_BYTES = 2**31
"""Up to here a file of weights is read to its end, in a second or two; of a larger one only chunks are."""

CHUNKS, CHUNK_BYTES = 512, 2**20
"""Evenly spaced over a large file, with its two ends. Training changes every matrix, and so every chunk; weights
changed by hand in a few places can go unnoticed."""


def weights_digests(folder: str | None, *, whole_bytes: int = WHOLE_BYTES, chunks: int = CHUNKS) -> dict[str, str]:
    """Return path -> hex sha256 of each weight file in a folder; empty for a name on a hub, or None."""
    if folder is None or not Path(folder).is_dir():
        return {}
    # The files that say which numbers a run starts from.
    patterns = ("*.safetensors", "*.bin", "config.json", ADAPTER_CONFIG)
    files = {path for pattern in patterns for path in Path(folder).glob(pattern)}
    return {str(path): weights_digest(path, whole_bytes=whole_bytes, chunks=chunks) for path in sorted(files)}


def weights_digest(path: Path, *, whole_bytes: int = WHOLE_BYTES, chunks: int = CHUNKS) -> str:
    """Return the hex sha256 of the file's size and bytes; above `whole_bytes`, of `chunks` chunks of them."""
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    starts: Iterable[int] = range(0, size_bytes, CHUNK_BYTES)
    if size_bytes > whole_bytes:
        starts = ((size_bytes - CHUNK_BYTES) * n // (chunks - 1) for n in range(chunks))
    with path.open("rb") as handle:
        for start in starts:
            handle.seek(start)
            digest.update(handle.read(CHUNK_BYTES))
    return digest.hexdigest()


def digest_result(result: Path | None) -> str | None:
    """Return a short digest of the trained weights in a run's result folder; None where there are none."""
    files = [] if result is None else sorted(result.glob("*.safetensors"))
    return "-".join(weights_digest(path)[:16] for path in files) or None

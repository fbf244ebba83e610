"""Fingerprints of the files that hold a model's weights; a hub name has none, its revision pins it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "config.json", "adapter_config.json")
"""Files of a folder that say which numbers a run starts from."""

WHOLE_BYTES = 2**31
"""Up to here a file of weights is read to its end, in a second or two; of a larger one only chunks are."""

CHUNKS, CHUNK_BYTES = 512, 2**20
"""Evenly spaced over a large file, its two ends among them. Training changes every matrix, so no chunk stays as it was;
weights changed by hand in a few places can go unseen."""


def weights_digests(folder: str | None, *, whole_bytes: int = WHOLE_BYTES, chunks: int = CHUNKS) -> dict[str, str]:
    """Path -> hex sha256 of each file of weights in a folder; empty for a name on a hub, or None."""
    if folder is None or not Path(folder).is_dir():
        return {}
    files = {path for pattern in WEIGHTS for path in Path(folder).glob(pattern)}
    return {str(path): weights_digest(path, whole_bytes=whole_bytes, chunks=chunks) for path in sorted(files)}


def weights_digest(path: Path, *, whole_bytes: int = WHOLE_BYTES, chunks: int = CHUNKS) -> str:
    """Hex sha256 of the file's size and of its bytes; of one above `whole_bytes`, of `chunks` of them."""
    size_bytes = path.stat().st_size
    digest = hashlib.sha256(str(size_bytes).encode())
    with path.open("rb") as handle:
        for start in _starts(size_bytes, whole_bytes, chunks=chunks):
            handle.seek(start)
            digest.update(handle.read(CHUNK_BYTES))
    return digest.hexdigest()


def _starts(size_bytes: int, whole_bytes: int, *, chunks: int) -> Iterator[int]:
    if size_bytes <= whole_bytes:
        return iter(range(0, size_bytes, CHUNK_BYTES))
    last = size_bytes - CHUNK_BYTES
    return (last * n // (chunks - 1) for n in range(chunks))

"""Count the rows of files where that is possible without parsing them: for the estimate of the time left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sftplay.data.read.files import find_suffix, list_files
from sftplay.errors import DataError


def count_rows(paths: Sequence[str]) -> int | None:
    """Return about how many rows the files have; None if only parsing can count them."""
    try:
        counts = [_count(file) for path in paths for file in list_files(path)]
    except (DataError, OSError):  # a data set of the hub, or what reading will refuse
        return None
    known = [count for count in counts if count is not None]
    return sum(known) if counts and len(known) == len(counts) else None


def _count(file: Path) -> int | None:
    kind = find_suffix(file)
    if kind == ".parquet":
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(file).num_rows)
        except (pyarrow.ArrowException, ValueError):
            return None
    if kind not in (".jsonl", ".ndjson"):
        return None
    ends, last = 0, b"\n"
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            ends, last = ends + block.count(b"\n"), block
    return ends + (not last.endswith(b"\n"))

"""Arrow streams of token rows: how examples lie on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sftplay.data.prepare.batch import Example
from sftplay.data.records import Source

SCHEMA = pa.schema([("input_ids", pa.list_(pa.int64())), ("labels", pa.list_(pa.int64())), ("row", pa.int64())])
PLACES = pa.schema([("path", pa.string()), ("line", pa.int64()), ("record", pa.int64())])
"""A second stream beside each row stream: where its examples came from."""


class RowWriter:
    """Writes examples and, in a second file, their places; closes both at the end of a `with`."""

    def __init__(self, rows: Path, places: Path) -> None:
        self._rows = pa.ipc.new_stream(str(rows), SCHEMA)
        self._places = pa.ipc.new_stream(str(places), PLACES)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: Any) -> None:
        self._rows.close()
        self._places.close()

    def write(self, examples: Sequence[Example], rows: Sequence[int], *, places: Sequence[Source]) -> None:
        """Append the examples; `rows` and `places` are those of their records."""
        if not examples:
            return
        columns = [_column([example.ids for example in examples]), _column([example.labels for example in examples])]
        self._rows.write_batch(pa.record_batch([*columns, pa.array(rows, pa.int64())], schema=SCHEMA))
        paths = pa.array([place.path for place in places])
        numbers = [pa.array([getattr(place, name) for place in places], pa.int64()) for name in ("line", "record")]
        self._places.write_batch(pa.record_batch([paths, *numbers], schema=PLACES))


def _column(lists: Sequence[bytes]) -> pa.ListArray:
    """A column of int64 lists from int32 bytes."""
    flat = np.frombuffer(b"".join(lists), np.int32).astype(np.int64)
    ends = np.cumsum([0, *(len(each) // 4 for each in lists)], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat))

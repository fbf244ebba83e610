"""The eight ways to turn and mirror a grid, and the way back of each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)
"""The way that undoes each."""

WAYS = range(8)


def turned(grid: NDArray[Any], way: int) -> NDArray[Any]:
    """The grid, 0 as it is, 1 to 3 turned left so often, 4 and 5 mirrored, 6 and 7 mirrored along a diagonal."""
    if way < 4:
        return np.rot90(grid, way)
    return (np.fliplr(grid), np.flipud(grid), grid.T, np.fliplr(np.rot90(grid)))[way - 4]

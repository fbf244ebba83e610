"""Grids of ARC as rows of 900 tokens, and back: a canvas of 30 x 30 with lines where the grid ends."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sftplay.data.puzzles.arc.task import LARGEST, Grid
from sftplay.data.puzzles.writer import Alphabet

PAD, END, FIRST_COLOUR = 0, 1, 2
ALPHABET = Alphabet(kind="arc", symbols=" |0123456789", shape=(LARGEST, LARGEST))


def on_canvas(grid: Grid, *, top: int = 0, left: int = 0) -> Grid:
    """The tokens of a grid, [900]. A line of END lies below it and right of it, where there is room."""
    canvas = np.zeros((LARGEST, LARGEST), np.uint8)
    bottom, right = top + grid.shape[0], left + grid.shape[1]
    canvas[top:bottom, left:right] = grid + FIRST_COLOUR
    canvas[bottom : bottom + 1, left:right] = END
    canvas[top:bottom, right : right + 1] = END
    return canvas.ravel()


def cropped(tokens: NDArray[Any]) -> Grid:
    """The largest rectangle of colours that begins in the top left corner; of two equal ones that with fewer rows.

    It is empty, with the shape [0, 0], where no colour stands in the corner.
    """
    canvas = np.asarray(tokens).reshape(LARGEST, LARGEST)
    is_colour = (canvas >= FIRST_COLOUR) & (canvas < FIRST_COLOUR + 10)
    widths = np.minimum.accumulate(np.cumprod(is_colour, axis=1).sum(axis=1))
    areas = widths * np.arange(1, LARGEST + 1)
    height = int(areas.argmax()) + 1
    if areas[height - 1] == 0:
        return np.zeros((0, 0), np.uint8)
    return (canvas[:height, : widths[height - 1]] - FIRST_COLOUR).astype(np.uint8)

"""Draws the planes of a record, such as those of a board, as grids of characters in a terminal or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
Pixels = npt.NDArray[np.uint8]
"""(height, width, 3): red, green, blue."""

_REAL = "biufV"  # V: of ml_dtypes, such as bfloat16, and numpy's bytes and structures, which are left out
_GAP = "   "
_MOST_SIDE = 64
_MARGIN = 4
_RED, _BLUE, _WHITE = (np.array(colour, np.float64) for colour in ((103, 0, 31), (5, 48, 97), (255, 255, 255)))
_GREY = 190


def planes_of(value: Values) -> Values | None:
    """A field of two or three axes as (planes, rows, columns).

    None: other axes, values that are no real numbers, or a side of more than 64.

    The planes are the last axis, as in (8, 8, 24), unless only the first can be: (24, 8, 8).
    """
    if value.dtype.kind not in _REAL or issubclass(value.dtype.type, np.void) or value.ndim not in (2, 3):
        return None
    if value.ndim == 2:
        value = value[None]
    elif not (value.shape[1] == value.shape[2] != value.shape[0]):
        value = np.moveaxis(value, -1, 0)
    return value if max(value.shape[1:]) <= _MOST_SIDE else None


def draw(planes: Values, width: int) -> str:
    """Grids of ■ (above 0), □ (below 0) and · (0), as many side by side as ``width`` characters hold.

    A plane with values of different sizes besides 0 is drawn as numbers. Planes that are all 0 are only listed.
    """
    grids, empty = [], []
    for number, plane in enumerate(np.asarray(planes, np.float64)):
        if not plane.any():
            empty.append(number)
            continue
        grids.append(_grid(number, plane))
    lines = []
    while grids:
        row = [grids.pop(0)]
        while grids and sum(map(_width, [*row, grids[0]])) + len(row) * len(_GAP) <= width:
            row.append(grids.pop(0))
        for parts in zip(*row, strict=True):
            lines.append(_GAP.join(part.ljust(_width(grid)) for part, grid in zip(parts, row, strict=True)).rstrip())
        lines.append("")
    if empty:
        lines.append(f"all 0: planes {', '.join(map(str, empty))}")
    return "\n".join(lines).rstrip("\n")


def _grid(number: int, plane: npt.NDArray[np.float64]) -> list[str]:
    """A title, and a line of text for each row."""
    sizes = np.unique(np.abs(plane[plane != 0]))
    if len(sizes) == 1 and not np.isnan(sizes[0]):
        rows = [" ".join("■" if each > 0 else "□" if each < 0 else "·" for each in row) for row in plane]
        value = "" if sizes[0] == 1 else f" (±{sizes[0]:.4g})" if (plane < 0).any() else f" ({sizes[0]:.4g})"
    else:
        texts = [[f"{each:.3g}" for each in row] for row in plane]
        longest = max(len(text) for row in texts for text in row)
        rows, value = [" ".join(text.rjust(longest) for text in row) for row in texts], ""
    return [f"plane {number}{value}", *rows]


def _width(grid: list[str]) -> int:
    return max(map(len, grid))


def picture(planes: Values, tile: int = 96, columns: int = 6) -> Pixels:
    """(height, width, 3): one grid for each plane, ``columns`` side by side: red above 0, blue below, white at 0.

    The value of a plane that is farthest from 0 has the full colour; NaN and infinities are white. Each value is a
    square of several pixels, so that a plane is about ``tile`` pixels wide.
    """
    values = np.asarray(planes, np.float64)
    values = np.where(np.isfinite(values), values, 0.0)
    most = np.abs(values).max(axis=(1, 2), keepdims=True, initial=0.0)
    shares = (values / np.where(most > 0, most, 1.0))[..., None]
    ends = np.where(shares > 0, _RED, _BLUE)
    colours = (_WHITE + np.abs(shares) * (ends - _WHITE)).round().astype(np.uint8)
    number, rows, width = colours.shape[:3]
    side = max(2, tile // max(rows, width))
    tiles = colours.repeat(side, axis=1).repeat(side, axis=2)
    columns = min(columns, number)
    lines = -(-number // columns)
    high, wide = rows * side + _MARGIN, width * side + _MARGIN
    sheet = np.full((lines * high + _MARGIN, columns * wide + _MARGIN, 3), _GREY, np.uint8)
    for place, tile in enumerate(tiles):
        line, column = divmod(place, columns)
        top, left = line * high + _MARGIN, column * wide + _MARGIN
        sheet[top : top + rows * side, left : left + width * side] = tile
    return sheet


def stacked(pictures: Sequence[Pixels]) -> Pixels:
    """One picture, with ``pictures`` one below the other."""
    width = max(one.shape[1] for one in pictures)
    wide = [np.pad(one, ((0, 0), (0, width - one.shape[1]), (0, 0)), constant_values=_GREY) for one in pictures]
    return np.concatenate(wide)

"""Planes of a record, such as those of a board: small grids of characters in a terminal, or a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import OptionError

Values = npt.NDArray[Any]
_GAP = "   "
_MOST_SIDE = 64


def planes_of(value: Values) -> Values | None:
    """(planes, rows, columns) of a field of two or three axes; None for one that is no planes.

    The planes are the last axis, as in (8, 8, 24), unless only the first can be: (24, 8, 8).
    """
    if value.dtype.kind == "S" or value.ndim not in (2, 3):
        return None
    if value.ndim == 2:
        value = value[None]
    elif not (value.shape[1] == value.shape[2] != value.shape[0]):
        value = np.moveaxis(value, -1, 0)
    return value if max(value.shape[1:]) <= _MOST_SIDE else None


def draw(planes: Values, width: int) -> str:
    """Grids of ■ (above 0), □ (below 0) and · (0), as many side by side as ``width`` characters hold.

    Planes of other numbers than one besides 0 are written as numbers; of those that are all 0, the numbers are said.
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
    if len(sizes) == 1:
        rows = [" ".join("■" if each > 0 else "□" if each < 0 else "·" for each in row) for row in plane]
        value = "" if sizes[0] == 1 else f" (±{sizes[0]:.4g})" if (plane < 0).any() else f" ({sizes[0]:.4g})"
    else:
        texts = [[f"{each:.3g}" for each in row] for row in plane]
        longest = max(len(text) for row in texts for text in row)
        rows, value = [" ".join(text.rjust(longest) for text in row) for row in texts], ""
    return [f"plane {number}{value}", *rows]


def _width(grid: list[str]) -> int:
    return max(map(len, grid))


def write_png(fields: dict[str, Values], path: Path, title: str) -> None:
    """A picture of all planes of all ``fields``, (planes, rows, columns). Raises OptionError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # without pyplot: no display is looked for
    except ModuleNotFoundError:
        raise OptionError("--png needs matplotlib", hint="pip install 'loaderd[pictures]'") from None
    named = [(f"{name} {number}", plane) for name, planes in fields.items() for number, plane in enumerate(planes)]
    if not named:
        raise OptionError("--png needs a field with planes, of two or three axes, and the schema has none")
    columns = min(6, len(named))
    rows = -(-len(named) // columns)
    figure = Figure(figsize=(1.6 * columns, 1.8 * rows + 0.4), layout="constrained")
    figure.suptitle(title)
    for place in range(rows * columns):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.set_axis_off()
        if place < len(named):
            name, plane = named[place]
            values = np.asarray(plane, np.float64)
            most = float(np.abs(values).max()) or 1.0
            axes.imshow(values, cmap="RdBu_r", vmin=-most, vmax=most)
            axes.set_title(name, fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--png {path} cannot be written: {error}") from None

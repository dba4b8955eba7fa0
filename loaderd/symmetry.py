"""Boards turned and mirrored at random, as a field of a schema."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.randomness import RecordRandom
from loaderd.schema import Derived, Shape

AnyArray = npt.NDArray[Any]


def board_symmetry(
    field: str,
    shape: Shape,
    *,
    dtype: Any = "float32",
    symmetries: Sequence[int] = range(8),
    stream: str = "symmetry",
) -> Derived:
    """``field``, of the same ``shape``, under a symmetry of the square that is drawn anew for each record and epoch.

    ``shape`` says where the squares of the board of S × S are (8 × 8, 19 × 19, or any other):

    - (S, S) or (S, S, C): rows, columns, and C channels of each square, which stay together;
    - (S·S,), row by row, or (S·S + 1,) with a pass move behind them, which stays where it is: policies.

    Symmetry t of 0…7 mirrors left and right (``np.flip`` of the columns) if t >= 4, and then turns by t % 4 quarters
    as ``np.rot90`` does. ``symmetries`` are those to choose from, all equally likely: for chess ``(0, 4)``, with a
    mirror but no turns (and not with castling rights, nor for moves by name: those are other functions).

    Fields of the same ``stream`` and ``symmetries`` are turned alike. A function of your own joins in as
    ``Derived(function, …, random=stream)``: ``random.integers(0, len(symmetries))``, drawn first, is the number in
    ``symmetries`` of each record's symmetry. Raises SchemaError for another shape or symmetry.

    Costs 0.95 µs a record for (8, 8, 24) of float32, 2 for (19, 19, 8), 0.7 for (362,). A ``field`` of int8, cast to
    ``dtype`` when it is turned, costs 0.5 and 1.2.
    """
    chosen = tuple(int(t) for t in symmetries)
    if not chosen or not set(chosen) <= set(range(8)):
        raise SchemaError(f"board_symmetry: symmetries must be some of 0…7, got {symmetries!r}")
    sources = np.stack([_sources(shape, symmetry) for symmetry in chosen])
    return Derived(partial(_turn, sources), (field,), shape, dtype, random=stream)


def _sources(shape: Shape, symmetry: int) -> npt.NDArray[np.intp]:
    """intp, (squares,) with the pass move if there is one: from which square the symmetry takes each."""
    size, has_pass = _board_of(shape)
    squares = np.arange(size * size, dtype=np.intp).reshape(size, size)
    turned = np.rot90(squares[:, ::-1] if symmetry >= 4 else squares, symmetry % 4).ravel()
    return np.append(turned, size * size) if has_pass else turned


def _board_of(shape: Shape) -> tuple[int, bool]:
    """The board's side, and whether there is a pass move behind it."""
    dims = tuple(shape)
    if len(dims) in (2, 3) and dims[0] == dims[1]:
        return dims[0], False
    if len(dims) == 1:
        side = math.isqrt(dims[0])
        if dims[0] - side * side in (0, 1):
            return side, dims[0] > side * side
    raise SchemaError(f"board_symmetry: shape must be (S, S), (S, S, C), (S·S,) or (S·S + 1,), got {shape!r}")


def _turn(sources: npt.NDArray[np.intp], board: AnyArray, random: RecordRandom) -> AnyArray:
    """``board``, (n, …), each record's squares taken as a row of ``sources``, (symmetries, squares), says."""
    chosen = random.integers(0, len(sources))
    squares = sources[chosen]
    squares += np.arange(0, squares.size, squares.shape[1])[:, None]
    channels = math.prod(board.shape[1:]) // squares.shape[1]
    return board.reshape(squares.size, channels).take(squares.ravel(), axis=0, mode="clip").reshape(board.shape)

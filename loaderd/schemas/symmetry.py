"""Boards turned and mirrored at random, as a field of a schema."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence, Sized
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.randomness import RecordRandom
from loaderd.schema import Derived, Schema, Shape
from loaderd.schema.features import check_shape
from loaderd.schema.permute import permute

Layout = Literal["NHWC", "NCHW"]


def board_symmetry(
    field: str,
    shape: Shape,
    *,
    dtype: Any = "float32",
    symmetries: Sequence[int] = range(8),
    stream: str = "symmetry",
    layout: Layout | None = None,
) -> Derived:
    """``field``, of the same ``shape``, under a symmetry of the square that is drawn anew for each record and epoch.

    ``shape`` says where the squares of the board of S × S are (8 × 8, 19 × 19, or any other):

    - (S, S) or (S, S, C): rows, columns, and C channels of each square, which stay together;
    - (C, S, S): C planes, as PyTorch and KataGo have them; for (S, S, S), ``layout`` must say "NHWC" or "NCHW";
    - for policies: (S·S,), row by row, or (S·S + 1,) with a pass move behind the squares, which stays where it is; or
      with ``layout="NCHW"`` several of these, (C, S·S) or (C, S·S + 1).

    Symmetry t of 0…7 mirrors left and right (``np.flip`` of the columns) if t >= 4, and then turns by t % 4 quarters
    as ``np.rot90`` does. ``symmetries`` are those to choose from, all equally likely. For chess, ``(0, 4)`` allows a
    mirror but no turns. That does not fit castling rights or moves by name, which need functions of their own; for
    the boards of Leela Chess Zero, use ``loaderd.schemas.lc0(symmetries=(0, 1))``.

    Fields of the same ``stream`` and ``symmetries`` are turned alike. To turn another field with them, write
    ``Derived(function, …, random=stream)``: ``random.integers(0, len(symmetries))``, drawn first, gives the index in
    ``symmetries`` of each record's symmetry. Raises SchemaError for another shape or symmetry.

    Costs 0.95 µs a record for (8, 8, 24) of float32, 2 for (19, 19, 8), 0.7 for (362,). The first two cost 0.5 and
    1.2 for a ``field`` of int8, which is cast to ``dtype`` when it is turned.
    """
    chosen = check_symmetries(symmetries, range(8), "board_symmetry")
    shape = check_shape(shape, "board_symmetry")
    planes_first, size, has_pass = _board_of(shape, layout)
    sources = np.stack([_sources(size, has_pass, symmetry) for symmetry in chosen])
    channels = 1 if planes_first else math.prod(shape) // sources.shape[1]
    turn = partial(permute, partial(one_of, len(sources)), sources, channels)
    return Derived(turn, (field,), shape, dtype, random=stream)


def with_symmetries(schema: Schema, names: Sequence[str], symmetries: Sequence[int], layout: Layout) -> Schema:
    """``schema`` with the fields ``names`` as float32, turned alike within each record. Raises SchemaError."""
    fields = dict(schema.fields)
    intermediates = dict(schema.intermediates)
    for name in names:
        stored = f"{name} (unturned)"
        intermediates[stored] = schema.fields[name]
        fields[name] = board_symmetry(stored, schema.spec_of(name).shape, symmetries=symmetries, layout=layout)
    return Schema(schema.features, fields, intermediates)


def has_any(symmetries: Sequence[int]) -> bool:
    """False for an empty sequence, with which records come as stored; any other value is for check_symmetries."""
    return not isinstance(symmetries, Sized) or len(symmetries) > 0


def check_symmetries(symmetries: Sequence[int], known: Sequence[int], of: str, why: str = "") -> tuple[int, ...]:
    """``symmetries`` as a tuple. Raises SchemaError, with ``why`` as its hint, unless all are among ``known``."""
    try:
        chosen = tuple(map(operator.index, symmetries))
    except TypeError:
        chosen = ()
    if not chosen or not set(chosen) <= set(known):
        some = "0…7" if len(known) == 8 else ", ".join(map(str, known))
        raise SchemaError(f"{of}: symmetries must be some of {some}, got {symmetries!r}", hint=why)
    return chosen


def _sources(size: int, has_pass: bool, symmetry: int) -> npt.NDArray[np.intp]:
    """intp, (squares,), with the pass move if there is one: from which square the symmetry takes each value."""
    squares = np.arange(size * size, dtype=np.intp).reshape(size, size)
    turned = np.rot90(squares[:, ::-1] if symmetry >= 4 else squares, symmetry % 4).ravel()
    return np.append(turned, size * size) if has_pass else turned


def _board_of(shape: Shape, layout: Layout | None) -> tuple[bool, int, bool]:
    """Whether planes come before squares; the board's side; whether there is a pass move behind it."""
    if layout is not None and not (isinstance(layout, str) and layout in ("NHWC", "NCHW")):
        raise SchemaError(f'board_symmetry: layout must be "NHWC" or "NCHW", got {layout!r}')
    if len(shape) == 3:
        can_be: list[Layout] = []
        can_be += ["NHWC"] if shape[0] == shape[1] else []
        can_be += ["NCHW"] if shape[1] == shape[2] else []
        if len(can_be) == 2 and layout is None and shape[0] > 1:
            raise SchemaError(
                f"board_symmetry: shape {shape} may be of either layout", hint='Pass layout="NHWC" or "NCHW".'
            )
        fits = can_be if layout is None else [each for each in can_be if each == layout]
        if fits:
            return fits[0] == "NCHW", shape[1], False
    if len(shape) == 2 and shape[0] == shape[1]:
        return False, shape[0], False
    if len(shape) == 1 or (len(shape) == 2 and layout == "NCHW"):
        side = math.isqrt(shape[-1])
        if shape[-1] - side * side in (0, 1):
            return len(shape) == 2, side, shape[-1] > side * side
    of = "" if layout is None else f" of layout {layout}"
    raise SchemaError(
        f"board_symmetry: shape must be (S, S), (S, S, C), (C, S, S), (S·S,) or (S·S + 1,){of}, got {shape!r}",
        hint="A board that is no square cannot be turned; and what has no value a square, such as moves by name, "
        "needs a function of its own: Derived(…, random=stream).",
    )


def one_of(count: int, random: RecordRandom) -> npt.NDArray[np.int64]:
    """int64, (n,): numbers from 0 to ``count - 1``."""
    return random.integers(0, count)

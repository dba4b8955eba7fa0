"""Shapes that a number of values, or of bits, can have: boards, stacks of planes, pictures. Pure arithmetic.

Whoever proposes a schema asks here: :func:`fields_of` makes the fields of what is stored, for ``loaderd inspect
--features`` and for ``loaderd_tf.schema_from_features`` alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from loaderd.schema.features import Feature, PackedBits, Shape
from loaderd.schema.fields import Array, Bits, Field

_BOARD_SIDES = (8, 9, 10, 13, 19)
_SIDES_WITH_REST = (8, 9, 19)
_MOST_PLANES = 1024
_MOST_REST_BITS = 32
_LEAST_PICTURE_SIDE = 16
_PICTURE_CHANNELS = (1, 3, 4)


def board_shapes(number: int) -> list[Shape]:
    """Shapes of boards and of stacks of planes that have ``number`` values: planes last, planes first."""
    found: list[Shape] = []
    for side in _BOARD_SIDES:
        planes, rest = divmod(number, side * side)
        if not rest and 0 < planes <= _MOST_PLANES:
            found += [(side, side)] if planes == 1 else [(side, side, planes), (planes, side, side)]
    return list(dict.fromkeys(found))


def picture_shapes(number: int) -> list[Shape]:
    """Shapes of square pictures of one, three or four channels that have ``number`` values."""
    sides = [(math.isqrt(number // channels), channels) for channels in _PICTURE_CHANNELS]
    return [
        (side, side) if channels == 1 else (side, side, channels)
        for side, channels in sides
        if side >= _LEAST_PICTURE_SIDE and side * side * channels == number
    ]


def bit_layouts(name: str, num_bits: int) -> list[tuple[Bits, ...]]:
    """Fields that read the boards in ``num_bits`` bits of the feature ``name``, the likeliest layout first.

    The bits are boards and nothing else; or, in whole bytes, boards with up to seven bits of padding behind them, or
    planes with padding behind each. Last, boards with up to 32 other bits behind them: two fields.
    """
    layouts: list[tuple[Bits, ...]] = [(Bits(name, shape),) for shape in board_shapes(num_bits)]
    if not num_bits % 8:
        layouts += [(Bits(name, shape),) for padding in range(1, 8) for shape in board_shapes(num_bits - padding)]
        layouts += _padded_planes(name, num_bits // 8)
    for side in _SIDES_WITH_REST:
        planes, rest = divmod(num_bits, side * side)
        if 1 < planes <= _MOST_PLANES and 7 < rest <= _MOST_REST_BITS:
            others = Bits(name, (rest,), start=num_bits - rest)
            layouts += [(Bits(name, shape), others) for shape in ((side, side, planes), (planes, side, side))]
    return layouts


def _padded_planes(name: str, num_bytes: int) -> Iterator[tuple[Bits, ...]]:
    for side in _BOARD_SIDES:
        plane_bytes = -(-side * side // 8)
        planes, rest = divmod(num_bytes, plane_bytes)
        if side * side % 8 and not rest and 1 < planes <= _MOST_PLANES:
            yield (Bits(name, (planes, side, side), plane_bytes=plane_bytes),)


def fields_of(features: Mapping[str, Feature]) -> dict[str, Field]:
    """A field for each stored feature, of its name: bits in the first shape of a board that they have, else flat.

    Other values have the shape in which they are stored.
    """
    return {
        name: Bits(name, next(iter(board_shapes(feature.num_bits)), (feature.num_bits,)))
        if isinstance(feature, PackedBits)
        else Array(name)
        for name, feature in features.items()
    }

"""The shapes that a number of values or bits can have."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.schema import Array, Bits, Float, Int64, PackedBits, Raw
from loaderd.schema.board_shapes import bit_layouts, board_shapes, fields_of, picture_shapes

SIDES = st.sampled_from([8, 9, 10, 13, 19])


@pytest.mark.parametrize(
    ("number", "boards", "pictures"),
    [
        (1536, [(8, 8, 24), (24, 8, 8)], []),
        (361, [(19, 19)], [(19, 19)]),
        (362, [], []),
        (6137, [(19, 19, 17), (17, 19, 19)], []),
        (784, [], [(28, 28)]),
        (3072, [(8, 8, 48), (48, 8, 8)], [(32, 32, 3)]),
        (8 * 8 * 81, [(8, 8, 81), (81, 8, 8), (9, 9, 64), (64, 9, 9)], [(72, 72), (36, 36, 4)]),
    ],
)
def test_shapes_of_numbers(number: int, boards: list[tuple[int, ...]], pictures: list[tuple[int, ...]]):
    assert (board_shapes(number), picture_shapes(number)) == (boards, pictures)


@settings(max_examples=500, deadline=None)
@given(number=st.integers(1, 1 << 20))
def test_every_shape_has_the_values(number: int):
    shapes = [*board_shapes(number), *picture_shapes(number)]
    assert all(math.prod(shape) == number and shape.count(max(shape)) < 4 for shape in shapes)
    sides = [side for side in (8, 9, 10, 13, 19) if number % (side * side) == 0 and number // (side * side) <= 1024]
    assert len({tuple(sorted(shape)) for shape in board_shapes(number)}) == len(sides)


@settings(max_examples=300, deadline=None)
@given(st.data(), SIDES, st.integers(1, 40), st.booleans(), st.integers(0, 2**32 - 1))
def test_packed_boards_are_among_the_layouts(
    data: st.DataObject, side: int, planes: int, planes_first: bool, seed: int
):
    """However they were packed: end to end, each plane in bytes of its own, or with other bits behind them."""
    shape = (planes, side, side) if planes_first else (side, side, planes)
    boards = np.random.default_rng(seed).random(shape) < 0.5
    ways = ["end to end"]
    if planes_first and planes > 1 and side % 8:
        ways.append("padded planes")
    if planes > 1 and side in (8, 9, 19) and (num_rest := 16 + -(side * side * planes) % 8) < side * side:
        ways.append("rest")
    way = data.draw(st.sampled_from(ways))
    if way == "padded planes":
        packed = np.packbits(boards.reshape(planes, -1), axis=1).ravel()
    else:
        others = np.ones(num_rest if way == "rest" else 0, bool)
        packed = np.packbits([*boards.ravel(), *others])
    layouts = bit_layouts("x", 8 * len(packed))
    bits = np.unpackbits(packed)
    read = [bits[layout[0].sources].reshape(layout[0].shape) for layout in layouts]
    assert any(np.array_equal(each, boards.squeeze()) for each in read)
    for layout in layouts:
        stops = [field.stop for field in layout]
        assert max(stops) <= len(bits) and [field.spec("x", {"x": PackedBits(len(bits))}) for field in layout]
        assert len(layout) == 1 or (layout[1].start == layout[0].stop and layout[1].stop == len(bits))


def test_the_fields_of_what_is_stored():
    features = {
        "board": PackedBits(1536),
        "code": PackedBits(1550),
        "policy": Float((361,)),
        "pixels": Raw("uint8", (784,)),
        "score": Int64(),
    }
    assert fields_of(features) == {
        "board": Bits("board", (8, 8, 24)),
        "code": Bits("code", (1550,)),
        **{name: Array(name) for name in ("policy", "pixels", "score")},
    }

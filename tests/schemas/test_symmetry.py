"""The symmetries of a board: a group, the same for a board and its policy, and all of them equally likely."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderd
from loaderd.errors import SchemaError

AnyArray = npt.NDArray[Any]


def turned(board: AnyArray, symmetry: int) -> AnyArray:
    """(n, S, S, …) under one symmetry, as the documentation says it."""
    mirrored = np.flip(board, axis=2) if symmetry >= 4 else board
    return np.rot90(mirrored, symmetry % 4, axes=(1, 2))


def apply(field: loaderd.Derived, board: AnyArray, key: int = 0) -> AnyArray:
    keys = key + np.arange(len(board), dtype=np.uint64)
    assert isinstance(field.random, str)
    result: AnyArray = field.function(board, loaderd.RecordRandom(keys, field.random))
    assert result.dtype == board.dtype
    return result


@given(
    side=st.sampled_from([1, 2, 3, 8, 19]),
    channels=st.sampled_from([(), (1,), (5,)]),
    symmetry=st.integers(0, 7),
    dtype=st.sampled_from(["float32", "bfloat16", "int8", "bool", "float64"]),
)
def test_each_symmetry_is_the_one_that_is_said(side: int, channels: tuple[int, ...], symmetry: int, dtype: str):
    shape = (side, side, *channels)
    field = loaderd.board_symmetry("x", shape, dtype=dtype, symmetries=[symmetry])
    assert (field.inputs, field.shape, field.dtype) == (("x",), shape, loaderd.Bits("x", dtype=dtype).dtype)
    board = np.random.default_rng(0).integers(0, 100, (7, *shape)).astype(field.dtype)
    expected = turned(board, symmetry)
    assert np.array_equal(apply(field, board), expected)
    if channels:
        planes = loaderd.board_symmetry("x", (*channels, side, side), symmetries=[symmetry], layout="NCHW")
        found = apply(planes, np.moveaxis(board, 3, 1).copy())
        assert np.array_equal(found, np.moveaxis(expected, 3, 1))
    if not channels:
        flat = loaderd.board_symmetry("x", (side * side,), symmetries=[symmetry])
        assert np.array_equal(apply(flat, board.reshape(7, -1)), expected.reshape(7, -1))
    if not channels and side > 1:
        with_pass = loaderd.board_symmetry("x", (side * side + 1,), symmetries=[symmetry])
        policy = np.concatenate([board.reshape(7, -1), np.arange(7)[:, None].astype(field.dtype)], axis=1)
        found = apply(with_pass, policy)
        assert np.array_equal(found[:, :-1], expected.reshape(7, -1))
        assert np.array_equal(found[:, -1], policy[:, -1])
        several = loaderd.board_symmetry("x", (3, side * side + 1), dtype=dtype, symmetries=[symmetry], layout="NCHW")
        assert np.array_equal(apply(several, np.stack([policy] * 3, axis=1)), np.stack([found] * 3, axis=1))


@given(key=st.integers(0, 2**63), symmetries=st.sampled_from([tuple(range(8)), (0, 4), (0, 2, 5)]))
def test_a_board_and_its_policy_are_turned_alike(key: int, symmetries: tuple[int, ...]):
    board = np.random.default_rng(1).random((30, 19, 19, 3)).astype(np.float32)
    policy = np.concatenate([board[..., 0].reshape(30, -1), np.full((30, 1), 9, np.float32)], axis=1)
    turned_board = apply(loaderd.board_symmetry("b", (19, 19, 3), symmetries=symmetries), board, key)
    turned_policy = apply(loaderd.board_symmetry("p", (362,), symmetries=symmetries), policy, key)
    assert np.array_equal(turned_board[..., 0].reshape(30, -1), turned_policy[:, :-1])
    assert np.array_equal(turned_policy[:, -1], policy[:, -1])
    # What a function of one's own has to draw to join in.
    chosen = loaderd.RecordRandom(key + np.arange(30, dtype=np.uint64), "symmetry").integers(0, len(symmetries))
    for number in range(30):
        one = board[number : number + 1]
        assert np.array_equal(turned_board[number : number + 1], turned(one, symmetries[chosen[number]]))


def test_all_are_equally_likely_and_another_stream_is_another_choice():
    board = np.tile(np.arange(4).reshape(1, 2, 2), (8000, 1, 1))
    images = {turned(board[:1], t).tobytes(): t for t in range(8)}

    def chosen(**options: Any) -> AnyArray:
        found = apply(loaderd.board_symmetry("x", (2, 2), **options), board)
        return np.array([images[one.tobytes()] for one in found])

    counts = np.bincount(chosen(), minlength=8)
    assert ((counts - 1000) ** 2 / 1000).sum() < 24.3, "chi-square of 7 degrees of freedom, at 0.001"
    assert abs((chosen() == chosen(stream="other")).mean() - 1 / 8) < 0.015
    assert set(chosen(symmetries=(0, 4))) == {0, 4}


@pytest.mark.parametrize("symmetries", [(), (8,), (-1, 0), (0.5,), 4])
def test_other_symmetries_are_refused(symmetries: Any):
    with pytest.raises(SchemaError, match="board_symmetry: symmetries must be some of 0…7, got "):
        loaderd.board_symmetry("x", (8, 8), symmetries=symmetries)

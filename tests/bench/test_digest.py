"""The digest notices whatever differs but the order; the reference decodes as the record is described."""

from __future__ import annotations

import math

import numpy as np
import pytest
from loaderd.bench.digest import Digest
from loaderd.bench.reference import Rows, decode
from loaderd.bench.synthetic import make_records


@pytest.fixture
def rows() -> Rows:
    return decode(*make_records(0, 64, seed=1))


def test_order_and_batching_make_no_difference(rows: Rows) -> None:
    shuffled = np.random.default_rng(0).permutation(64)
    parts = Digest()
    for some in (shuffled[:10], shuffled[10:11], shuffled[11:]):
        parts = parts.updated(*(array[some] for array in rows))
    assert parts == Digest().updated(*rows)


@pytest.mark.parametrize("field", [0, 1, 2])
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_changed_bit_changes_sum_and_parity(rows: Rows, field: int, bit: int) -> None:
    changed = [array.copy() for array in rows]
    view = changed[field].reshape(-1).view(np.uint32)
    place = int(np.flatnonzero(changed[field])[-1])  # not of a zero, whose sign does not count
    view[place] ^= np.uint32(1 << bit)
    before, after = Digest().updated(*rows), Digest().updated(*changed)
    assert before.rows == after.rows
    assert before.total != after.total and before.parity != after.parity


def test_lost_doubled_and_replaced_rows_are_noticed(rows: Rows) -> None:
    whole = Digest().updated(*rows)
    for picks in (range(63), [*range(64), 0], [*range(63), 0]):
        assert Digest().updated(*(array[list(picks)] for array in rows)) != whole


def test_fields_cannot_change_places(rows: Rows) -> None:
    board, flags, score = rows
    assert Digest().updated(board, flags[:, ::-1], score) != Digest().updated(*rows)


def test_negative_zero_is_zero(rows: Rows) -> None:
    board, flags, score = rows
    assert Digest().updated(np.where(board == 0, np.float32(-0.0), board), flags, score) == Digest().updated(*rows)


def test_another_dtype_or_shape_is_refused(rows: Rows) -> None:
    board, flags, score = rows
    with pytest.raises(ValueError, match="board must be float32"):
        Digest().updated(board.astype(np.float64), flags, score)
    with pytest.raises(ValueError, match="score must be float32"):
        Digest().updated(board, flags, score[:, np.newaxis])


def test_the_reference_agrees_with_a_record_taken_apart_bit_by_bit() -> None:
    boards, scores = make_records(0, 2000, seed=3)  # enough for mates beyond B = 50
    board, flags, score = decode(boards, scores)
    assert board.dtype == flags.dtype == score.dtype == np.float32
    for record in range(2000):
        bits = [int(boards[record, bit // 8]) >> (7 - bit % 8) & 1 for bit in range(1552)]
        for square in (0, 9, 63):
            planes = [bits[24 * square + channel] for channel in range(24)]
            signed = [
                sign * planes[4 * group + member] for member, sign in enumerate((1, -1, 1, -1)) for group in range(6)
            ]
            assert board[record, square // 8, square % 8].tolist() == signed
        assert flags[record].tolist() == bits[1536:1546]
        stored = int(scores[record])
        target = 0.8 * math.tanh(stored / 600)
        if bits[1546]:
            target = math.copysign(0.8 + 0.2 / 49 * max(0, 50 - abs(stored)), stored)
        assert score[record] == pytest.approx(target, rel=1e-6)

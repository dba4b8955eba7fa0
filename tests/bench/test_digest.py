"""The digest notices whatever differs but the order; the reference decodes as the record is described."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from harness.digest import Digest
from harness.reference import Arrays, chess, decode, decode_chess
from harness.synthetic import make_records

SCHEMA = chess()


@pytest.fixture
def rows() -> Arrays:
    stored, scores = make_records(0, 64, seed=1)
    return decode(SCHEMA, {"d": stored, "s": scores})


def digest_of(rows: Arrays) -> Digest:
    return Digest().updated(SCHEMA, rows)


def picked(rows: Arrays, picks: Any) -> Arrays:
    return {name: array[picks] for name, array in rows.items()}


def test_order_and_batching_make_no_difference(rows: Arrays) -> None:
    shuffled = np.random.default_rng(0).permutation(64)
    parts = Digest()
    for some in (shuffled[:10], shuffled[10:11], shuffled[11:]):
        parts = parts.updated(SCHEMA, picked(rows, some))
    assert parts == digest_of(rows)


@pytest.mark.parametrize("field", ["board", "flags", "score"])
@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_changed_bit_changes_sum_and_parity(rows: Arrays, field: str, bit: int) -> None:
    changed = rows[field].copy()
    place = int(np.flatnonzero(changed)[-1])  # not of a zero, whose sign does not count
    changed.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)
    before, after = digest_of(rows), digest_of({**rows, field: changed})
    assert before.rows == after.rows
    assert before.total != after.total and before.parity != after.parity


def test_lost_doubled_and_replaced_rows_are_noticed(rows: Arrays) -> None:
    for picks in (range(63), [*range(64), 0], [*range(63), 0]):
        assert digest_of(picked(rows, list(picks))) != digest_of(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_negative_zero_is_zero(dtype: str) -> None:
    schema, (stored, scores) = chess(dtype), make_records(0, 64, seed=1)
    rows = decode(schema, {"d": stored, "s": scores})
    board = rows["board"]
    turned = np.where(board == 0, -np.zeros((), board.dtype), board)
    assert np.signbit(turned[board == 0]).all()
    assert Digest().updated(schema, {**rows, "board": turned}) == Digest().updated(schema, rows)


def test_another_dtype_shape_or_set_of_fields_is_refused(rows: Arrays) -> None:
    with pytest.raises(ValueError, match="board must be float32"):
        digest_of({**rows, "board": rows["board"].astype(np.float64)})
    with pytest.raises(ValueError, match="score must be float32"):
        digest_of({**rows, "score": rows["score"][:, np.newaxis]})
    with pytest.raises(ValueError, match="fields must be"):
        digest_of({"board": rows["board"]})


@pytest.mark.slow
@pytest.mark.parametrize("decode_with", [decode_chess, lambda d, s: decode(SCHEMA, {"d": d, "s": s})])
def test_the_reference_agrees_with_a_record_taken_apart_bit_by_bit(decode_with: Any) -> None:
    boards, scores = make_records(0, 2000, seed=3)  # enough for mates beyond B = 50
    board, flags, score = decode_with(boards, scores).values()
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

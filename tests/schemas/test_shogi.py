"""Shogi positions against a plain decoding, one piece at a time, and against cshogi; and what is damaged in them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError, WorkerError
from loaderd.schemas import shogi
from loaderd.schemas.shogi import HCPE, PSV
from tests.helpers import shogi_boards as boards
from tests.helpers.decoding import decoded, rows_of_records


def rows_of(variant: str, data: bytes) -> Any:
    return rows_of_records(boards.VARIANTS[variant], data)


@pytest.mark.parametrize(
    ("variant", "offset", "values", "text"),
    [
        ("hcpe planes", 0, bytes(32), "a place of its own, found two at one"),
        ("psv halfkp", 1, b"\xff" * 31, "codes that end by bit 256"),
        ("psv halfka", 0, b"\xf1\xff", "field .black"),
        ("hcpe halfkp", 32 - 3, b"\xff" * 3, "the bits behind a board are no pieces in hand"),
        ("psv planes", 32 - 4, b"\xff" * 4, "the bits behind a board are no pieces in hand"),
        ("hcpe planes", 36, b"\x03", "a result must be 0, 1 or 2, got 3"),
        ("psv halfkp", 38, b"\x80", "a result must be -1, 0 or 1, got -128"),
    ],
)
def test_what_is_damaged_is_named(variant: str, offset: int, values: bytes, text: str):
    record = bytearray(boards.records(variant, boards.positions(1)))
    record[offset : offset + len(values)] = values
    with pytest.raises(WorkerError, match=text):
        decoded(boards.VARIANTS[variant], rows_of(variant, bytes(record)))


def test_a_hand_ends_where_the_position_does():
    """A pawn of Black's takes three bits, 000."""
    steps, position = shogi._hand_steps("hcp"), np.zeros((3, 32), np.uint8)
    counts = shogi.hand_counts(steps, position, np.array([253, 256, 235]))
    assert counts[:, 0].tolist() == [1, 0, 7] and not counts[:, 1:].any()
    for end in (252, 254):
        with pytest.raises(ValueError, match="no pieces in hand"):
            shogi.hand_counts(steps, position, np.array([256, end, 253]))


def test_more_pieces_than_there_are_is_named():
    position = boards.Position({0: "K", 80: "k"} | {square: "P" for square in range(1, 40)})
    bits = "0" + f"{0:07b}"[::-1] + f"{80:07b}"[::-1] + "1000" * 39 + "0" * 40
    data = bytes(int(bits[place : place + 8][::-1], 2) for place in range(0, len(bits) // 8 * 8, 8))
    record = (data + bytes(32))[:32] + boards.record_of(boards.positions(1)[0], "psv")[32:]
    with pytest.raises(WorkerError, match="at most 38"):
        decoded(boards.VARIANTS["psv halfkp"], rows_of("psv halfkp", record))
    assert len(position.board) == 41


def test_inputs_that_there_are_not():
    with pytest.raises(SchemaError, match='hcpe: inputs must be "planes", "halfkp" or "halfka", got \'kp\''):
        loaderd.schemas.hcpe("kp")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match='psv: inputs must be "planes"'):
        loaderd.schemas.psv([])  # type: ignore[arg-type]


def test_cshogi_writes_the_same_boards_and_planes():
    """Of positions that it plays at random, of all that dlshogi's features have and a board alone says."""
    cshogi = pytest.importorskip("cshogi", reason="boards are compared with it: pip install cshogi")
    dlshogi = pytest.importorskip("cshogi.dlshogi")
    rng, board, stored, want = random.Random(0), cshogi.Board(), [], []
    for _ in range(1500):
        moves = list(board.legal_moves)
        if not moves or board.move_number > 200:
            board.reset()
            continue
        move = rng.choice(moves)
        hcpe, psv = np.zeros(1, HCPE), np.zeros(1, PSV)
        board.to_hcp(hcpe["hcp"])
        board.to_psfen(psv["sfen"])
        hcpe["bestMove16"], psv["move"] = cshogi.move16(move), cshogi.move16_to_psv(cshogi.move16(move))
        planes = np.zeros((62, 9, 9), np.float32), np.zeros((57, 9, 9), np.float32)
        dlshogi.make_input_features(board, *planes)
        pieces = np.concatenate([planes[0][:14], planes[0][31:45]])
        want.append((pieces, planes[1][:56, 0, 0], dlshogi.make_move_label(cshogi.move16(move), board.turn)))
        stored.append((hcpe.tobytes(), psv.tobytes()))
        board.push(move)
    for variant, records in zip(("hcpe planes", "psv planes"), zip(*stored, strict=True), strict=True):
        found = decoded(boards.VARIANTS[variant], rows_of(variant, b"".join(records)))
        for number, name in enumerate(("pieces", "hands", "move")):
            assert (found[name] == np.array([each[number] for each in want])).all(), name

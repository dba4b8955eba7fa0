"""Boards of NNUE trainers against a plain decoding, one square at a time, and what is damaged in them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import packed_schema
from loaderd.schemas.nnue import begins_with_game
from tests.helpers import nnue_boards as boards
from tests.helpers.decoding import decoded, rows_of_records

POSITIONS = boards.positions(700)
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR"


def rows_of(variant: str, data: bytes) -> Any:
    return rows_of_records(boards.VARIANTS[variant], data)


def test_the_example_of_viriformat():
    """The board in its README: all pieces at their start, the rooks unmoved."""
    text = "ffff00000000ffff 1642256100000000888888889ecaade9 40 00 0100 0000 02 00"
    position = boards.Position.of_fen(START.replace("R", "U").replace("r", "u"))
    position.result = 2
    assert boards.marlin(position) == bytes.fromhex(text)
    found = decoded(boards.VARIANTS["marlin"], rows_of("marlin", bytes.fromhex(text)))
    assert {name: values[0].tolist() for name, values in found.items()} == boards.expected("marlin", position)


def test_a_start_position_by_hand():
    position = boards.Position.of_fen(START)
    found = decoded(boards.VARIANTS["nnue_bin"], rows_of("nnue_bin", boards.nnue_bin(position)))
    # Both kings are on e, so nothing is mirrored, and their bucket is 31: Ra1, Nb1, …, and as Black sees it Ra8, …
    base = 31 * 768
    assert found["white"][0, :4].tolist() == [
        base + 64 * 6 + 0,
        base + 64 * 2 + 1,
        base + 64 * 4 + 2,
        base + 64 * 8 + 3,
    ]
    assert found["black"][0, 16:18].tolist() == [base + 64 * 0 + 8, base + 64 * 0 + 9] and found["us"][0] == 1
    assert found["black"][0, 0] == base + 64 * 7 + 56
    found = decoded(boards.VARIANTS["bullet"], rows_of("bullet", boards.bullet(position)))
    assert found["stm"][0, 8:10].tolist() == [8, 9] and found["ntm"][0, 8] == 384 + 48
    assert sorted(found["stm"][0]) == sorted(found["ntm"][0])


def set_bytes(offset: int, values: bytes) -> Any:
    def damage(record: bytearray) -> None:
        record[offset : offset + len(values)] = values

    return damage


def set_byte(offset: int, value: int) -> Any:
    return set_bytes(offset, bytes([value]))


def king_elsewhere(offset: int) -> Any:
    def damage(record: bytearray) -> None:
        record[offset] ^= 1

    return damage


@pytest.mark.parametrize(
    ("variant", "damage", "text"),
    [
        ("bullet", set_byte(8, 0x66), "a piece that the table has, found one of code 6 on square"),
        ("bullet", set_bytes(0, b"\xff" * 8), "at most 32 pieces, .* found 64"),
        ("bullet", set_byte(26, 3), "a result must be 0, 1 or 2, got 3"),
        ("bullet, mirrored", set_byte(27, 64), "expected a bucket from 0 to 63, found 64"),
        ("bullet, buckets", set_byte(28, 255), "expected a bucket from 0 to 63, found 255"),
        ("bullet, buckets", king_elsewhere(27), "found one of code 5 on square"),
        ("bullet, mirrored", king_elsewhere(28), "found one of code 13 on square"),
        ("marlin", set_byte(8, 0x77), "a piece that the table has, found one of code 7 on square"),
        ("marlin", set_byte(30, 255), "a result must be 0, 1 or 2, got 255"),
        ("marlin, buckets", set_bytes(8, bytes(16)), "whose square is the bucket"),
        ("nnue_bin", set_bytes(0, bytes(32)), "a place of its own, found two at"),
        ("nnue_bin", set_bytes(2, b"\xff" * 30), "bits that begin none of them"),
        ("nnue_bin", set_bytes(2, b"\x21\x84\x10\x42\x08" * 6), "codes that end by"),
        ("nnue_bin", set_byte(38, 2), "a result must be -1, 0 or 1, got 2"),
    ],
)
def test_what_is_damaged_is_named(variant: str, damage: Any, text: str):
    """By the workers, also where a device unpacks."""
    record, schema = bytearray(boards.records(variant, POSITIONS[:1])), boards.VARIANTS[variant]
    damage(record)
    rows = rows_of(variant, bytes(record))
    for made in (schema, packed_schema(schema, for_device=True)):
        with pytest.raises(WorkerError, match=text):
            decoded(made, rows)


def game(board: str, *moves: tuple[int, int, int]) -> bytes:
    """Of viriformat; moves: from, to, type."""
    packed = [start | to << 6 | kind << 14 for start, to, kind in moves]
    start = boards.marlin(boards.Position.of_fen(board))
    return start + b"".join(struct.pack("<Hh", move, 10) for move in packed) + bytes(4)


def test_games_of_viriformat_are_told_from_boards():
    castling = game("r3k3/8/8/8/8/8/8/4K2R", (4, 7, 2), (60, 56, 2), (6, 14, 0), (58, 57, 0), (5, 37, 0))
    en_passant = game("4k3/8/8/8/3p4/8/4P3/4K3", (12, 28, 0), (27, 20, 1), (28, 36, 0))
    taken = game("4k3/8/8/8/3p4/8/4P3/4K3", (12, 28, 0), (27, 20, 1), (4, 12, 0), (60, 28, 0))
    assert begins_with_game(castling) and not begins_with_game(en_passant), "the pawn on 28 was taken"
    assert begins_with_game(taken * 3)
    assert not begins_with_game(game("4k3/8/8/8/8/8/8/4K2R", (60, 52, 0))), "White is to move"
    assert not begins_with_game(game("4k3/8/8/8/8/8/8/4K2R", (4, 7, 0))), "the own rook, without castling"
    assert not begins_with_game(castling + bytes(40))
    for variant in ("bullet", "marlin"):
        for first in range(600):
            assert not begins_with_game(boards.records(variant, POSITIONS[first : first + 3]))


def is_quiet(board: Any, move: Any) -> Any:
    to, kind = move & 63, move >> 14
    return (board[np.arange(len(board)), to] == 0) & (kind != 2) | (kind == 3)


def test_filters_of_trainers(tmp_path: Path):
    path = tmp_path / "a.bin"
    path.write_bytes(boards.records("nnue_bin", POSITIONS))
    schema = boards.VARIANTS["nnue_bin"]

    def passing(function: Any, *inputs: str) -> list[int]:
        where = loaderd.Derived(function, inputs, dtype="bool", shape=())
        dataset = loaderd.Dataset(path, schema, shuffle=False, where=where)
        with loaderd.Loader(dataset, batch_size=700, workers=1) as loader:
            return [int(score) for batch in loader for score in np.abs(batch["score"])]

    quiet = [
        number
        for number, each in enumerate(POSITIONS)
        if each.move >> 14 == 3 or (each.move >> 14 != 2 and each.move & 63 not in each.board)
    ]
    assert passing(is_quiet, "board", "move") == quiet and 100 < len(quiet) < 600
    assert passing(lambda ply: ply >= 16, "ply") == [n for n, each in enumerate(POSITIONS) if each.ply >= 16]
    assert passing(lambda score: abs(score) < 500, "score") == list(range(500))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: loaderd.schemas.bullet([0] * 63), "bullet: buckets must be 64 integers from 0 on, one for each"),
        (lambda: loaderd.schemas.bullet([-1] * 64), "bullet: buckets must be 64 integers from 0 on"),
        (lambda: loaderd.schemas.bullet([0.5] * 64), "bullet: buckets must be 64 integers from 0 on"),
        (lambda: loaderd.schemas.marlin([0] * 64, mirrored=True), "buckets must be 32 .* on the files a to d, got"),
        (lambda: loaderd.schemas.bullet(mirrored=1), "bullet: mirrored must be True or False, got 1"),
        (lambda: loaderd.schemas.bullet([99] * 64, dtype="int16"), "must hold indices from 0 to 32767"),
        (lambda: loaderd.schemas.nnue_bin("uint16"), "dtype must be int16, int32 or int64, got uint16"),
    ],
)
def test_what_cannot_be(make: Any, text: str):
    with pytest.raises(SchemaError, match=text):
        make()

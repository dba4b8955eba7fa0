"""Chess positions as NNUE trainers store them: random ones, packed and decoded one square at a time.

Written from the layouts alone (loaderd/schemas/nnue.py names them), without its tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import loaderd

LETTERS = "PNBRQK"
BUCKETS = [(7 * square) % 5 for square in range(64)]
HALF_BUCKETS = [square % 3 for square in range(32)]
VARIANTS = {
    "bullet": loaderd.schemas.bullet(),
    "bullet, buckets": loaderd.schemas.bullet(BUCKETS, dtype="int16"),
    "bullet, mirrored": loaderd.schemas.bullet(HALF_BUCKETS, mirrored=True, dtype="int64"),
    "marlin": loaderd.schemas.marlin(),
    "marlin, buckets": loaderd.schemas.marlin(BUCKETS),
    "marlin, mirrored": loaderd.schemas.marlin(mirrored=True, dtype="int16"),
    "nnue_bin": loaderd.schemas.nnue_bin(),
    "nnue_bin, int16": loaderd.schemas.nnue_bin("int16"),
}


@dataclass
class Position:
    """``board``: by square (a1 is 0), "P" to "K" of White, "p" to "k" of Black; "U" and "u" are unmoved rooks.

    ``score`` and ``result`` (0, 1, 2) are White's.
    """

    board: dict[int, str]
    is_black: bool = False
    score: int = 0
    result: int = 1
    en_passant: int | None = None
    halfmove: int = 0
    fullmove: int = 1
    move: int = 0
    ply: int = 0
    extra: list[int] = field(default_factory=lambda: [0, 0, 0])

    @classmethod
    def of_fen(cls, board: str) -> Position:
        squares: dict[int, str] = {}
        for number, row in enumerate(board.split("/")):
            file = 0
            for letter in row:
                if letter.isdigit():
                    file += int(letter)
                else:
                    squares[8 * (7 - number) + file] = letter
                    file += 1
        return cls(squares)

    @classmethod
    def drawn(cls, rng: np.random.Generator, number: int) -> Position:
        """Any pieces; ``number``: its score."""
        squares = rng.permutation(64)[: rng.integers(2, 33)].tolist()
        letters = ["K", "k", *rng.choice([*"PNBRQpnbrq"], len(squares) - 2).tolist()]
        return cls(
            dict(zip(squares, letters, strict=True)),
            bool(rng.integers(0, 2)),
            number,
            int(rng.integers(0, 3)),
            *(int(rng.integers(0, 64)) if rng.integers(0, 2) else None, int(rng.integers(0, 100))),
            *(int(rng.integers(1, 300)), int(rng.integers(0, 1 << 16)), int(rng.integers(0, 600))),
        )

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """(square, colour, type) of each, by square."""
        every = [
            (square, letter.replace("U", "R").replace("u", "r")) for square, letter in sorted(self.board.items())
        ]
        return [(square, int(letter.islower()), LETTERS.index(letter.upper())) for square, letter in every]

    def king(self, colour: int) -> int:
        return next(square for square, of, kind in self.pieces if (of, kind) == (colour, 5))


def nibbles(pieces: list[tuple[int, int]]) -> bytes:
    """Squares and codes of four bits, as a word and 16 bytes."""
    word, codes = 0, bytearray(16)
    for number, (square, code) in enumerate(sorted(pieces)):
        word |= 1 << square
        codes[number // 2] |= code << (4 if number % 2 else 0)
    return struct.pack("<Q", word) + bytes(codes)


def bullet(position: Position) -> bytes:
    turn, flip = int(position.is_black), 56 * position.is_black
    pieces = [(square ^ flip, 8 * (colour ^ turn) + kind) for square, colour, kind in position.pieces]
    own, other = position.king(turn) ^ flip, position.king(1 - turn) ^ flip ^ 56
    score = -position.score if turn else position.score
    result = 2 - position.result if turn else position.result
    return nibbles(pieces) + struct.pack("<hBBB3B", score, result, own, other, *position.extra)


def marlin(position: Position) -> bytes:
    unmoved = [square for square, letter in position.board.items() if letter in "Uu"]
    pieces = [(square, 8 * colour + (6 if square in unmoved else kind)) for square, colour, kind in position.pieces]
    turn = 128 * position.is_black + (64 if position.en_passant is None else position.en_passant)
    rest = (turn, position.halfmove, position.fullmove, position.score, position.result, position.extra[0])
    return nibbles(pieces) + struct.pack("<BBHhBB", *rest)


def nnue_bin(position: Position) -> bytes:
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> number & 1 for number in range(count))

    by_square = {square: (colour, kind) for square, colour, kind in position.pieces}
    put(position.is_black, 1)
    put(position.king(0), 6)
    put(position.king(1), 6)
    for rank in range(7, -1, -1):
        for file in range(8):
            colour, kind = by_square.get(8 * rank + file, (0, -1))
            if kind < 0:
                put(0, 1)
            elif kind < 5:
                put([0b0001, 0b0011, 0b0101, 0b0111, 0b1001][kind], 4)
                put(colour, 1)
    put(0, 4)  # castling
    put(position.en_passant is not None, 1)
    if position.en_passant is not None:
        put(position.en_passant, 6)
    put(position.halfmove, 6)
    put(position.fullmove, 16)
    put(position.halfmove >> 6, 1)
    assert len(bits) <= 256
    sfen = bytes(sum(bit << place for place, bit in enumerate(bits[8 * n : 8 * n + 8])) for n in range(32))
    turned = position.is_black
    score, result = (-position.score if turned else position.score), position.result - 1
    return sfen + struct.pack("<hHHbB", score, position.move, position.ply, -result if turned else result, 0)


PACKED = {"bullet": bullet, "marlin": marlin, "nnue_bin": nnue_bin}


def records(variant: str, positions: list[Position]) -> bytes:
    return b"".join(map(PACKED[variant.split(",")[0]], positions))


def chess768(position: Position, side: int, variant: str) -> list[int]:
    """As ``side`` sees it: bullet's ChessBuckets, or ChessBucketsMirrored."""
    king = position.king(side) ^ (56 if side else 0)
    bucket, across = 0, 0
    if "mirrored" in variant:
        across = 7 if king % 8 > 3 else 0
        if variant.startswith("bullet"):
            bucket = HALF_BUCKETS[king // 8 * 4 + [0, 1, 2, 3, 3, 2, 1, 0][king % 8]]
    elif "buckets" in variant:
        bucket = BUCKETS[king]
    found = []
    for square, colour, kind in position.pieces:
        seen = square ^ (56 if side else 0) ^ across
        found.append(768 * bucket + (0 if colour == side else 384) + 64 * kind + seen)
    return found


# clang-format off, as in training_data_loader.cpp: by the square of a king on the files e to h, a1 first.
KING_BUCKETS = [
    *(-1, -1, -1, -1, 31, 30, 29, 28),
    *(-1, -1, -1, -1, 27, 26, 25, 24),
    *(-1, -1, -1, -1, 23, 22, 21, 20),
    *(-1, -1, -1, -1, 19, 18, 17, 16),
    *(-1, -1, -1, -1, 15, 14, 13, 12),
    *(-1, -1, -1, -1, 11, 10, 9, 8),
    *(-1, -1, -1, -1, 7, 6, 5, 4),
    *(-1, -1, -1, -1, 3, 2, 1, 0),
]


def half_ka(position: Position, side: int) -> list[int]:
    """HalfKAv2_hm, as ``side`` sees it."""
    king = position.king(side)

    def oriented(square: int) -> int:
        if side:
            square ^= 56
        return square ^ 7 if king % 8 < 4 else square

    found = []
    for square, colour, kind in position.pieces:
        plane = kind * 2 + (colour != side)
        found.append(oriented(square) + plane * 64 + KING_BUCKETS[oriented(king)] * 768)
    return found


def expected(variant: str, position: Position) -> dict[str, Any]:
    """The fields of a position; indices in the order of the squares, as they are stored."""
    turn, is_sfen = int(position.is_black), variant.startswith("nnue_bin")
    sides = [half_ka(position, side) if is_sfen else chess768(position, side, variant) for side in (0, 1)]
    of_turn = not variant.startswith("marlin")
    score, result = position.score, position.result
    if of_turn and turn:
        score, result = -score, 2 - result
    fields: dict[str, Any] = {"score": score, "result": result / 2, "count": len(position.board)}
    if variant.startswith("bullet"):
        order = [square ^ 56 * turn for square, *_ in position.pieces]
        by_square = sorted(range(len(order)), key=order.__getitem__)
        lists = {"stm": sides[turn], "ntm": sides[1 - turn]}
        lists = {name: [each[place] for place in by_square] for name, each in lists.items()}
    else:
        fields["us"] = 1 - turn
        lists = {"white": sides[0], "black": sides[1]}
    return {**fields, **{name: each + [-1] * (32 - len(each)) for name, each in lists.items()}}


def positions(count: int) -> list[Position]:
    """With scores 0, 1, 2, …, which tell them apart."""
    rng = np.random.default_rng(count)
    return [Position.drawn(rng, number) for number in range(count)]

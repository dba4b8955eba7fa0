"""Shogi positions as trainers store them: random ones, packed and decoded one bit and one piece at a time.

Written from the layouts alone (loaderd/schemas/shogi.py names them), without its tables.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import loaderd

KINDS = "PLNSBRGK"  # and the first six promoted: "+P" …
IN_HAND = "PLNSGBR"
NUMBERS = {"P": 18, "L": 4, "N": 4, "S": 4, "G": 4, "B": 2, "R": 2}
# Board and hand without colour and promotion, and what a handicap takes off.
HCP = {
    **{"P": ("10", "00", "010"), "L": ("1100", "1000", "10010"), "N": ("1110", "1100", "11010")},
    **{"S": ("1101", "1010", "10110"), "G": ("11110", "1110", "10111")},
    **{"B": ("111110", "111110", "1111000"), "R": ("111111", "111111", "1111010")},
}
PSV = {
    **{"P": ("10", "00", "010"), "L": ("1100", "1000", "10010"), "N": ("1101", "1010", "10110")},
    **{"S": ("1110", "1100", "11010"), "G": ("11110", "1110", "11011")},
    **{"B": ("111110", "111100", "1111010"), "R": ("111111", "111110", "1111110")},
}
VARIANTS = {
    **{f"hcpe {inputs}": loaderd.schemas.hcpe(inputs) for inputs in ("planes", "halfkp", "halfka")},
    **{f"psv {inputs}": loaderd.schemas.psv(inputs) for inputs in ("planes", "halfkp", "halfka")},
    "hcpe planes uint8": loaderd.schemas.hcpe(dtype="uint8"),
    "psv halfkp int64": loaderd.schemas.psv(dtype="int64"),
}


@dataclass
class Position:
    """``board``: by square (9 · (file - 1) + rank - 1), a kind as in KINDS or "+P", in lower case White's."""

    board: dict[int, str]
    hands: tuple[dict[str, int], dict[str, int]] = ({}, {})
    taken_off: dict[str, int] = field(default_factory=dict)
    turn: int = 0
    score: int = 0
    winner: int | None = None
    move: tuple[str, int] | None = None
    """(square that it comes from, with "+" if it promotes, or what is dropped; square that it goes to)."""

    @classmethod
    def drawn(cls, rng: np.random.Generator, number: int) -> Position:
        """All 40 pieces, anywhere. ``number``: its score."""
        squares = rng.permutation(81).tolist()
        board = {squares.pop(): "K", squares.pop(): "k"}
        hands: tuple[dict[str, int], dict[str, int]] = ({}, {})
        taken_off: dict[str, int] = {}
        for kind in NUMBERS:
            for _ in range(NUMBERS[kind]):
                draw = int(rng.integers(0, 10))
                if draw < 7:
                    piece = kind if kind == "G" or rng.integers(0, 3) else f"+{kind}"
                    board[squares.pop()] = piece if rng.integers(0, 2) else piece.lower()
                elif draw < 9 or number % 3:
                    hand = hands[int(rng.integers(0, 2))]
                    hand[kind] = hand.get(kind, 0) + 1
                else:
                    taken_off[kind] = taken_off.get(kind, 0) + 1
        came, went = rng.permutation(81)[:2].tolist()
        source = rng.choice([f"{came}", f"{came}+", rng.choice([*IN_HAND])])
        turn, winner = int(rng.integers(0, 2)), [None, 0, 1][rng.integers(0, 3)]
        return cls(board, hands, taken_off, turn, number, winner, (str(source), went) if number % 5 else None)


def bits_of(position: Position, codes: dict[str, tuple[str, str, str]], colour_first: bool) -> str:
    """256 bits, the first one first."""
    kings = [next(square for square, piece in position.board.items() if piece == king) for king in "Kk"]
    bits = str(position.turn) + "".join(f"{king:07b}"[::-1] for king in kings)
    for square in range(81):
        piece = position.board.get(square)
        if piece is None:
            bits += "0"
        elif piece.upper() != "K":
            colour, promoted = str(int(piece.islower())), str(int("+" in piece))
            kind = piece.strip("+").upper()
            if kind == "G":
                bits += codes["G"][0] + colour
            else:
                bits += codes[kind][0] + (colour + promoted if colour_first else promoted + colour)
    for colour, hand in enumerate(position.hands):
        bits += "".join(codes[kind][1] + str(colour) for kind in IN_HAND for _ in range(hand.get(kind, 0)))
    bits += "".join(codes[kind][2] for kind in IN_HAND for _ in range(position.taken_off.get(kind, 0)))
    assert len(bits) == 256
    return bits


def record_of(position: Position, variant: str) -> bytes:
    is_hcpe = variant.startswith("hcpe")
    bits = bits_of(position, HCP if is_hcpe else PSV, is_hcpe)
    board = bytes(int(bits[place : place + 8][::-1], 2) for place in range(0, 256, 8))
    source, to = position.move or ("0", 0)
    kinds = "PLNSBRG"
    if is_hcpe:
        came = 81 + kinds.index(source) if source in kinds else int(source.strip("+"))
        move = to | came << 7 | ("+" in source) << 14
        won = (0 if position.winner is None else 1 + position.winner) | position.score % 8 << 2  # how it ended
        return board + struct.pack("<hHBB", position.score, move, won, 77)
    came = 1 + kinds.index(source) if source in kinds else int(source.strip("+"))
    move = to | came << 7 | (source in kinds) << 14 | ("+" in source) << 15
    won = 0 if position.winner is None else 1 if position.winner == position.turn else -1
    return board + struct.pack("<hHHbB", position.score, move, position.score % 500, won, 77)


def records(variant: str, positions: list[Position]) -> bytes:
    return b"".join(record_of(position, variant) for position in positions)


def label(position: Position) -> int:
    """dlshogi's number of the move."""
    if position.move is None:
        return -1
    source, to = position.move
    to = 80 - to if position.turn else to
    if source in "PLNSBRG":
        return 81 * (20 + "PLNSBRG".index(source)) + to
    came = int(source.strip("+"))
    came = 80 - came if position.turn else came
    left, up = to // 9 - came // 9, came % 9 - to % 9
    if up == 2 and abs(left) == 1:
        direction = 8 if left == 1 else 9
    elif up > 0:
        direction = 0 if left == 0 else 1 if left > 0 else 2
    elif up == 0:
        direction = 3 if left > 0 else 4
    else:
        direction = 5 if left == 0 else 6 if left > 0 else 7
    return 81 * (direction + 10 * ("+" in source)) + to


def seen_by(position: Position, side: int) -> list[tuple[int, bool, str]]:
    """(square, whether it is the other's, kind) of each piece on the board, by stored square."""
    return [
        (80 - square if side else square, piece.islower() != bool(side), piece.upper())
        for square, piece in sorted(position.board.items())
    ]


def planes(position: Position) -> tuple[list[Any], list[float]]:
    kinds = [*KINDS, *(f"+{kind}" for kind in KINDS[:6])]
    pieces = np.zeros((28, 9, 9), int)
    for square, is_other, kind in seen_by(position, position.turn):
        pieces[14 * is_other + kinds.index(kind), square // 9, square % 9] = 1
    hands = []
    for hand in (position.hands[position.turn], position.hands[1 - position.turn]):
        for kind in IN_HAND:
            hands += [float(hand.get(kind, 0) > number) for number in range(8 if kind == "P" else NUMBERS[kind])]
    return pieces.tolist(), hands


ON_BOARD = [*"PLNSG", "B", "+B", "R", "+R"]


def indices(position: Position, side: int, with_kings: bool) -> list[int]:
    """BonaPiece numbers: those in hand from 1 on, with a gap behind each kind; then 81 of each kind on the board."""
    found, king, first, firsts = [], 0, 1, {}
    for kind in IN_HAND:
        for is_other in (False, True):
            firsts[kind, is_other] = first
            first += NUMBERS[kind] + 1
    assert first == 91
    for square, is_other, kind in seen_by(position, side):
        if kind == "K":
            king = king if is_other else square
            if with_kings:
                found.append(1548 + 81 * is_other + square)
        else:
            kind = "G" if kind in ("+P", "+L", "+N", "+S") else kind
            found.append(90 + 81 * (2 * ON_BOARD.index(kind) + is_other) + square)
    for colour, hand in enumerate(position.hands):
        for kind in IN_HAND:
            found += [firsts[kind, colour != side] + number for number in range(hand.get(kind, 0))]
    inputs, most = (1710, 40) if with_kings else (1548, 38)
    return [inputs * king + each for each in found] + [-1] * (most - len(found))


def expected(variant: str, position: Position) -> dict[str, Any]:
    """The fields of a position."""
    won = 0.5 if position.winner is None else float(position.winner == position.turn)
    fields: dict[str, Any] = {"score": position.score, "move": label(position), "result": won}
    if variant.startswith("psv"):
        fields["ply"] = position.score % 500
    if "planes" in variant:
        fields["pieces"], fields["hands"] = planes(position)
        return fields
    sides = [indices(position, side, "halfka" in variant) for side in (0, 1)]
    return {**fields, "black": sides[0], "white": sides[1], "us": 1 - position.turn}


def positions(count: int) -> list[Position]:
    """With scores 0, 1, 2, …, which tell them apart."""
    rng = np.random.default_rng(count)
    return [Position.drawn(rng, number) for number in range(count)]

"""viriformat's games, unrolled to the boards that :func:`loaderd.schemas.marlin` reads.

The layout is that of cosmobobak/viriformat, README.md: a game is a board of marlinformat, then for each move a
little-endian word of 4 bytes, and a word of zeros. A word: from 6 bits, to 6 (castling: the own rook's square),
promotion 2 (knight, bishop, rook, queen), kind 2 (1: en passant, 2: castling, 3: promotion), score 16.

All games advance together, one move at a time: what numpy does for a move, it does for thousands of boards::

    games by their number of moves    boards (games, 64)    move 0, 1, 2 … of all games that have one
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.errors import CorruptRecordError
from loaderd.schemas.nnue import MARLIN, MAX_PIECES

Codes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_BYTES_AT_ONCE = 1 << 19  # 131,072 moves: as many boards take up to 130 MB here
_MOST_GAME_BYTES = 1 << 18
_BOARD_WORDS = MARLIN.itemsize // 4
_EMPTY, _UNMOVED_ROOK, _ROOK, _KING, _BLACK = 16, 6, 3, 5, 8
_EN_PASSANT, _CASTLING, _PROMOTION = 1, 2, 3
_NO_SQUARE = 64


def unroll(games: str | os.PathLike[str], boards: str | os.PathLike[str], *, quiet: bool = False) -> int:
    """Write the boards in front of each move of viriformat's ``games`` to the file ``boards``; returns how many.

    Each has the score of its move, and the result of its game. ``quiet``: leave out those whose move takes or
    promotes. The file appears when it is whole. Raises CorruptRecordError for a game that is cut, and for a move of
    no piece of the side whose turn it is, or onto one of its own; OSError.
    """
    target, num_boards = Path(boards), 0
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        with unfinished.open("wb") as out:
            for some in _boards_of(os.fspath(games), quiet):
                out.write(some.tobytes())
                num_boards += len(some)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_boards


def _boards_of(path: str, quiet: bool) -> Iterator[npt.NDArray[Any]]:
    """MARLIN, some thousands of games at a time."""
    offset, left = 0, b""
    with open(path, "rb") as source:
        while data := source.read(_BYTES_AT_ONCE):
            left += data
            starts, num_moves, used = _games_in(left)
            yield _unrolled(left[:used], starts, num_moves, quiet, path, offset)
            offset, left = offset + used, left[used:]
            if len(left) > _MOST_GAME_BYTES:
                break
    if left:
        raise _corrupt(path, offset, "a game that ends with four zero bytes", f"{len(left):,} bytes without an end")


def _games_in(data: bytes) -> tuple[Ints, Ints, int]:
    """Where whole games begin, in words; how many moves each has; and how many bytes they take."""
    words = np.frombuffer(data, "<u4", len(data) // 4)
    zeros = np.flatnonzero(words == 0)
    starts, ends, start = [], [], 0
    while (at := int(np.searchsorted(zeros, start + _BOARD_WORDS))) < len(zeros):
        starts.append(start)
        ends.append(int(zeros[at]))
        start = ends[-1] + 1
    found = np.array(starts, np.int64)
    return found, np.array(ends, np.int64) - found - _BOARD_WORDS, 4 * start


def _unrolled(data: bytes, starts: Ints, num_moves: Ints, quiet: bool, name: str, offset: int) -> npt.NDArray[Any]:
    """MARLIN, (boards,): those of the games at these words of ``data``, game by game."""
    words = np.frombuffer(data, "<u4")
    order = np.argsort(-num_moves, kind="stable")
    first = (np.cumsum(num_moves) - num_moves)[order]  # of all boards, a game's first one
    starts, num_moves = starts[order], num_moves[order]
    heads = np.frombuffer(data, np.uint8).reshape(-1, 4)[starts[:, None] + np.arange(_BOARD_WORDS)]
    state = _State.of(heads.reshape(len(starts), MARLIN.itemsize).view(MARLIN)[:, 0])
    pieces = np.count_nonzero(state.boards != _EMPTY, axis=1)
    wrong = (pieces > MAX_PIECES) | (state.result > 2) | (state.en_passant > _NO_SQUARE)
    if wrong.any():
        game = int(wrong.argmax())
        found = f"{pieces[game]} pieces, result {state.result[game]}, square {state.en_passant[game]}"
        expected = f"a board of at most {MAX_PIECES} pieces, a result up to 2 and a square up to {_NO_SQUARE}"
        raise _corrupt(name, offset + 4 * int(starts[game]), expected, found)
    total = int(num_moves.sum())
    made, codes, is_kept = np.zeros(total, MARLIN), np.empty((total, 64), np.uint8), np.ones(total, np.bool_)
    for ply in range(int(num_moves.max(initial=0))):
        playing = int(np.searchsorted(-num_moves, -ply, side="left"))
        state = state.of_first(playing)
        word = words[starts[:playing] + _BOARD_WORDS + ply]
        rows = first[:playing] + ply
        codes[rows] = state.boards
        made["side_to_move"][rows] = state.turn << 7 | state.en_passant
        made["halfmove"][rows], made["fullmove"][rows] = np.minimum(state.halfmove, 255), state.fullmove
        made["score"][rows], made["result"][rows] = (word >> 16).astype("<u2").view("<i2"), state.result
        wrong, is_quiet = state.move(word)
        if wrong.any():
            game = int(wrong.argmax())
            at = offset + 4 * int(starts[game] + _BOARD_WORDS + ply)
            raise _corrupt(name, at, "a move that can be", f"{int(word[game]) & 0xFFFF:#06x}, move {ply} of its game")
        is_kept[rows] = is_quiet
    _pack(codes, made)
    return made[is_kept] if quiet else made


class _State(NamedTuple):
    """Boards, (games, 64), of four bits a square or _EMPTY, and (games,) of what else a position has."""

    boards: npt.NDArray[Any]
    turn: npt.NDArray[Any]
    en_passant: npt.NDArray[Any]
    halfmove: npt.NDArray[Any]
    fullmove: npt.NDArray[Any]
    result: npt.NDArray[Any]

    @classmethod
    def of(cls, heads: npt.NDArray[Any]) -> _State:
        is_there = np.unpackbits(heads["occupied"], axis=1, bitorder="little").astype(bool)
        nibbles = np.stack([heads["pieces"] & 15, heads["pieces"] >> 4], axis=2).reshape(-1, MAX_PIECES)
        place = np.minimum(np.cumsum(is_there, axis=1) - 1, MAX_PIECES - 1)
        boards = np.where(is_there, np.take_along_axis(nibbles, np.maximum(place, 0), axis=1), _EMPTY)
        flags = heads["side_to_move"]
        halfmove, fullmove = heads["halfmove"].astype(np.int64), heads["fullmove"].astype(np.int64)
        return cls(boards.astype(np.uint8), flags >> 7, flags & 127, halfmove, fullmove, heads["result"].copy())

    def of_first(self, count: int) -> _State:
        return _State(*(each[:count] for each in self))

    def move(self, word: npt.NDArray[np.uint32]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Make the moves, in place. Returns which cannot be, (games,), and which neither take nor promote."""
        boards, game, turn = self.boards, np.arange(len(word)), self.turn
        start, to, kind = ((word >> shift & mask).astype(np.intp) for shift, mask in ((0, 63), (6, 63), (14, 3)))
        piece, taken = boards[game, start], boards[game, to]
        is_castling, is_promotion = kind == _CASTLING, kind == _PROMOTION
        is_own = (taken != _EMPTY) & (taken >> 3 == turn)
        wrong = (
            (piece == _EMPTY) | (piece >> 3 != turn) | (is_own != is_castling) | (is_castling & (piece & 7 != _KING))
        )
        of_type = piece & 7
        is_pawn = of_type == 0
        takes = (taken != _EMPTY) & ~is_castling | (kind == _EN_PASSANT)

        boards[game, start] = _EMPTY
        boards[game[is_castling], to[is_castling]] = _EMPTY
        colour = turn << 3
        after = np.where(of_type == _UNMOVED_ROOK, colour | _ROOK, piece)
        after = np.where(is_promotion, colour | ((word >> 12 & 3) + 1).astype(np.uint8), after)
        king_to = start & 56 | np.where(to > start, 6, 2)
        boards[game, np.where(is_castling, king_to, to)] = after
        castling = game[is_castling]
        boards[castling, (start & 56 | np.where(to > start, 5, 3))[castling]] = (colour | _ROOK)[castling]
        passing = game[kind == _EN_PASSANT]
        boards[passing, to[passing] ^ 8] = _EMPTY
        kings = game[of_type == _KING]
        rows, rook = boards[kings], colour[kings][:, None] | _ROOK
        boards[kings] = np.where(rows == colour[kings][:, None] | _UNMOVED_ROOK, rook, rows)

        is_double = is_pawn & (np.abs(to - start) == 16)
        beside = np.zeros(len(word), np.bool_)
        for step, edge in ((-1, 0), (1, 7)):
            neighbour = boards[game, np.clip(to + step, 0, 63)]
            beside |= (to % 8 != edge) & (neighbour == (turn ^ 1) << 3)
        self.en_passant[:] = np.where(is_double & beside, (start + to) // 2, _NO_SQUARE)
        self.halfmove[:] = np.where(is_pawn | takes, 0, self.halfmove + 1)
        self.fullmove[:] += turn
        self.turn[:] ^= 1
        return wrong, ~(takes | is_promotion)


def _pack(codes: Codes, made: npt.NDArray[Any]) -> None:
    """Write the pieces of boards, (n, 64), to MARLIN, (n,)."""
    is_there = codes != _EMPTY
    made["occupied"] = np.packbits(is_there, axis=1, bitorder="little")
    board, square = np.nonzero(is_there)
    place = (np.cumsum(is_there, axis=1) - 1)[board, square]
    nibbles = np.zeros((len(codes), MAX_PIECES), np.uint8)
    nibbles[board, place] = codes[board, square]
    made["pieces"] = nibbles[:, ::2] | nibbles[:, 1::2] << 4


def _corrupt(name: str, offset: int, expected: str, found: str) -> CorruptRecordError:
    return CorruptRecordError(f"{name}, byte {offset:,}: expected {expected}, found {found}")

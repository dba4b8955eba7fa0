"""Chess positions as trainers of efficiently updatable networks (NNUE) store them: 32 or 40 bytes, no planes.

- bulletformat, ``ChessBoard`` of jw1912/bulletformat, src/chess.rs: seen by the side to move. Its inputs are those
  of jw1912/bullet: Chess768, ChessBuckets, ChessBucketsMirrored.
- marlinformat, ``PackedBoard`` of cosmobobak/viriformat, README.md: seen by White.
- ``PackedSfenValue`` of official-stockfish/nnue-pytorch, data_loader/cpp/lib/nodchip.h: Huffman codes, seen by White.
  Its inputs are those of HalfKAv2_hm, data_loader/cpp/training_data_loader.cpp.

All numbers are little-endian, and squares go from a1, b1 … to h8. Each position becomes, for each of two sides, a
list of at most 32 indices of the pieces as that side sees them, padded with -1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError, WorkerError
from loaderd.kernels.prefix import read_codes
from loaderd.schema import Array, Codes, Derived, Field, FixedRecords, PrefixCodes, Schema, Sparse

Table = npt.NDArray[np.int64]
Pieces = Mapping[int, tuple[int, int]]
"""By code: colour (1: Black, or the side not to move) and type: pawn, knight, bishop, rook, queen, king."""

BULLET = np.dtype(
    [
        ("occupied", "u1", (8,)),  # bit i of the little-endian word: square i
        ("pieces", "u1", (16,)),  # four bits each, the low ones first, in the order of the squares
        ("score", "<i2"),  # in centipawns, as the side to move sees it
        ("result", "u1"),  # 0: the side to move lost; 1: a draw; 2: it won
        ("king", "u1"),
        ("opponent_king", "u1"),  # as the opponent sees it: ^ 56
        ("padding", "u1", (3,)),
    ]
)
"""32 bytes."""

MARLIN = np.dtype(
    [
        ("occupied", "u1", (8,)),
        ("pieces", "u1", (16,)),  # as in BULLET; type 6: a rook that may still castle
        ("side_to_move", "u1"),  # bit 7: Black; the other bits: the square of en passant, or 64
        ("halfmove", "u1"),
        ("fullmove", "<u2"),
        ("score", "<i2"),  # as White sees it
        ("result", "u1"),  # 0: Black won; 1: a draw; 2: White won
        ("extra", "u1"),
    ]
)
"""32 bytes."""

SFEN = np.dtype(
    [
        ("sfen", "u1", (32,)),
        ("score", "<i2"),  # as the side to move sees it
        ("move", "<u2"),  # to: bits 0-5; from: 6-11; promotion: 12-13; 14-15: 1 promotion, 2 en passant, 3 castling
        ("ply", "<u2"),
        ("result", "i1"),  # of the side to move: -1, 0, 1
        ("padding", "u1"),
    ]
)
"""40 bytes."""

MAX_PIECES, NUM_INPUTS = 32, 768
_SQUARES = np.arange(64)
_KINGS = (5, 13)  # the codes of the two kings, of four bits
_NIBBLES: Pieces = {8 * colour + kind: (colour, kind) for colour in range(2) for kind in range(6)}
_WITH_UNMOVED_ROOKS: Pieces = {**_NIBBLES, 6: (0, 3), 14: (1, 3)}

# Symbols of a PackedSfenValue: 0 is an empty square, and the kings have no codes: their squares stand in front.
_SFEN_PIECES: Pieces = {1 + 2 * kind + colour: (colour, kind) for kind in range(6) for colour in range(2)}
_WHITE_KING, _BLACK_KING = 11, 12
_SFEN_CODES = [
    "0",
    *(f"{code:04b}"[::-1] + colour for code in (0b0001, 0b0011, 0b0101, 0b0111, 0b1001) for colour in "01"),
    *(None, None),
]
SFEN_BOARD = PrefixCodes(
    "sfen",
    _SFEN_CODES,
    (64,),
    start=13,
    fixed=((1, 6, _WHITE_KING), (7, 6, _BLACK_KING)),
    order=(_SQUARES ^ 56).tolist(),  # from a8 to h8, then from a7 on
)
"""The symbol of each square: 0, or 1 + 2 · type + colour."""


def bullet(buckets: Sequence[int] | None = None, mirrored: bool = False, dtype: Any = "int32") -> Schema:
    """bulletformat's ``ChessBoard``, 32 bytes, with the inputs of bullet's Chess768, ChessBuckets and -Mirrored.

    Fields: ``stm`` and ``ntm`` (32,), of ``dtype`` (int16, int32 or int64): the indices of the pieces as the side to
    move sees them, and as the other side does, padded with -1; ``score`` (), float32, in centipawns, and ``result``
    (), float32: 0, ½ or 1, both of the side to move; ``count`` (), int32: how many pieces there are.

    An index is 384 · (0 for own pieces, 1 for others) + 64 · type + square, of 768; with ``buckets``, 768 times the
    bucket of the side's own king more. ``buckets``: for each of the 64 squares of the king, a1 first, as its own side
    sees it. ``mirrored``: where a king is on the files e to h, its side sees the board mirrored, and ``buckets`` are
    for the 32 squares of the files a to d (default: one bucket).

    A record with a piece or a result that does not exist is a WorkerError. With ``buckets`` or ``mirrored``, so is
    one whose stored squares of the kings do not exist, or are not where its kings stand; a king that is missing on
    the board is not noticed. Without them, these squares are not looked at. Raises SchemaError.
    """
    of_king = _buckets(buckets, mirrored, "bullet")
    fields: dict[str, Field] = {}
    for side, (name, king) in enumerate((("stm", "king"), ("ntm", "opponent_king"))):
        table = _by_squares(_NIBBLES, 16, side, of_king, mirrored, 0)
        if of_king is not None:  # no king of this side stands on another square than the stored one
            table[:, _KINGS[side]][_SQUARES[:, None] != _SQUARES ^ 56 * side] = -2
        fields[name] = _of_nibbles(table, of_king is not None, king, dtype)
    table = _by_squares(_NIBBLES, 16, 0, None, False, 0)
    return _schema(BULLET, ["occupied", "pieces"], fields, _of_nibbles(table, False, "king", "int32", count=True), 0)


def marlin(buckets: Sequence[int] | None = None, mirrored: bool = False, dtype: Any = "int32") -> Schema:
    """marlinformat's ``PackedBoard``, 32 bytes, which viriformat's games are unrolled to.

    Fields: ``white`` and ``black`` (32,), of ``dtype``: the indices of the pieces as White and as Black see them,
    padded with -1; ``us`` (), float32: 1 where White is to move, else 0; ``score`` (), float32, in centipawns, and
    ``result`` (), float32: 0, ½ or 1, both of White; ``count`` (), int32: how many pieces there are.

    Indices, ``buckets`` and ``mirrored`` are those of :func:`bullet`, White's or Black's in place of the side's to
    move. A rook that may still castle is a rook. The stored features ``halfmove`` and ``fullmove`` are there for
    ``where=``.

    A record with a piece or a result that does not exist, or, with buckets, without a king, is a WorkerError.
    """
    of_king = _buckets(buckets, mirrored, "marlin")
    fields: dict[str, Field] = {}
    for side, name in enumerate(("white", "black")):
        table = _by_squares(_WITH_UNMOVED_ROOKS, 16, side, of_king, mirrored, 56 * side)
        fields[name] = _of_nibbles(table, of_king is not None, _KINGS[side], dtype)
    fields["us"] = Codes("side_to_move", 1, (), [1, 0])
    table = _by_squares(_WITH_UNMOVED_ROOKS, 16, 0, None, False, 0)
    count = _of_nibbles(table, False, _KINGS[0], "int32", count=True)
    return _schema(MARLIN, ["occupied", "pieces", "side_to_move"], fields, count, 0)


def nnue_bin(dtype: Any = "int32") -> Schema:
    """Stockfish's ``.bin``, ``PackedSfenValue``, 40 bytes, with the inputs of HalfKAv2_hm: 32 · 768 = 24,576.

    Fields: ``white`` and ``black`` (32,), of ``dtype`` (int16, int32 or int64): the indices of the pieces as White
    and as Black see them, in the order of the squares, padded with -1; ``us`` (), float32: 1 where White is to move,
    else 0; ``score`` (), float32, as stored, and ``result`` (), float32: 0, ½ or 1, both of the side to move;
    ``count`` (), int32: how many pieces there are.

    An index is 768 · bucket + 64 · (2 · type + (0 for own pieces, 1 for others)) + square. A side whose king is on
    the files a to d sees the board mirrored; then the bucket is 31 - 4 · rank - (file - 4) of its king.

    For ``where=`` there are the stored features ``move`` and ``ply``, and the intermediate ``board`` (64,), uint8: of
    each square 0, or 1 + 2 · type + colour, Black's being 1. A record whose codes, kings or result do not exist is a
    WorkerError.
    """
    rank, file = np.divmod(_SQUARES, 8)
    of_king = 31 - 4 * rank - np.where(file < 4, 3 - file, file - 4)
    fields: dict[str, Field] = {}
    for side, (name, king) in enumerate((("white", _WHITE_KING), ("black", _BLACK_KING))):
        table = _by_squares(_SFEN_PIECES, 13, side, of_king, True, 56 * side, is_half_ka=True)
        table[:, 0] = -1
        fields[name] = Sparse(SFEN_BOARD, MAX_PIECES, table, bucket=king, dtype=dtype)
    fields["us"] = Codes("sfen", 1, (), [1, 0], bit_order="little")
    count = Sparse(SFEN_BOARD, MAX_PIECES, table[0], count=True)
    schema = _schema(SFEN, ["sfen"], fields, count, -1)
    return Schema(schema.features, schema.fields, {**schema.intermediates, "board": SFEN_BOARD})


def could_be(records: npt.NDArray[Any]) -> bool:
    """Whether ``records``, an array of BULLET, MARLIN or SFEN, are of that format: all of them look like boards.

    One king of each colour, where bulletformat says that they are; and no piece, result or square that cannot be.
    """
    if records.dtype == SFEN:
        return _are_sfens(records)
    return all(map(_is_bullet if records.dtype == BULLET else _is_marlin, records))


def _is_bullet(record: Any) -> bool:
    pieces = _pieces_of(record)
    kings = [[square for square, code in pieces.items() if code == king] for king in _KINGS]
    where = [[int(record["king"])], [int(record["opponent_king"]) ^ 56]]
    return kings == where and all(code in _NIBBLES for code in pieces.values()) and record["result"] <= 2


def _is_marlin(record: Any) -> bool:
    codes = list(_pieces_of(record).values())
    has_kings = all(codes.count(king) == 1 for king in _KINGS)
    is_known = all(code in _WITH_UNMOVED_ROOKS for code in codes)
    return has_kings and is_known and record["side_to_move"] & 127 <= 64 and record["result"] <= 2


def _pieces_of(record: Any) -> dict[int, int]:
    """By square, codes of four bits; empty where there are more than 32."""
    squares = np.flatnonzero(np.unpackbits(record["occupied"], bitorder="little")).tolist()
    codes = [code for byte in record["pieces"].tolist() for code in (byte & 15, byte >> 4)]
    return dict(zip(squares, codes, strict=False)) if len(squares) <= MAX_PIECES else {}


def _are_sfens(records: npt.NDArray[Any]) -> bool:
    try:
        symbols, _ = read_codes(SFEN_BOARD.layout("sfen", 0, 256), records["sfen"])
    except WorkerError:
        return False
    return bool(((symbols != 0).sum(axis=1) <= MAX_PIECES).all() and (abs(records["result"].astype(int)) <= 1).all())


def begins_with_game(head: bytes) -> bool:
    """Whether a file that begins with ``head`` holds games of viriformat: a board, and moves of 4 bytes behind it.

    Each is of a piece of the side whose turn it is, and not onto one of its own; castling takes the own rook.
    """
    if not _has_board(head, 0) or _has_board(head, MARLIN.itemsize):  # two of them: no games
        return False
    board = np.frombuffer(head, MARLIN, 1)
    colours = {square: code >> 3 for square, code in _pieces_of(board[0]).items()}
    turn, moves = (
        int(board["side_to_move"][0]) >> 7,
        np.frombuffer(head, "<u2", len(head) // 4 * 2)[16:].reshape(-1, 2),
    )
    for number, (move, score) in enumerate(moves.tolist()):
        if move == score == 0:
            stop = MARLIN.itemsize + 4 * (number + 1)
            return number > 0 and (_has_board(head, stop) or len(head) < stop + MARLIN.itemsize)
        start, to, kind = move & 63, move >> 6 & 63, move >> 14
        is_castling = kind == 2
        if colours.pop(start, None) != turn or (colours.get(to) == turn) != is_castling:
            return False
        if is_castling:
            del colours[to]
            king = start // 8 * 8 + (6 if to > start else 2)
            colours[king] = colours[king - 1 if to > start else king + 1] = turn
        else:
            colours[to] = turn
            if kind == 1:
                colours.pop(to ^ 8, None)
        turn ^= 1
    return len(moves) > 8


def _has_board(head: bytes, at: int) -> bool:
    return len(head) >= at + MARLIN.itemsize and could_be(np.frombuffer(head, MARLIN, 1, at))


def outcome(lost: int, stored: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32, (n,): 0, ½ and 1 of results, (n,), which are stored as ``lost``, and the two numbers behind it."""
    if (is_wrong := (stored < lost) | (stored > lost + 2)).any():
        raise ValueError(f"a result must be {lost}, {lost + 1} or {lost + 2}, got {stored[is_wrong][0]}")
    halves: npt.NDArray[np.float32] = (stored - np.float32(lost)) * np.float32(0.5)
    return halves


def _schema(record: np.dtype[Any], bits: list[str], fields: dict[str, Field], count: Sparse, lost: int) -> Schema:
    read = [name for name in record.names or () if name not in ("padding", "extra")]
    more: dict[str, Field] = {
        "score": Array("score", "float32"),
        "result": Derived(partial(outcome, lost), ("result (stored)",), (), "float32"),
        "count": count,
    }
    return Schema(FixedRecords(record[read], bits), {**fields, **more}, {"result (stored)": Array("result")})


def _of_nibbles(table: Table, has_buckets: bool, king: str | int, dtype: Any, count: bool = False) -> Sparse:
    more: dict[str, Any] = {"table": table, "bucket": king} if has_buckets else {"table": table[0]}
    of = {"codes": "pieces", "bit_order": "little", "dtype": dtype, "count": count}
    return Sparse("occupied", MAX_PIECES, **more, **of)


def _buckets(given: Sequence[int] | None, mirrored: bool, name: str) -> npt.NDArray[np.int64] | None:
    """int64, (64,): the bucket of each square of a king; None: there are none."""
    if not isinstance(mirrored, bool):
        raise SchemaError(f"{name}: mirrored must be True or False, got {mirrored!r:.200}")
    if given is None and not mirrored:
        return None
    size = 32 if mirrored else 64
    try:
        buckets = np.zeros(size, np.int64) if given is None else np.array(given)
    except (ValueError, TypeError):
        buckets = np.empty(0, object)
    if buckets.dtype.kind not in "iu" or buckets.shape != (size,) or buckets.min() < 0:
        of = "the files a to d" if mirrored else "the board"
        raise SchemaError(
            f"{name}: buckets must be {size} integers from 0 on, one for each square of a king on {of}, "
            f"got {given!r:.200}"
        )
    rank, file = np.divmod(_SQUARES, 8)
    places = 4 * rank + np.minimum(file, 7 - file) if mirrored else _SQUARES
    of_squares: npt.NDArray[np.int64] = buckets.astype(np.int64)[places]
    return of_squares


def _by_squares(
    pieces: Pieces,
    num_codes: int,
    side: int,
    buckets: npt.NDArray[np.int64] | None,
    mirrored: bool,
    king_flip: int,
    is_half_ka: bool = False,
) -> Table:
    """int64, (64, codes, 64): the index of a piece on a square, for each stored square of the side's own king.

    ``side``: 1 sees the board from Black's end. ``king_flip``: what makes of the stored square of its king the one as
    it sees it. HalfKAv2_hm mirrors kings on the files a to d, and has the two colours of a type next to each other;
    others mirror those on e to h.
    """
    seen = _SQUARES ^ king_flip
    is_left = seen % 8 < 4
    across = np.where(mirrored & (is_left == is_half_ka), 7, 0)
    squares = _SQUARES ^ (56 * side) ^ across[:, None]
    first = np.zeros(64, np.int64) if buckets is None else NUM_INPUTS * buckets[seen]
    table = np.full((64, num_codes, 64), -2)
    for code, (colour, kind) in pieces.items():
        is_other = int(colour != side)
        plane = 2 * kind + is_other if is_half_ka else 6 * is_other + kind
        table[:, code] = first[:, None] + 64 * plane + squares
    return table

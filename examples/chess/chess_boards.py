"""A chess position as the 194 packed bytes of the ``chess_eval`` record: the layout, and the encoder.

::

    bit of d   (bit 0 is the most significant bit of byte 0; a rank and a file count from 0)

    0 ┌──────────────────────────────────────────────────────────────┐
      │ 64 squares of 24 channels each:                              │   square = 8 · rank + file:
      │ bit 24 · square + channel                                    │   0 is a1, 7 is h1, 63 is h8
 1536 ├──────────────────────────────────────────────────────────────┤
      │ ten flags, in the order of FLAGS                             │
 1546 ├──────────────────────────────────────────────────────────────┤
      │ 1: the score counts moves to mate; 0: it is in centipawns    │
 1547 ├──────────────────────────────────────────────────────────────┤
      │ five bits of padding, 0                                      │
 1552 └──────────────────────────────────────────────────────────────┘

    channel = 4 · piece type (pawn 0, knight 1, bishop 2, rook 3, queen 4, king 5) + member

    member 0: the squares of white's pieces       member 2: the squares that white's pieces of that type attack
    member 1: the squares of black's pieces       member 3: the squares that black's pieces of that type attack

A pinned piece still attacks, and a piece "attacks" the squares of its own side that it defends. The board is
always seen from white's side; a flag says whose turn it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import chess
import numpy as np
import numpy.typing as npt

NUM_CHANNELS = 24
NUM_BYTES = 194

# The one table of the flags. Bit 1536 + i of a record is set where the i-th predicate is true.
FLAGS: tuple[tuple[str, Callable[[chess.Board], bool]], ...] = (
    ("white to move", lambda board: board.turn),
    ("white may castle on the king's side", lambda board: board.has_kingside_castling_rights(chess.WHITE)),
    ("white may castle on the queen's side", lambda board: board.has_queenside_castling_rights(chess.WHITE)),
    ("black may castle on the king's side", lambda board: board.has_kingside_castling_rights(chess.BLACK)),
    ("black may castle on the queen's side", lambda board: board.has_queenside_castling_rights(chess.BLACK)),
    ("the side to move is in check", lambda board: board.is_check()),
    ("an en passant capture is legal", lambda board: board.has_legal_en_passant()),
    ("25 moves by each side without a capture or a pawn's move", lambda board: board.halfmove_clock >= 50),
    ("the position stood on the board before", lambda board: board.is_repetition(2)),
    ("at most ten pieces are left, kings and pawns included", lambda board: board.occupied.bit_count() <= 10),
)


def bitboards(board: chess.Board) -> tuple[int, ...]:
    """The 24 channels of a position in stored order, each an integer whose bit ``s`` stands for square ``s``."""
    channels = []
    for piece_type in chess.PIECE_TYPES:
        pieces = [board.pieces_mask(piece_type, color) for color in (chess.WHITE, chess.BLACK)]
        channels += [*pieces, *(_attacks(board, squares) for squares in pieces)]
    return tuple(channels)


def _attacks(board: chess.Board, squares: int) -> int:
    attacked = 0
    for square in chess.scan_forward(squares):
        attacked |= board.attacks_mask(square)
    return attacked


def flags(board: chess.Board) -> tuple[bool, ...]:
    """The ten flags of a position. The ninth looks back over the board's move stack."""
    return tuple(is_set(board) for _, is_set in FLAGS)


def pack(
    channels: Sequence[Sequence[int]], flag_bits: Sequence[Sequence[bool]], mate: Sequence[bool]
) -> npt.NDArray[np.uint8]:
    """The stored bytes of n positions: uint8, (n, 194).

    For each position: ``channels``, 24 integers as :func:`bitboards` gives them; ``flag_bits``, ten; ``mate``,
    whether the score counts moves to mate.
    """
    as_bytes = np.array(channels, dtype="<u8").reshape(-1, NUM_CHANNELS, 1).view(np.uint8)
    # Square 0 is an integer's lowest bit, so each byte of a bitboard is unpacked from its low end.
    squares_last = np.unpackbits(as_bytes, axis=2, bitorder="little")
    planes = squares_last.transpose(0, 2, 1).reshape(len(as_bytes), 64 * NUM_CHANNELS)
    tail = np.column_stack([np.array(flag_bits, dtype=bool), np.array(mate, dtype=bool)])
    return np.packbits(np.concatenate([planes, tail], axis=1), axis=1)

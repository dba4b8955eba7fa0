"""Shogi positions as trainers store them: a Huffman board of 256 bits, then a score, a move and the result.

- hcpe, 38 bytes: ``HuffmanCodedPosAndEval`` of TadaoYamaoka/DeepLearningShogi, cppshogi/position.cpp.
- psv, 40 bytes: ``PackedSfenValue`` of yaneurao/YaneuraOu, source/extra/sfen_packer.cpp. Its codes are other ones.

All numbers are little-endian, and so are the bits of a byte. The bits: 1 of the side to move (0: Black), 7 of the
square of Black's king, 7 of White's; the other 79 squares; the pieces in hand; those that a handicap has taken off.
So they are always 256. Square 9 · (file - 1) + rank - 1: 0 is 1a (１一), 80 is 9i (９九).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError, WorkerError
from loaderd.kernels.prefix import read_codes
from loaderd.schema import Array, Bits, Derived, Field, FixedRecords, Packed, PrefixCodes, Schema, Sparse

AnyArray = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Inputs = Literal["planes", "halfkp", "halfka"]

HCPE = np.dtype(
    [
        ("hcp", "u1", (32,)),
        ("eval", "<i2"),  # as the side to move sees it
        ("bestMove16", "<u2"),  # to: bits 0-6; from: 7-13, 81 and more: a drop; 14: it promotes
        ("gameResult", "u1"),  # bits 0-1: 0 a draw, 1 Black won, 2 White won; above, how the game ended
        ("dummy", "u1"),
    ]
)
"""38 bytes."""

PSV = np.dtype(
    [
        ("sfen", "u1", (32,)),
        ("score", "<i2"),  # as the side to move sees it
        ("move", "<u2"),  # to: bits 0-6; from, or the kind of a dropped piece: 7-13; 14: a drop; 15: it promotes
        ("gamePly", "<u2"),
        ("game_result", "i1"),  # of the side to move: -1, 0, 1
        ("padding", "u1"),
    ]
)
"""40 bytes."""

# Kinds of pieces: pawn, lance, knight, silver, bishop, rook, gold, king, then the first six promoted. A symbol is 0
# of an empty square, 1 + kind of Black's pieces, 15 + kind of White's.
NUM_KINDS, NUM_SQUARES, _KING, _GOLD = 14, 81, 7, 6
BLACK_KING, WHITE_KING = 1 + _KING, 1 + NUM_KINDS + _KING
_SQUARES = np.arange(NUM_SQUARES)
# Hands are counted in another order: pawns, lances, knights, silvers, golds, bishops, rooks.
MOST_IN_HAND = (18, 4, 4, 4, 4, 2, 2)
_HAND_PLANES = (8, 4, 4, 4, 4, 2, 2)  # of dlshogi
MAX_PIECES = 38  # without the kings
_NUM_INPUTS = {"halfkp": 1548, "halfka": 1710}  # for each square of the king
_WINNER = 3  # the bits of gameResult that say who won


def _board_codes(stems: tuple[str, ...], colour_first: bool) -> list[str | None]:
    """By symbol. ``stems``: of each of the first seven kinds, what its codes begin with."""
    codes: list[str | None] = ["0"]
    for colour in "01":
        for kind in range(NUM_KINDS):
            stem, promoted = stems[kind - 8 if kind > _KING else min(kind, _GOLD)], str(int(kind > _KING))
            both = colour + promoted if colour_first else promoted + colour
            codes.append(None if kind == _KING else stem + (colour if kind == _GOLD else both))
    return codes


# In the order of the first seven kinds.
_HCP_STEMS = ("10", "1100", "1110", "1101", "111110", "111111", "11110")
_PSV_STEMS = ("10", "1100", "1101", "1110", "111110", "111111", "11110")
_HANDS = {
    "hcp": ("00", "1000", "1100", "1010", "1110", "111110", "111111"),
    "sfen": ("00", "1000", "1010", "1100", "1110", "111100", "111110"),
}
"""By format, in the order of hands; a bit of the colour is behind each."""
_TAKEN_OFF = {
    "hcp": ("010", "10010", "11010", "10110", "10111", "1111000", "1111010"),
    "sfen": ("010", "10010", "10110", "11010", "11011", "1111010", "1111110"),
}

HCP_BOARD, PSV_BOARD = (
    PrefixCodes(
        feature,
        _board_codes(stems, colour_first=feature == "hcp"),
        (NUM_SQUARES,),
        start=15,
        fixed=[(1, 7, BLACK_KING), (8, 7, WHITE_KING)],
    )
    for feature, stems in (("hcp", _HCP_STEMS), ("sfen", _PSV_STEMS))
)
"""(81,), uint8: the symbol of each square."""


def hcpe(inputs: Inputs = "planes", dtype: Any = None) -> Schema:
    """dlshogi's hcpe: ``inputs``, and ``score``, ``move`` and ``result``, as the side to move sees them.

    ``"planes"``: ``pieces`` (28, 9, 9), float32 or ``dtype``: the first 14 and the planes 31 to 44 of dlshogi's 62,
    by file and rank; and ``hands`` (56,): the first 56 of its other 57, each of which has one value everywhere. The
    other planes (attacks, check) need moves to be generated, which no schema does.

    ``"halfkp"`` and ``"halfka"``: ``black`` and ``white``, (38,) or (40,), int32 or ``dtype`` (int64): the indices of
    the pieces on the board and in hand as each side sees them, padded with -1; ``us`` (), float32: 1 where Black is
    to move. They are YaneuraOu's (source/eval/evaluate_common.h): 81 · 1,548 of the pieces without the kings, and
    81 · 1,710 with them.

    ``score`` (), float32: the evaluation. ``move`` (), int32: dlshogi's label of the move, 0 to 2,186; -1 of what is
    no move. ``result`` (), float32: 1 for a win, ½, 0. As in dlshogi's trainer, it is what the two low bits of the
    stored byte say; the bits above them (repetition, declaration, most moves) are not looked at.

    A board whose codes, places or hands do not exist, and a result that does not, is a WorkerError.
    """
    won = np.array([[0.5, 1, 0], [0.5, 0, 1]], np.float32)  # by turn and stored number
    return _schema("hcpe", HCPE, HCP_BOARD, ("eval", "bestMove16", "gameResult"), won, (0, _WINNER), inputs, dtype)


def psv(inputs: Inputs = "halfkp", dtype: Any = None) -> Schema:
    """YaneuraOu's psv: the fields of :func:`hcpe`, and ``ply`` (), int32: the move's number in the game."""
    won = np.array([[0, 0.5, 1]] * 2, np.float32)
    return _schema("psv", PSV, PSV_BOARD, ("score", "move", "game_result"), won, (-1, -1), inputs, dtype)


def _schema(
    name: str,
    record: np.dtype[Any],
    board: PrefixCodes,
    stored: tuple[str, str, str],
    won: npt.NDArray[np.float32],
    results: tuple[int, int],
    inputs: Inputs,
    dtype: Any,
) -> Schema:
    """``won`` and ``results``: as :func:`outcome` has them."""
    feature, (score, move, result) = board.feature, stored
    has_ply = "gamePly" in (record.names or ())
    end = PrefixCodes(feature, board.codes, board.shape, start=15, fixed=board.fixed, end=True)
    more: dict[str, Field] = {
        "turn": Bits(feature, (), bit_order="little", dtype="uint8"),
        "board": board,
        "board end": end,
        "position": Packed(feature),
        "hand counts": Derived(partial(hand_counts, _hand_steps(feature)), ("position", "board end"), (14,), "uint8"),
        "move (stored)": Array(move),
        "result (stored)": Array(result),
    }
    fields: dict[str, Field]
    if inputs == "planes":
        dtype = "float32" if dtype is None else dtype
        fields = {
            "pieces": Derived(piece_planes, ("board", "turn"), (2 * NUM_KINDS, 9, 9), dtype),
            "hands": Derived(hand_planes, ("hand counts", "turn"), (2 * sum(_HAND_PLANES),), dtype),
        }
    elif isinstance(inputs, str) and inputs in _NUM_INPUTS:
        dtype = "int32" if dtype is None else dtype
        most = MAX_PIECES + 2 * (inputs == "halfka")
        fields = {}
        for side, (own, king) in enumerate((("black", BLACK_KING), ("white", WHITE_KING))):
            table = _inputs_of(inputs, side)
            more[f"{own} (board)"] = Sparse(board, most, table, bucket=king, dtype=dtype)
            join = partial(with_hands, side, _NUM_INPUTS[inputs])
            fields[own] = Derived(join, (f"{own} (board)", "hand counts", "position"), (most,), dtype)
        fields["us"] = Derived(is_black, ("turn",), (), "float32")
    else:
        raise SchemaError(f'{name}: inputs must be "planes", "halfkp" or "halfka", got {inputs!r:.200}')
    fields |= {
        "score": Array(score, "float32"),
        "move": Derived(partial(move_labels, _labels(name == "psv")), ("move (stored)", "turn"), (), "int32"),
        "result": Derived(partial(outcome, won, *results), ("result (stored)", "turn"), (), "float32"),
    }
    if has_ply:
        fields["ply"] = Array("gamePly", "int32")
    read = [each for each in record.names or () if each not in ("dummy", "padding")]
    return Schema(FixedRecords(record[read], [feature]), fields, more)


def could_be(records: npt.NDArray[Any]) -> bool:
    """Whether ``records``, an array of HCPE or PSV, are of that format: all are boards with hands, and a result."""
    is_hcpe = records.dtype == HCPE
    board, first = (HCP_BOARD, 0) if is_hcpe else (PSV_BOARD, -1)
    results = records["gameResult"] & _WINNER if is_hcpe else records["game_result"]
    stored = records[board.feature]
    try:
        _, ends = read_codes(board.layout(board.feature, 0, 256), stored)
        hand_counts(_hand_steps(board.feature), stored, ends)
    except (WorkerError, ValueError):
        return False
    return bool(((results >= first) & (results <= first + 2)).all())


# ------------------------------------------------------------------------------------------- boards and hands


def piece_planes(board: Bytes, turn: Bytes) -> Bytes:
    """uint8, (n, 28, 9, 9): 1 where a piece stands: the side to move's 14 kinds, then the other's, by file and rank.

    ``board``: symbols, (n, 81). ``turn``: 1 where White is to move, who sees it from the other end.
    """
    planes = np.zeros((len(board), 2 * NUM_KINDS * NUM_SQUARES), np.uint8)
    record, square = np.nonzero(board != 0)
    seen = turn.astype(np.intp)[record] * _PLANES[0].size + board[record, square] * np.intp(NUM_SQUARES) + square
    planes.reshape(-1)[record * planes.shape[1] + _PLANES.reshape(-1)[seen]] = 1
    return planes.reshape(len(board), 2 * NUM_KINDS, 9, 9)


def _planes() -> npt.NDArray[np.int32]:
    """int32, (2, symbols, squares): by turn, which value of the planes a piece is."""
    kinds = np.arange(2 * NUM_KINDS)[:, None]
    black = NUM_SQUARES * kinds + _SQUARES
    white = NUM_SQUARES * ((kinds + NUM_KINDS) % (2 * NUM_KINDS)) + _SQUARES[::-1]
    return np.pad(np.stack([black, white]), ((0, 0), (1, 0), (0, 0))).astype(np.int32)  # and of the empty square


_PLANES = _planes()


def hand_planes(counts: Bytes, turn: Bytes) -> npt.NDArray[np.bool_]:
    """bool, (n, 56): whether the side to move, then the other, has one pawn or more, two … eight, one lance …"""
    own = np.where(turn[:, None] == 0, counts, np.roll(counts, 7, axis=1))
    kinds = np.repeat(np.arange(14), _HAND_PLANES * 2)
    numbers = np.concatenate([np.arange(most) for most in _HAND_PLANES * 2])
    found: npt.NDArray[np.bool_] = own[:, kinds] > numbers
    return found


def _hand_steps(feature: str) -> tuple[npt.NDArray[np.uint8], AnyArray]:
    """How to read the hands a byte at a time: (next state, what is counted) by state and byte.

    uint8 and two uint64, (states, 256). A state is the first bits of a code; 0 is between two codes. The last nine
    are those of a byte in which the hands begin, by the bit where they do, and of bytes in front of it. What is
    counted are 16 numbers of one byte: Black's seven kinds in hand, White's; the pieces taken off; and bits that are
    no code.
    """
    codes = {stem + str(colour): 7 * colour + kind for colour in (0, 1) for kind, stem in enumerate(_HANDS[feature])}
    codes |= dict.fromkeys(_TAKEN_OFF[feature], 14)
    begun = sorted(
        {code[:length] for code in codes for length in range(len(code))}, key=lambda bits: (len(bits), bits)
    )
    numbers = {bits: number for number, bits in enumerate(begun)}
    table = np.zeros((len(begun) + 9, 256), np.uint8)
    counted = np.zeros((len(begun) + 9, 256, 16), np.uint8)
    for state in range(len(begun) + 8):
        skipped = max(0, state - len(begun))
        for byte in range(256):
            bits = begun[state] if state < len(begun) else ""
            for place in range(skipped, 8):
                bits += str(byte >> place & 1)
                if bits in codes:
                    counted[state, byte, codes[bits]] += 1
                    bits = ""
                elif bits not in numbers:
                    counted[state, byte, 15] += 1
                    bits = ""
            table[state, byte] = numbers[bits]
    table[-1] = len(begun) + 8  # the hands have not begun
    return table, counted.view(np.uint64)


def hand_counts(steps: tuple[npt.NDArray[np.uint8], AnyArray], position: Bytes, board_end: AnyArray) -> Bytes:
    """uint8, (n, 14): the pawns, lances, knights, silvers, golds, bishops and rooks in Black's hand, and in White's.

    ``steps``: of :func:`_hand_steps`. ``position``: (n, 32). ``board_end``: the bit where the hands begin.
    """
    table, counted = steps
    waiting = len(table) - 1
    first, bit = np.divmod(board_end, 8)
    state = np.full(len(position), waiting, np.intp)
    counts = np.zeros((len(position), 2), np.uint64)
    for column in range(int(first.min(initial=32)), position.shape[1]):
        state = np.where(first == column, waiting - 8 + bit, state)
        at = state * 256 + position[:, column]
        counts += counted.reshape(-1, 2).take(at, axis=0)
        state = table.reshape(-1).take(at).astype(np.intp)
    found = counts.view(np.uint8).reshape(len(position), 16)
    in_hand: Bytes = found[:, :14]
    is_cut = (found[:, 15] > 0) | ((state != 0) & (state != waiting))
    if is_cut.any() or (in_hand > np.array(MOST_IN_HAND * 2)).any():
        raise ValueError("the bits behind a board are no pieces in hand")
    return in_hand


# ------------------------------------------------------------------------------------------- sparse inputs

_FIRST_ON_BOARD = (90, 252, 414, 576, 900, 1224, 738, 1548, 738, 738, 738, 738, 1062, 1386)
"""By kind, the first index of one's own pieces; that of the other's is 81 behind it."""
_FIRST_IN_HAND = ((1, 20), (39, 44), (49, 54), (59, 64), (69, 74), (79, 82), (85, 88))
"""By kind, in the order of hands: one's own, the other's."""
_HAND_SLOTS = np.repeat(np.arange(14), MOST_IN_HAND * 2)
_HAND_NUMBERS = np.concatenate([np.arange(most) for most in MOST_IN_HAND * 2])


def _inputs_of(inputs: Inputs, side: int) -> npt.NDArray[np.int64]:
    """int64, (81, symbols, 81): by the stored square of the side's own king, a piece's index."""
    seen = _SQUARES[::-1] if side else _SQUARES
    table = np.full((NUM_SQUARES, 1 + 2 * NUM_KINDS, NUM_SQUARES), -1)
    for colour in (0, 1):
        for kind, first in enumerate(_FIRST_ON_BOARD):
            if kind != _KING or inputs == "halfka":
                table[:, 1 + NUM_KINDS * colour + kind] = (
                    _NUM_INPUTS[inputs] * seen[:, None] + first + NUM_SQUARES * (colour != side) + seen
                )
    return table


def with_hands(side: int, stride: int, board: AnyArray, counts: Bytes, position: Bytes) -> AnyArray:
    """``board``'s indices, (n, k), and behind them those of the pieces in hand, ``counts``, (n, 14).

    ``side``: 1 sees it as White. ``stride``: how many inputs there are for each square of the king.
    """
    first = np.array([each[int(colour != side)] for colour in (0, 1) for each in _FIRST_IN_HAND])
    inputs = first[_HAND_SLOTS] + _HAND_NUMBERS
    bits = position[:, 0] | position[:, 1].astype(np.int64) << 8
    king = 80 - (bits >> 8 & 127) if side else bits >> 1 & 127
    has = counts[:, _HAND_SLOTS] > _HAND_NUMBERS
    record, slot = np.nonzero(has)
    in_hand = has.sum(axis=1)
    on_board = (board >= 0).sum(axis=1)
    if (on_board + in_hand > board.shape[1]).any():
        raise ValueError(f"a position must have {board.shape[1]} pieces at most, got {(on_board + in_hand).max()}")
    before = np.cumsum(in_hand) - in_hand
    indices: AnyArray = board.copy()
    indices[record, on_board[record] + np.arange(len(record)) - before[record]] = stride * king[record] + inputs[slot]
    return indices


def is_black(turn: Bytes) -> npt.NDArray[np.bool_]:
    """bool, (n,): whether Black is to move."""
    found: npt.NDArray[np.bool_] = turn == 0
    return found


# ------------------------------------------------------------------------------------------- moves and results


def _labels(is_psv: bool) -> npt.NDArray[np.int16]:
    """int16, (2, 65,536): by turn and stored move, dlshogi's label: 81 · direction + the square that it goes to.

    Directions: up, up left, up right, left, right, down, down left, down right, a knight's left and right; ten more
    for moves that promote; and one for each kind that is dropped.
    """
    stored = np.arange(1 << 16)
    to, source = stored & 127, stored >> 7 & 127
    if is_psv:
        is_drop, promotes, dropped = stored >> 14 & 1 == 1, stored >> 15 & 1, source - 1
    else:
        is_drop, promotes, dropped = source >= NUM_SQUARES, stored >> 14 & 1, source - NUM_SQUARES
    is_known = (to < NUM_SQUARES) & np.where(is_drop, (dropped >= 0) & (dropped < 7) & (promotes == 0), True)
    is_known &= is_drop | ((source < NUM_SQUARES) & (source != to))
    is_known &= is_psv | (stored >> 15 == 0)
    labels = []
    for turn in (0, 1):
        goes, comes = (80 - to, 80 - source) if turn else (to, source)
        across = np.sign(comes // 9 - goes // 9)  # 1: to the right, where the files have lower numbers
        ahead, files = goes % 9 - comes % 9, np.abs(comes // 9 - goes // 9)
        direction = np.array([[1, 0, 2], [3, 0, 4], [6, 5, 7]])[np.sign(ahead) + 1, across + 1]
        direction = np.where((ahead == -2) & (files == 1), np.where(across < 0, 8, 9), direction)
        label = NUM_SQUARES * np.where(is_drop, 20 + dropped, direction + 10 * promotes) + goes
        labels.append(np.where(is_known, label, -1))
    return np.stack(labels).astype(np.int16)


def move_labels(labels: npt.NDArray[np.int16], move: AnyArray, turn: Bytes) -> npt.NDArray[np.int16]:
    """int16, (n,): of stored moves, (n,), by the table of :func:`_labels`."""
    found: npt.NDArray[np.int16] = labels[turn, move]
    return found


def outcome(
    won: npt.NDArray[np.float32], first: int, mask: int, result: AnyArray, turn: Bytes
) -> npt.NDArray[np.float32]:
    """float32, (n,): ``won[turn, (result & mask) - first]``. ``won``: float32, (2, 3)."""
    number = (result.astype(np.int64) & mask) - first
    if (is_wrong := (number < 0) | (number > 2)).any():
        raise ValueError(f"a result must be {first}, {first + 1} or {first + 2}, got {number[is_wrong][0] + first}")
    found: npt.NDArray[np.float32] = won[turn, number]
    return found

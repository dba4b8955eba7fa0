"""viriformat's games, unrolled, against python-chess, which plays them."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import chess
import numpy as np
import pytest

import loaderd
from loaderd.convert import viriformat
from loaderd.errors import CorruptRecordError
from loaderd.schemas.nnue import MARLIN
from tests.helpers.nnue_boards import Position, marlin

VECTOR = "ffff00000000ffff 1642256100000000888888889ecaade9 40 00 0100 0000 02 00"
MOVES = "0c070a00 34091400 c309e2ff 3c0dff7f 2709ff7f 00000000"


def board_of(board: chess.Board, score: int, result: int) -> bytes:
    """marlinformat, by python-chess' words."""
    squares = {square: piece.symbol() for square, piece in board.piece_map().items()}
    for square in chess.scan_forward(board.castling_rights):
        squares[square] = "U" if squares[square] == "R" else "u"
    en_passant = board.ep_square if board.has_pseudo_legal_en_passant() else None
    turn = board.turn == chess.BLACK
    counts = (board.halfmove_clock, board.fullmove_number)
    return marlin(Position(squares, turn, score, result, en_passant, *counts))


def word_of(board: chess.Board, move: chess.Move, score: int) -> bytes:
    kind = 3 if move.promotion else 2 if board.is_castling(move) else board.is_en_passant(move)
    promotion = move.promotion - 2 if move.promotion else 0
    packed = move.from_square | move.to_square << 6 | promotion << 12 | kind << 14
    return struct.pack("<Hh", packed, score)


def play(rng: random.Random, number: int) -> tuple[bytes, list[bytes], list[bool]]:
    """A game of Chess960, its boards, and whether each one's move neither takes nor promotes."""
    board = chess.Board.from_chess960_pos(rng.randrange(960)) if number % 2 else chess.Board(chess960=True)
    result, boards, quiet = rng.randrange(3), [], []
    words = board_of(board, 0, result)
    for score in range(rng.choice([0, 1, 30, 250])):
        moves = list(board.legal_moves)
        if not moves:
            break
        rare = [each for each in moves if each.promotion or board.is_castling(each) or board.is_en_passant(each)]
        move = rng.choice(rare or moves)
        words += word_of(board, move, -score)
        boards.append(board_of(board, -score, result))
        quiet.append(not (move.promotion or board.is_capture(move)))
        board.push(move)
    return words + bytes(4), boards, quiet


def test_games_of_any_length_and_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(viriformat, "_BYTES_AT_ONCE", 20_000)  # which cuts games
    rng = random.Random(0)
    games = [play(rng, number) for number in range(300)]
    (tmp_path / "games.vf").write_bytes(b"".join(words for words, *_ in games))
    expected = b"".join(board for _, boards, _ in games for board in boards)
    assert viriformat.unroll(tmp_path / "games.vf", tmp_path / "a.bin") == len(expected) // 32 > 15_000
    assert (tmp_path / "a.bin").read_bytes() == expected
    kinds = np.frombuffer(b"".join(words[32:-4] for words, *_ in games), "<u2")[::2] >> 14
    assert (np.bincount(kinds)[1:] > 20).all(), "en passant, castling and promotions"
    viriformat.unroll(tmp_path / "games.vf", tmp_path / "quiet.bin", quiet=True)
    left = [board for _, boards, quiet in games for board, is_quiet in zip(boards, quiet, strict=True) if is_quiet]
    assert (tmp_path / "quiet.bin").read_bytes() == b"".join(left)
    with loaderd.Loader(tmp_path / "a.bin", loaderd.schemas.marlin(), batch_size=512, workers=1) as loader:
        assert sum(len(batch["score"]) for batch in loader) == len(expected) // 32


def test_the_example_of_its_readme(tmp_path: Path):
    (tmp_path / "games.vf").write_bytes(bytes.fromhex(VECTOR + MOVES))
    assert viriformat.unroll(tmp_path / "games.vf", tmp_path / "a.bin") == 5
    boards = np.fromfile(tmp_path / "a.bin", MARLIN)
    assert boards["score"].tolist() == [10, 20, -30, 32767, 32767] and (boards["result"] == 2).all()
    assert boards["fullmove"].tolist() == [1, 1, 2, 2, 3] and boards["halfmove"].tolist() == [0, 0, 0, 1, 2]
    assert [side >> 7 for side in boards["side_to_move"].tolist()] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        (
            "0c070a00",
            r"games\.vf, byte 0: expected a game that ends with four zero bytes, found 36 bytes without an end",
        ),
        ("0c070a00 0c070a00 00000000", r"byte 36: expected a move that can be, found 0x070c, move 1 of its game"),
        ("04000a00 00000000", "byte 32: expected a move that can be"),  # onto the own rook, without castling
        ("41810a00 00000000", "byte 32: expected a move that can be"),  # a knight castles
    ],
)
def test_what_is_damaged_is_named(moves: str, said: str, tmp_path: Path):
    (tmp_path / "games.vf").write_bytes(bytes.fromhex(VECTOR + moves))
    with pytest.raises(CorruptRecordError, match=said):
        viriformat.unroll(tmp_path / "games.vf", tmp_path / "a.bin")
    assert [path.name for path in tmp_path.iterdir()] == ["games.vf"]


@pytest.mark.parametrize(
    ("byte", "value", "said"), [(2, 255, "pieces, result"), (30, 9, "result 9"), (24, 127, "127")]
)
def test_a_head_that_no_game_has_is_named(byte: int, value: int, said: str, tmp_path: Path):
    game = bytearray.fromhex(VECTOR + "0c070a00 00000000")
    game[2:7] = bytes([value] * 5) if byte == 2 else game[2:7]
    game[byte] = value
    (tmp_path / "games.vf").write_bytes(bytes.fromhex(VECTOR + "0c070a00 00000000") + bytes(game))
    with pytest.raises(CorruptRecordError, match=f"byte 40: expected a board of at most 32 pieces.*{said}"):
        viriformat.unroll(tmp_path / "games.vf", tmp_path / "a.bin")

"""The chess example's shards: the encoding against python-chess, the seed, and TensorFlow's reading of them."""

from __future__ import annotations

import contextlib
import io
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import chess
import chess_boards
import games
import make_shards
import numpy as np
import numpy.typing as npt
import pytest

from loaderd.schema import Bits
from loaderd.schemas import chess_eval

WHITE_TO_MOVE, WHITE_OO, WHITE_OOO, BLACK_OO, BLACK_OOO, CHECK, EN_PASSANT, QUIET, REPEATED, ENDGAME = range(10)
ALL_CASTLING = {WHITE_OO, WHITE_OOO, BLACK_OO, BLACK_OOO}


def after(*moves: str) -> chess.Board:
    board = chess.Board()
    for move in moves:
        board.push_san(move)
    return board


FLAGGED = {
    "start": (chess.Board(), {WHITE_TO_MOVE} | ALL_CASTLING),
    "fool's mate": (after("f3", "e5", "g4", "Qh4#"), {WHITE_TO_MOVE, CHECK} | ALL_CASTLING),
    "en passant": (after("e4", "a6", "e5", "d5"), {WHITE_TO_MOVE, EN_PASSANT} | ALL_CASTLING),
    "no pawn to take en passant": (after("e4"), ALL_CASTLING),
    "en passant, but pinned": (chess.Board("8/8/8/K2pP2r/8/8/8/4k3 w - d6 0 1"), {WHITE_TO_MOVE, ENDGAME}),
    "castled": (after("e4", "e5", "Nf3", "Nf6", "Be2", "Be7", "O-O"), {BLACK_OO, BLACK_OOO}),
    "a rook has moved": (after("a4", "h5", "Ra3", "Rh6"), {WHITE_TO_MOVE, WHITE_OO, BLACK_OOO}),
    "repeated": (after("Nf3", "Nf6", "Ng1", "Ng8"), {WHITE_TO_MOVE, REPEATED} | ALL_CASTLING),
    "quiet endgame": (chess.Board("8/5k2/8/8/3Q4/8/2K5/8 b - - 50 90"), {QUIET, ENDGAME}),
    "eleven pieces": (chess.Board("4k3/pppp4/8/8/8/8/PPPPP3/4K3 b - - 49 90"), set[int]()),
}


def encode(board: chess.Board, mate: bool = False) -> npt.NDArray[np.uint8]:
    """The stored bits of one position, one a value: uint8, (1552,)."""
    packed = chess_boards.pack([chess_boards.bitboards(board)], [chess_boards.flags(board)], [mate])
    assert packed.shape == (1, chess_boards.NUM_BYTES) and packed.dtype == np.uint8
    return np.unpackbits(packed[0])


def random_boards(seed: int, plies: int) -> Iterator[chess.Board]:
    rng, board = random.Random(seed), chess.Board()
    while not board.is_game_over() and board.ply() < plies:
        board.push(rng.choice(list(board.legal_moves)))
        yield board


def assert_planes_show(bits: npt.NDArray[np.uint8], board: chess.Board) -> None:
    """Square by square, with python-chess asked the other way round: who attacks this square?"""
    planes = bits[:1536].reshape(8, 8, 6, 4)
    expected = np.zeros_like(planes)
    for square in chess.SQUARES:
        here = expected[chess.square_rank(square), chess.square_file(square)]
        piece = board.piece_at(square)
        if piece:
            here[piece.piece_type - 1, 0 if piece.color else 1] = 1
        for color, member in ((chess.WHITE, 2), (chess.BLACK, 3)):
            for attacker in board.attackers(color, square):
                here[(board.piece_type_at(attacker) or 0) - 1, member] = 1
    np.testing.assert_array_equal(planes, expected)


@pytest.mark.parametrize("name", FLAGGED)
def test_flags_say_what_the_board_says(name: str) -> None:
    board, expected = FLAGGED[name]
    assert set(np.flatnonzero(encode(board)[1536:1546])) == expected


@pytest.mark.parametrize("seed", range(3))
def test_planes_show_random_positions(seed: int) -> None:
    for board in random_boards(seed, plies=120):
        assert_planes_show(encode(board), board)


def test_mate_bit_is_bit_1546_and_the_padding_is_zero() -> None:
    with_bit, without = encode(chess.Board(), mate=True), encode(chess.Board())
    assert list(np.flatnonzero(with_bit != without)) == [1546]
    assert not with_bit[1547:].any()


def test_the_schema_orders_and_signs_the_channels_by_side() -> None:
    board = after("e4", "d5", "Nc3")
    field = chess_eval().fields["board"]
    assert isinstance(field, Bits) and field.channel_order is not None
    delivered = encode(board)[:1536].reshape(8, 8, 24)[:, :, list(field.channel_order)] * np.asarray(field.scale)
    for i, piece_type in enumerate(chess.PIECE_TYPES):
        for color, channel, sign in ((chess.WHITE, i, 1), (chess.BLACK, 6 + i, -1)):
            squares = np.array([square in board.pieces(piece_type, color) for square in chess.SQUARES]).reshape(8, 8)
            np.testing.assert_array_equal(delivered[:, :, channel], sign * squares)
    assert (delivered[:, :, 12:18] >= 0).all() and (delivered[:, :, 18:] <= 0).all()
    assert delivered[:, :, 12:18].any() and delivered[:, :, 18:].any()


@pytest.mark.parametrize(
    ("board", "score"),
    [
        (after("f3", "e5", "g4"), games.Score(-1, mate=True)),
        (after("e4", "e5", "Qh5", "Nc6", "Bc4", "Nf6"), games.Score(1, mate=True)),
        (chess.Board(), games.Score(0, mate=False)),
    ],
)
def test_scores_are_from_whites_side(board: chess.Board, score: games.Score) -> None:
    assert games.evaluate(games.look_ahead(board)) == score


def test_stockfish_scores_where_it_is_installed() -> None:
    stockfish = make_shards.find_stockfish("auto")
    if stockfish is None:
        pytest.skip("Stockfish is not installed")
    first, second = (games.play(games.Task("7", 40, stockfish, depth=4)) for _ in range(2))
    assert first.scores == second.scores
    with games.open_scorer(stockfish, depth=4) as score:
        assert score(games.look_ahead(after("f3", "e5", "g4")), 0) == games.Score(-1, mate=True)


# ------------------------------------------------------------------------------------------------ the shards

NUM_POSITIONS = 160


def arguments(folder: Path, processes: int) -> list[str]:
    sizes = ["--positions", str(NUM_POSITIONS), "--shards", "2", "--validation-shards", "1"]
    return ["--out", str(folder), *sizes, "--stockfish", "off", "--seed", "5", "--processes", str(processes)]


def make(folder: Path, processes: int) -> str:
    """What the script prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", ["make_shards.py", *arguments(folder, processes)])
        make_shards.main()
    return printed.getvalue()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards that the script wrote, with games of several processes."""
    folder = tmp_path_factory.mktemp("shards")
    assert f"3 shards, {NUM_POSITIONS} positions" in make(folder, processes=2)
    return folder


def read(folder: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """(bits, scores) of every record, as TensorFlow reads them: uint8, (n, 1552), and int64, (n,)."""
    import tensorflow as tf

    stored = {"d": tf.io.FixedLenFeature([], tf.string), "s": tf.io.FixedLenFeature([], tf.int64)}
    paths = [str(path) for path in sorted(folder.glob("*.tfrecord"))]
    parsed = tf.io.parse_example(list(tf.data.TFRecordDataset(paths)), stored)
    packed = np.stack([np.frombuffer(d, np.uint8) for d in parsed["d"].numpy()])
    return np.unpackbits(packed, axis=1), parsed["s"].numpy()


def test_the_same_seed_gives_the_same_bytes(shards: Path, tmp_path: Path) -> None:
    make(tmp_path, processes=1)
    written = {path.name: path.read_bytes() for path in shards.iterdir()}
    assert sorted(written) == [
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
        "validation-00000-of-00001.tfrecord",
    ]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written


def test_tensorflow_reads_every_record(shards: Path) -> None:
    bits, scores = read(shards)
    assert bits.shape == (NUM_POSITIONS, 1552) and scores.shape == (NUM_POSITIONS,)
    planes = bits[:, :1536].reshape(-1, 64, 6, 4)
    assert (planes[:, :, 5, :2].sum(axis=1) == 1).all(), "each side has one king"
    assert (planes[..., :2].sum(axis=(2, 3)) <= 1).all(), "a square holds one piece"
    assert not bits[:, 1547:].any()
    assert len(np.unique(bits[:, :1546], axis=0)) > 0.98 * NUM_POSITIONS


def test_a_folder_with_other_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "older.tfrecord").touch()
    with pytest.raises(SystemExit, match=r"older\.tfrecord"):
        make_shards.prepare_folder(tmp_path, {tmp_path / "train-00000-of-00001.tfrecord"})


def test_a_stockfish_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no-such-engine"):
        make_shards.find_stockfish("no-such-engine")

"""Boards of Go and of chess that are turned, with their policies: against plain implementations, and real games."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import chess
import numpy as np
import numpy.typing as npt
import pytest

import loaderd
from loaderd.errors import SchemaError
from loaderd.schemas import kata, leela, leela_moves

AnyArray = npt.NDArray[Any]
BOARD = ("planes", "policy", "next_policy", "value_targets", "q_values")


def turned(board: AnyArray, symmetry: int) -> AnyArray:
    """(…, S, S) square by square, as the documentation of board_symmetry says it."""
    size = board.shape[-1]
    out = np.empty_like(board)
    for row in range(size):
        for column in range(size):
            # Where np.rot90 and then the mirror find what they put here.
            y, x = row, column
            for _ in range(symmetry % 4):
                y, x = x, size - 1 - y
            out[..., row, column] = board[..., y, size - 1 - x if symmetry >= 4 else x]
    return out


def policy_turned(policy: AnyArray, symmetry: int) -> AnyArray:
    size = int(len(policy) ** 0.5)
    return np.append(turned(policy[:-1].reshape(size, size), symmetry).reshape(-1), policy[-1])


def read(path: Path, schema: loaderd.Schema, epochs: int = 1, **options: Any) -> list[dict[str, AnyArray]]:
    """Each epoch as one batch, in the files' order."""
    options = {"batch_size": 3000, "shuffle": False, "workers": 1, "index_cache": "none", "epochs": epochs, **options}
    with loaderd.Loader(path, schema, **options) as loader:
        return [{name: values.copy() for name, values in batch.items()} for batch in loader]


def write_rows(path: Path, size: int, count: int) -> Path:
    rng = np.random.default_rng(size)
    rows = np.zeros(count, kata.rows(size, q_values=True))
    shape = (count, 22, size * size)
    rows["binaryInputNCHWPacked"] = np.packbits(rng.random(shape) < 0.3, axis=2)
    rows["policyTargetsNCMove"] = rng.integers(0, 999, rows["policyTargetsNCMove"].shape)
    rows[kata.Q_VALUES] = rng.integers(-32000, 32001, rows[kata.Q_VALUES].shape)
    rows["valueTargetsNCHW"] = rng.integers(-100, 101, rows["valueTargetsNCHW"].shape)
    rows["globalInputNC"] = rng.random((count, 19))
    np.savez(path, **{name: rows[name] for name in rows.dtype.names or ()})
    return path


@pytest.mark.one_variant
@pytest.mark.parametrize("size", [19, 22])  # 22: as many points as planes
def test_katago_turns_all_of_a_record_alike(size: int, tmp_path: Path):
    path = write_rows(tmp_path / "0.npz", size, 60)
    q_values: dict[str, Any] = {"q_values": True, "absent": "zeros"}
    (stored,) = read(path, loaderd.schemas.katago(size, **q_values))
    epochs = read(path, loaderd.schemas.katago(size, symmetries=range(8), **q_values), epochs=2)
    seen = []
    for epoch in epochs:
        assert list(epoch) == list(stored)
        drawn = []
        for record in range(60):
            is_it = [t for t in range(8) if (turned(stored["planes"][record], t) == epoch["planes"][record]).all()]
            (symmetry,) = is_it
            drawn.append(symmetry)
            for name in ("policy", "next_policy"):
                assert (epoch[name][record] == policy_turned(stored[name][record], symmetry)).all()
            for before, after in zip(stored["q_values"][record], epoch["q_values"][record], strict=True):
                assert (after == policy_turned(before, symmetry)).all()
            assert (epoch["value_targets"][record] == turned(stored["value_targets"][record], symmetry)).all()
        assert set(drawn) == set(range(8))
        seen.append(drawn)
        for name, values in epoch.items():
            assert values.dtype == stored[name].dtype == np.float32
            assert name in BOARD or (values == stored[name]).all()
    assert seen[0] != seen[1], "another one in each epoch"


@pytest.mark.one_variant
def test_symmetries_are_numbered_as_katago_numbers_them(tmp_path: Path):
    """``apply_symmetry`` of lightvector/KataGo, python/katago/train/data_processing_pytorch.py."""
    path = write_rows(tmp_path / "0.npz", 9, 3)
    (stored,) = read(path, loaderd.schemas.katago(9))
    board = stored["planes"]
    swapped = board.transpose(0, 1, 3, 2)
    theirs = [board, swapped[:, :, ::-1], board[:, :, ::-1, ::-1], swapped[..., ::-1]]
    theirs += [swapped, board[..., ::-1], swapped[:, :, ::-1, ::-1], board[:, :, ::-1]]
    for symmetry, expected in enumerate(theirs):
        (found,) = read(path, loaderd.schemas.katago(9, symmetries=[symmetry], mask_history=1e-12))
        assert (found["planes"] == expected).all(), symmetry


# ------------------------------------------------------------------------------------------------- chess


def test_the_moves_are_those_of_lczero_training():
    """``policy_index`` of LeelaChessZero/lczero-training (581dc5b), tf/policy_index.py, by its digest."""
    found = leela_moves.moves()
    assert len(found) == 1858 and (found[0], found[1791], found[-1]) == ("a1b1", "h8g8", "h7h8b")
    assert (
        hashlib.sha256(" ".join(found).encode()).hexdigest()
        == "c4c47aca96e213995c772d1aab24498e3ad9c91209d3467889f20fa1a10678dd"
    )


def position_of(planes: AnyArray) -> chess.Board:
    """What the side to move sees, as white, but for en passant: planes (112, 8, 8) of input format 1."""
    board = chess.Board(None)
    for plane in range(12):
        piece = chess.Piece(plane % 6 + 1, plane < 6)
        for rank, file in zip(*np.nonzero(planes[plane]), strict=True):
            board.set_piece_at(chess.square(int(file), int(rank)), piece)
    return board


def legal(board: chess.Board) -> set[str]:
    """Names of moves as the policy has them, without castling and en passant."""
    return {move.uci().removesuffix("n") for move in board.legal_moves}


@pytest.fixture(scope="module")
def positions(lc0_games: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Up to 300 of real games, a half of them with castling rights."""
    records = np.frombuffer(b"".join(gzip.decompress(game.read_bytes()) for game in lc0_games), leela.RECORD_V6)
    may_castle = records["castling"].any(axis=1)
    path = tmp_path_factory.mktemp("positions") / "plain"
    np.concatenate([records[~may_castle][:150], records[may_castle][:150]]).tofile(path)
    return path


@pytest.mark.slow
def test_games_are_mirrored_where_nobody_may_castle(positions: Path):
    (stored,) = read(positions, loaderd.schemas.lc0())
    (found,) = read(positions, loaderd.schemas.lc0(symmetries=(0, 1)))
    names = np.array(leela_moves.moves())
    number_of = {name: number for number, name in enumerate(names.tolist())}
    mirrored = 0
    for record in range(len(stored["wdl"])):
        may_castle = stored["planes"][record, 104:108].any()
        before, after = (position_of(each["planes"][record]) for each in (stored, found))
        is_mirrored = after.piece_map() != before.piece_map() or (
            (found["planes"][record] != stored["planes"][record]).any()
        )
        if not is_mirrored:
            assert (found["policy"][record] == stored["policy"][record]).all()
            continue
        mirrored += 1
        assert not may_castle
        assert after.piece_map() == before.transform(chess.flip_horizontal).piece_map()
        assert (found["planes"][record] == stored["planes"][record][:, :, ::-1]).all()
        # python-chess says which moves there are on the mirrored board: the policy is legal there, and nowhere else.
        in_policy = set(names[found["policy"][record] >= 0])
        en_passant = {name for name in in_policy - legal(after) if name[1] == "5" and name[0] != name[2]}
        assert in_policy - en_passant == legal(after)
        for name in in_policy:
            before_it = name[:4].translate(str.maketrans("abcdefgh", "hgfedcba")) + name[4:]
            value = stored["policy"][record][number_of[before_it]]
            assert found["policy"][record][number_of[name]] == value
    assert mirrored > 20
    for name in ("wdl", "plies_left"):
        assert (found[name] == stored[name]).all()


def test_what_cannot_be_symmetric_says_why():
    with pytest.raises(SchemaError, match="symmetries must be some of 0, 1, got") as raised:
        loaderd.schemas.lc0(symmetries=range(8))
    assert "Pawns go up" in raised.value.hint
    with pytest.raises(SchemaError, match="symmetries must be some of 0…7"):
        loaderd.schemas.katago(symmetries=[8])
    for shape in [(9, 10), (1858,), (3, 9, 10), (9, 10, 4), ()]:
        with pytest.raises(SchemaError, match="shape must be") as raised:
            loaderd.board_symmetry("x", shape)
        assert "needs a function of its own" in raised.value.hint
    with pytest.raises(SchemaError, match="may be of either layout"):
        loaderd.board_symmetry("x", (8, 8, 8))
    with pytest.raises(SchemaError, match="of layout NCHW"):
        loaderd.board_symmetry("x", (8, 8, 3), layout="NCHW")
    with pytest.raises(SchemaError, match="layout must be"):
        loaderd.board_symmetry("x", (8, 8, 3), layout="HWC")  # type: ignore[arg-type]

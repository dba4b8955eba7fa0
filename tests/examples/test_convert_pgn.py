"""Games in PGN become records of chess_eval: which positions, which scores, and what of games that cannot be read."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import chess.pgn
import chess_boards
import pgn
import pytest
from games import Score
from pgn import Converted, read_games, split
from pgn_text import begins_as_pgn

import loaderd

Start = Any  # of conftest.py: start("chess/convert_pgn.py", *arguments)

WHITE_WON, BLACK_WON, NOBODY_WON = Score(1, True), Score(-1, True), Score(0, False)
MATED = """[Event "A"]
[Result "1-0"]

1. e4 { [%eval 0.17] [%clk 0:05:00] } e5 { [%eval 0.3,18] } (1... c5 { [%eval 9.9] }) 2. Qh5 { [%eval -0.52] } Ke7
{ [%eval #1] } 3. Qxe5# { [%eval #0] } 1-0
"""
DRAWN = """[Event "B"]
[Result "1/2-1/2"]

1. d4 { no eval } d5 { [%eval #-12] } 1/2-1/2
"""
LOST = '[Event "C"]\n[Result "0-1"]\n\n1. f3 e5 0-1\n'
OPEN = '[Event "D"]\n[Result "*"]\n\n1. f3 { [%eval -1] } *\n'
ILLEGAL = '[Event "E"]\n[Result "0-1"]\n\n1. d4 { [%eval 1] } Ke4 0-1\n'
CHESS960 = '[Event "G"]\n[Variant "Chess960"]\n[Result "0-1"]\n\n1. d4 d5 0-1\n'
ATOMIC = '[Event "F"]\n[Variant "Atomic"]\n[Result "0-1"]\n\n1. d4 d5 0-1\n'


def write(path: Path, *games: str, before: str = "", newline: str = "\n") -> Path:
    path.write_text(before + "\n".join(games), newline=newline)
    return path


def read(path: Path, scores: str) -> Converted:
    """All games of a file."""
    (games,) = split(path, 1000)
    return read_games(games, scores)


def test_scores_of_an_engine_are_those_of_the_position_behind_the_move(tmp_path: Path) -> None:
    made = read(write(tmp_path / "a.pgn", MATED, DRAWN), "eval")
    assert made.positions.scores == [
        *(Score(17, False), Score(30, False), Score(-52, False), Score(1, True), Score(-12, True))
    ]
    assert made.unscored == 3 and made.faults == []  # both beginnings, and 1. d4; nobody can move where it is mate
    boards = []
    for game in (MATED, DRAWN):
        node: Any = chess.pgn.read_game(io.StringIO(game))
        for move in node.mainline():
            boards.append(move.board())
    del boards[4:6]
    expected = chess_boards.pack(
        [chess_boards.bitboards(board) for board in boards],
        [chess_boards.flags(board) for board in boards],
        [False, False, False, True, True],
    )
    assert (made.positions.packed == expected).all()


def test_a_loader_delivers_the_results(start: Start, tmp_path: Path) -> None:
    write(tmp_path / "a.pgn", MATED, DRAWN, LOST)
    write(tmp_path / "b.pgn", ILLEGAL, LOST)
    options = ["--out", tmp_path / "to", "--scores", "result", "--games-per-shard", "2"]
    with start("chess/convert_pgn.py", tmp_path / "*.pgn", *options, "--skip-faulty") as converting:
        printed = converting.end()
    assert "3 shards, 14 positions: " in printed and "0 positions without a score, 1 games that cannot" in printed
    shards = [
        tmp_path / "to" / name for name in ("validation-00000.tfrecord", *(f"train-0000{i}.tfrecord" for i in (0, 1)))
    ]
    assert set((tmp_path / "to").iterdir()) == set(shards)
    with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=14, shuffle=False, workers=1) as loader:
        (batch,) = loader
        assert batch["score"].tolist() == [-1.0] * 6 + [1.0] * 5 + [0.0] * 3
        assert batch["flags"][6:11, 0].tolist() == [1, 0, 1, 0, 1], "white to move"


def test_games_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.pgn", DRAWN, ILLEGAL, ATOMIC, CHESS960, OPEN)
    made = read(path, "eval")
    assert made.positions.scores == [Score(-12, True), Score(-100, False)]
    text = path.read_text()
    for fault, number, event, said in zip(
        made.faults, (1, 2, 3), "EFG", ("illegal san: 'Ke4'", "'Atomic'", "'Chess960'"), strict=True
    ):
        place = text.index(f'[Event "{event}"')
        assert fault.startswith(f"{path}: game {number} at byte {place}: expected standard chess, found ")
        assert said in fault


def test_a_faulty_game_ends_the_conversion(start: Start, tmp_path: Path) -> None:
    path = write(tmp_path / "a.pgn", LOST, ILLEGAL)
    with start("chess/convert_pgn.py", path, "--out", tmp_path / "to") as converting:
        printed = converting.end(status=1)
    assert f"{path}: game 1 at byte " in printed and "--skip-faulty" in printed
    assert not list((tmp_path / "to").iterdir())


def test_empty_lines_within_a_game_are_no_end_of_it(tmp_path: Path):
    """For python-chess, what is behind one is another game, from the initial position."""
    tags = '[Event "odds"]\n[SetUp "1"]\n[FEN "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/R1BQKBNR w KQkq - 0 1"]\n'
    tags += '[Result "0-1"]\n\n'
    plain = tags + "1. e4 { so be it } e5 2. Nf3 0-1\n"
    expected = read(write(tmp_path / "a.pgn", plain, LOST), "result")
    assert (len(expected.positions.scores), expected.unscored, expected.faults) == (7, 0, [])
    for moves in [
        "1. e4 { so be it } e5\n\n2. Nf3 0-1\n",
        "1. e4 { so be it } e5\n \n\t\n2. Nf3\n\xa0\n\n0-1\n",
        "{ White gives a knight. }\n\n1. e4 e5 2. Nf3 0-1\n",
        "1. e4 { so\n\n\nbe it } e5 2. Nf3 0-1\n",
    ]:
        path = tmp_path / "b.pgn"
        path.write_bytes(f"{tags}{moves}\n{LOST}".encode("latin-1"))
        made = read(path, "result")
        assert (made.positions.packed == expected.positions.packed).all() and not made.faults


def test_the_mark_of_utf_8_may_be_before_any_game(tmp_path: Path):
    """As in files that were joined: the second one was lost, or played on from the initial position."""
    path = tmp_path / "a.pgn"
    path.write_text("".join(f"\ufeff{before}{game}\n" for before in ("", "\n") for game in (DRAWN, ILLEGAL, LOST)))
    made = read(path, "result")
    assert made.positions.scores == [*[NOBODY_WON] * 3, *[BLACK_WON] * 3] * 2
    first, second = made.faults
    offset = path.read_bytes().index(b'\xef\xbb\xbf[Event "E"')
    assert f": game 1 at byte {offset}: " in first and ": game 4 at byte " in second


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("before", ["", "\n\n", "\ufeff"])
def test_games_are_found_wherever_pieces_end(
    before: str, newline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "a.pgn", *[MATED, DRAWN, LOST] * 3, before=before, newline=newline)
    assert begins_as_pgn(path.read_bytes()[:100])
    whole = list(split(path, 1))
    assert [games.first for games in whole] == list(range(9)) and whole[-1].stop == path.stat().st_size
    assert all(one.stop == other.start for one, other in pairwise(whole))
    for size in (7, 8, 9, 50, 333):
        monkeypatch.setattr(pgn, "PIECE_BYTES", size)
        assert list(split(path, 1)) == whole
        fours = [(games.start, games.stop, games.first) for games in split(path, 4)]
        assert fours == [*((whole[first].start, whole[min(first + 3, 8)].stop, first) for first in (0, 4, 8))]
    made = read(path, "eval")
    assert (len(made.positions.scores), made.unscored, made.faults) == (15, 18, [])


_TAGS = '[Event "E"]\n[Result "1-0"]\n\n'


@pytest.mark.parametrize(
    ("game", "said"),
    [
        (
            f"{_TAGS}1. e4 e5 {{ what a move 2. Nf3 1-0\n",
            "a comment without its end among the moves, '{ what a move",
        ),
        (f"{_TAGS}1. e4 {{ a {{ b }} e5 }} 2. Nf3 1-0\n", "the end of a comment among the moves, '} 2. Nf3 1-0"),
        (f'{_TAGS}1. e4 e5 1-0 [Event "C"]\n\n1. f3 0-1\n', 'a tag among the moves, \'[Event "C"]'),
        (f"{_TAGS}1. e4 e5 1-0\n\n1. d4 d5 0-1\n", "the move d4 behind the result 1-0"),
        (f"{_TAGS}1. f3 e5 0-1\n", "the result 0-1 behind the result 1-0"),
        ('[Event "A"]\n[Result "0-1"] [FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\n\n1. f3 e5 0-1\n', "not one tag on a line"),
        ('[Event "A"]\n[Result "0-1" ]\n\n1. f3 e5 0-1\n', "not one tag on a line of its own"),
        ('[Event "A"]\n[Site "x"]\r[Result "0-1"]\r\n1. f3 e5 0-1\n', "not one tag on a line of its own"),
    ],
)
def test_what_python_chess_would_read_otherwise_costs_its_own_game_alone(tmp_path: Path, game: str, said: str):
    path = write(tmp_path / "a.pgn", LOST, game, DRAWN)
    made = read(path, "result")
    (fault,) = made.faults
    assert f": game 1 at byte {len(LOST) + 1}: " in fault and said in fault
    assert made.positions.scores == [BLACK_WON] * 3 + [NOBODY_WON] * 3


@pytest.mark.parametrize("text", ["Games of 2026\nby e4 players", "1. d4 d5 0-1", "[%eval 1]"])
def test_text_in_front_of_the_first_game_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str):
    before = "\n; a comment\n"
    path = write(tmp_path / "a.pgn", LOST, before=f"{before}{text}\n\n")
    for size in (7, 1 << 20):
        monkeypatch.setattr(pgn, "PIECE_BYTES", size)
        made = read(path, "result")
        (fault,) = made.faults
        assert len(made.positions.scores) == 3 and f": game 0 at byte {len(before)}: " in fault
        assert f"no tag in front of '{text.splitlines()[0]}'" in fault

"""Games in PGN become records of chess_eval: which positions, which scores, and what of games that cannot be read."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakSet

import chess
import chess.pgn
import numpy as np
import pytest

import loaderd
from loaderd.cli import convert as cli
from loaderd.convert import chess_boards, pgn
from loaderd.convert.lots import Games, plan_games
from loaderd.errors import LoaderdError
from loaderd.shards.files import list_shards

COMMAND = [str(Path(sys.executable).with_name("loaderd")), "convert"]
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


def read(path: Path, scores: Any) -> tuple[list[Any], int, list[LoaderdError]]:
    """(rows, positions without a score, faults) of a file."""
    (file,) = list_shards(path)
    rows, without, faults = [], 0, []
    for games in pgn.find_games(0, file, lambda offset: None):
        for found in pgn.read_games(file, games, scores):
            if isinstance(found, pgn.Unscored):
                without += found.count
            elif isinstance(found, LoaderdError):
                faults.append(found)
            else:
                rows += list(found)
    return rows, without, faults


def scores_of(rows: list[Any]) -> list[tuple[int, bool]]:
    return [(int(row["s"]), bool(row["d"][193] & 0x20)) for row in rows]  # bit 1546


def test_scores_of_an_engine_are_those_of_the_position_behind_the_move(tmp_path: Path):
    rows, without, faults = read(write(tmp_path / "a.pgn", MATED, DRAWN), "eval")
    assert scores_of(rows) == [(17, False), (30, False), (-52, False), (1, True), (-12, True)]
    assert without == 3 and faults == []  # both beginnings, and 1. d4; nobody can move where it is mate
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
    assert (np.stack([row["d"] for row in rows]) == expected).all()


def test_results_are_for_each_position_of_a_game(tmp_path: Path):
    path = write(tmp_path / "a.pgn", MATED, DRAWN, LOST, OPEN)
    rows, without, _ = read(path, "result")
    assert scores_of(rows) == [(1, True)] * 5 + [(0, False)] * 3 + [(-1, True)] * 3
    assert without == 2


def test_a_loader_delivers_the_results(tmp_path: Path):
    write(tmp_path / "a.pgn", MATED, DRAWN, LOST)
    command = [*COMMAND, "a.pgn", "--to", "to", "--scores", "result", "--games-per-shard", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    *shards, total = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 0 and sorted(one["records"] for one in shards) == [3, 8] and total["records"] == 11
    shards = tmp_path / "to" / "*.tfrecord"
    with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=11, shuffle=False, workers=1) as loader:
        (batch,) = loader
        assert batch["score"].tolist() == [1.0] * 5 + [0.0] * 3 + [-1.0] * 3
        assert batch["flags"][:5, 0].tolist() == [1, 0, 1, 0, 1], "white to move"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_empty_lines_between_headers_and_moves_are_as_good_as_one(tmp_path: Path, newline: str):
    """python-chess would take the moves for another game, from the initial position."""
    games = [MATED, LOST, ILLEGAL, DRAWN]
    expected = read(write(tmp_path / "a.pgn", *games, newline=newline), "result")
    for more in ("\n", "\n \n\n"):
        path = write(tmp_path / "b.pgn", *(game.replace("]\n\n", "]\n\n" + more) for game in games), newline=newline)
        rows, without, faults = read(path, "result")
        assert [row.tobytes() for row in rows] == [row.tobytes() for row in expected[0]]
        assert without == expected[1] and [fault.damage and fault.damage.record for fault in faults] == [2]


def test_games_that_cannot_be_read_are_named(tmp_path: Path):
    path = write(tmp_path / "a.pgn", DRAWN, ILLEGAL, ATOMIC, CHESS960, OPEN)
    rows, _, faults = read(path, "eval")
    assert scores_of(rows) == [(-12, True), (-100, False)]
    damages = [fault.damage for fault in faults if fault.damage is not None]
    text = path.read_text()
    assert [(one.record, one.offset) for one in damages] == [
        (1, text.index('[Event "E"')),
        (2, text.index('[Event "F"')),
        (3, text.index('[Event "G"')),
    ]
    assert "illegal san: 'Ke4'" in damages[0].found and "'Atomic'" in damages[1].found
    assert "'Chess960'" in damages[2].found
    command = [*COMMAND, "a.pgn", "--to", "to", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "record 1 at byte" in done.stderr and "--on-corrupt" in done.stderr


@pytest.mark.parametrize(
    ("moves", "said"),
    [
        ("1. e4 e5 { what a move 2. Nf3 1-0", "a comment without its end among the moves, '{ what a move 2. Nf3 1-0"),
        ("1. e4 { a { b } e5 } 2. Nf3 1-0", "the end of a comment among the moves, '} 2. Nf3 1-0"),
        ('1. e4 e5 1-0 [Event "C"]\n\n1. f3 0-1', 'a tag among the moves, \'[Event "C"]'),
    ],
)
def test_a_comment_without_its_end_costs_its_own_game_alone(tmp_path: Path, moves: str, said: str):
    """python-chess takes the games behind it for part of the comment."""
    path = write(tmp_path / "a.pgn", LOST, f'[Event "E"]\n[Result "1-0"]\n\n{moves}\n', DRAWN)
    (file,) = list_shards(path)
    (lot,) = plan_games(pgn.find_games(0, file, lambda offset: None), 1000)
    (games,) = lot.parts
    assert isinstance(games, Games)
    *rows, fault, drawn = list(pgn.read_games(file, games, "result"))
    assert isinstance(fault, LoaderdError) and fault.damage is not None
    assert (fault.damage.record, fault.damage.offset) == (1, path.read_text().index('[Event "E"'))
    assert said in fault.damage.found
    assert scores_of(list(rows[0])) == [(-1, True)] * 3 and scores_of(list(drawn)) == [(0, False)] * 3


def test_empty_lines_within_a_game_are_no_end_of_it(tmp_path: Path):
    """For python-chess, what is behind one is another game, from the initial position."""
    tags = '[Event "odds"]\n[SetUp "1"]\n[FEN "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/R1BQKBNR w KQkq - 0 1"]\n'
    tags += '[Result "0-1"]\n\n'
    plain = tags + "1. e4 { so be it } e5 2. Nf3 0-1\n"
    expected, without, faults = read(write(tmp_path / "a.pgn", plain, LOST), "result")
    assert (len(expected), without, faults) == (7, 0, [])
    for moves in [
        "1. e4 { so be it } e5\n\n2. Nf3 0-1\n",
        "1. e4 { so be it } e5\n \n\t\n2. Nf3\n\xa0\n\n0-1\n",
        "{ White gives a knight. }\n\n1. e4 e5 2. Nf3 0-1\n",
        "1. e4 { so\n\n\nbe it } e5 2. Nf3 0-1\n",
    ]:
        path = tmp_path / "b.pgn"
        path.write_bytes(f"{tags}{moves}\n{LOST}".encode("latin-1"))
        rows, without, faults = read(path, "result")
        assert [row.tobytes() for row in rows] == [row.tobytes() for row in expected] and not faults


def test_moves_behind_the_result_are_a_fault(tmp_path: Path):
    """They are those of another game, without tags; python-chess plays them on the same board."""
    path = write(tmp_path / "a.pgn", LOST, "1. d4 d5 0-1\n", DRAWN)
    rows, _, (fault,) = read(path, "result")
    assert len(rows) == 3 and fault.damage is not None
    assert fault.damage.record == 0 and "the move d4 behind the result 0-1" in fault.damage.found


def test_a_result_that_is_not_that_of_the_tag_is_a_fault(tmp_path: Path):
    """Nobody knows which of them it is; an unknown one says nothing."""
    path = write(tmp_path / "a.pgn", LOST.replace('"0-1"', '"1-0"'), LOST.replace('"0-1"', '"*"'), LOST[:-4] + "*\n")
    rows, _, (fault,) = read(path, "result")
    assert scores_of(rows) == [(-1, True)] * 6 and fault.damage is not None
    assert fault.damage.record == 0 and "the result 0-1 behind the result 1-0" in fault.damage.found


def test_the_mark_of_utf_8_may_be_before_any_game(tmp_path: Path):
    """As in files that were joined: the second one was lost, or played on from the initial position."""
    path = tmp_path / "a.pgn"
    path.write_text("".join(f"\ufeff{before}{game}\n" for before in ("", "\n") for game in (DRAWN, ILLEGAL, LOST)))
    rows, _, faults = read(path, "result")
    assert scores_of(rows) == [*[(0, False)] * 3, *[(-1, True)] * 3] * 2
    assert [fault.damage and fault.damage.record for fault in faults] == [1, 4]
    assert faults[0].damage and faults[0].damage.offset == path.read_bytes().index(b'\xef\xbb\xbf[Event "E"')


@pytest.mark.parametrize(
    "first",
    [
        '[White "A"]\n[Result "0-1"]\n\n1. f3 e5 0-1\n',
        '[Site "here"]\n[Event "A"]\n[Result "0-1"]\n\n1. f3 e5 0-1\n',
        '  [Event "A"]\n [Result "0-1"]\n\n1. f3 e5 0-1\n',
        '[Event "A"]\n\n% a line that is no part of the game\n\n[Result "0-1"]\n\n1. f3 e5 0-1\n',
    ],
)
def test_a_game_begins_with_its_first_tag_whichever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
):
    path = write(tmp_path / "a.pgn", first, DRAWN, first, before="; a comment\n\n% and [Event \n")
    for size in (7, 50, 1 << 20):
        monkeypatch.setattr(pgn, "_PIECE_BYTES", size)
        rows, without, faults = read(path, "result")
        assert scores_of(rows) == [*[(-1, True)] * 3, *[(0, False)] * 3, *[(-1, True)] * 3]
        assert without == 0 and not faults
    (file,) = list_shards(path)
    assert pgn.is_pgn(file)


def test_games_of_tags_alone_are_games(tmp_path: Path):
    tags = '[Event "A"]\n[Result "0-1"]\n'
    rows, _, faults = read(write(tmp_path / "a.pgn", tags, tags, LOST), "result")
    assert len(rows) == 1 + 1 + 3 and not faults


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Games of 2026\nby e4 players\n", "no tag in front of 'Games of 2026'"),
        ("1. d4 d5 0-1\n", "no tag in front of '1. d4 d5 0-1'"),
        ("[%eval 1]\n", "no tag in front of '[%eval 1]'"),
        ("\u00a0\n", "no tag in front of ''"),
    ],
)
def test_text_in_front_of_the_first_game_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
):
    path = tmp_path / "a.pgn"
    path.write_bytes(f"\n; a comment\n{text}\n{LOST}".encode("latin-1"))
    for size in (7, 1 << 20):
        monkeypatch.setattr(pgn, "_PIECE_BYTES", size)
        rows, _, (fault,) = read(path, "result")
        assert len(rows) == 3 and fault.damage is not None and said in fault.damage.found
        assert (fault.damage.record, fault.damage.offset) == (0, len("\n; a comment\n"))


@pytest.mark.parametrize(
    "tags",
    ['[Result "0-1"] [FEN "8/8/8/8/8/8/8/8 w - - 0 1"]\n', '[Result "0-1" ]\n', '[Event "A"]\r[Result "0-1"]\r'],
)
def test_a_tag_that_matters_and_cannot_be_read_is_a_fault(tmp_path: Path, tags: str):
    """python-chess passes over it: a position that is set up would be the initial one."""
    path = write(tmp_path / "a.pgn", f'[Event "A"]\n{tags}\n1. f3 e5 0-1\n', LOST)
    rows, _, (fault,) = read(path, "result")
    assert len(rows) == 3 and fault.damage is not None and "not one tag on a line of its own" in fault.damage.found


@pytest.mark.slow
def test_with_skip_record_the_games_behind_an_unclosed_comment_are_converted(tmp_path: Path):
    unclosed = '[Event "E"]\n[Result "1-0"]\n\n1. e4 e5 { what a move 2. Nf3 1-0\n'
    write(tmp_path / "a.pgn", unclosed, LOST, LOST)
    command = [*COMMAND, "a.pgn", "--to", "to", "--scores", "result", "--games-per-shard", "3", "--processes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and "a.pgn: record 0 at byte 0: " in done.stderr, done
    command += ["--on-corrupt", "skip_record", "--json", "--to", "new"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    total = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0 and (total["records"], total["left_out"]) == (6, 1), done


@pytest.mark.slow
def test_without_scores_it_says_what_would_help(tmp_path: Path):
    write(tmp_path / "a.pgn", LOST, LOST)
    done = subprocess.run([*COMMAND, "a.pgn", "--to", "to"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (
        done.returncode == 2 and "None of 6 positions has a score" in done.stderr and "--scores result" in done.stderr
    )
    assert not list((tmp_path / "to").glob("shard*"))
    command = [*COMMAND, "a.pgn", "--to", "to", "--records-per-shard", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "of games in PGN, --games-per-shard go into one" in done.stderr


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("before", ["", "\n\n", "\ufeff"])
def test_games_are_found_wherever_pieces_end(
    before: str, newline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "a.pgn", *[MATED, DRAWN, LOST] * 3, before=before, newline=newline)
    (file,) = list_shards(path)
    assert pgn.is_pgn(file)
    whole = list(pgn.find_games(4, file, lambda offset: None))
    assert [games.first_game for games in whole] == list(range(9)) and whole[-1].stop == file.size_bytes
    assert all(one.stop == other.start for one, other in pairwise(whole))
    for size in (7, 8, 9, 50, 333):
        monkeypatch.setattr(pgn, "_PIECE_BYTES", size)
        assert list(pgn.find_games(4, file, lambda offset: None)) == whole
    rows, without, faults = read(path, "eval")
    assert (len(rows), without, faults) == (15, 18, [])


@pytest.mark.slow
def test_a_file_without_a_game_is_refused_by_name(tmp_path: Path):
    """Such as a compressed one beside others; one without a byte has no game either, and is passed over."""
    write(tmp_path / "0.pgn")
    write(tmp_path / "a.pgn", MATED)
    write(tmp_path / "b.pgn")
    command = [*COMMAND, "*.pgn*", "--to", "to"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "c.pgn.gz").write_bytes(gzip.compress(DRAWN.encode()))
    command[-1] = "new"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "no game in " in done.stderr and "c.pgn.gz" in done.stderr, done
    assert "decompressed" in done.stderr and not (tmp_path / "new").exists()


def test_no_game_is_kept_while_shards_are_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A month of Lichess's games took 16 GB of memory."""
    alive, most = WeakSet[Games](), 0

    def find_games(number: int, file: Any, on_read: Any) -> Iterator[Games]:
        nonlocal most
        for game in range(1000):
            one = Games(number, game, game + 1, game)
            alive.add(one)
            most = max(most, len(alive))
            on_read(one.stop)
            yield one

    monkeypatch.setattr(pgn, "find_games", find_games)
    files = list_shards([write(tmp_path / "a.pgn", LOST), write(tmp_path / "b.pgn", LOST)])
    plan = cli._plan_games(files, argparse.Namespace(games_per_shard=300))
    assert len(plan.lots) == 7 and plan.lots[3].parts == (Games(0, 900, 1000, 900), Games(1, 0, 200, 0))
    assert 1 <= most <= 5


def test_no_game_is_in_two_shards():
    games = [Games(file, 10 * number, 10 * number + 10, number) for file in range(2) for number in range(5)]
    lots = list(plan_games(games, 4))
    assert [lot.first_shard for lot in lots] == [0, 1, 2]
    assert [lot.parts for lot in lots] == [
        (Games(0, 0, 40, 0),),
        (Games(0, 40, 50, 4), Games(1, 0, 30, 0)),
        (Games(1, 30, 50, 3),),
    ]


@pytest.mark.slow
def test_another_number_of_games_a_shard_is_another_conversion(tmp_path: Path):
    """Of as many shards, each of other games: what one had left would be doubled, or missing."""
    write(tmp_path / "a.pgn", *[LOST] * 9)
    command = [*COMMAND, "a.pgn", "--to", "to", "--scores", "result", "--games-per-shard"]
    done = subprocess.run([*command, "4"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "to" / "shard-00001-of-00003.tfrecord").unlink()
    done = subprocess.run([*command, "3"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "holds another conversion: games_per_shard was" in done.stderr
    done = subprocess.run([*command, "4"], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and "2 of these shards were there already" in done.stdout


def test_without_python_chess_the_extra_is_named(tmp_path: Path):
    write(tmp_path / "a.pgn", MATED)
    program = "import sys; sys.modules['chess'] = None; from loaderd.cli.main import main; main()"
    command = [sys.executable, "-c", program, "convert", "a.pgn", "--to", "to"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2 and "loaderd[examples]" in done.stderr and "Traceback" not in done.stderr

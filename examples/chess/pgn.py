"""The positions of games in PGN, and their scores: what the processes of ``convert_pgn.py`` do.

Positions of the main line are taken, from the first to the last in which there is a legal move. A game that
python-chess cannot read (one of its moves is illegal, say), one of another variant, and what it would misread
(:mod:`pgn_text`) is a fault, and none of its positions is taken.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import chess
import chess.pgn
import chess_boards
from games import Positions, Score
from pgn_text import find_begins, split_game

PIECE_BYTES = 1 << 20
LONGEST_LINE = 16 << 20  # a longer one is none of PGN, and may end anywhere
RESULTS = {"1-0": Score(1, True), "0-1": Score(-1, True), "1/2-1/2": Score(0, False)}


@dataclass(frozen=True)
class Games:
    """Bytes ``start`` to ``stop - 1`` of a file, which begin with its game number ``first``, and become a shard."""

    path: Path
    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Converted:
    """``unscored``: how many positions have no score. ``faults``: the games that cannot be read, in words."""

    positions: Positions
    unscored: int
    faults: list[str]


def split(path: Path, games_per_shard: int) -> Iterator[Games]:
    """The games of a file, so many at a time."""
    begins = find_begins(pieces(path))
    begin, first = next(begins, None), 0
    while begin is not None:
        *_, following = chain([None], islice(begins, games_per_shard - 1, games_per_shard))
        yield Games(path, begin, path.stat().st_size if following is None else following, first)
        begin, first = following, first + games_per_shard


def pieces(path: Path) -> Iterator[tuple[int, bytes]]:
    """A file in pieces of whole lines, each with its offset."""
    offset, rest = 0, b""
    with path.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            offset += len(data)
            text = rest + data
            stop = text.rfind(b"\n") + 1 if len(text) < LONGEST_LINE else len(text)
            yield offset - len(text), text[:stop]
            rest = text[stop:]
    yield offset - len(rest), rest


def read_games(games: Games, scores: str) -> Converted:
    """The positions of games, in order."""
    with games.path.open("rb") as file:
        file.seek(games.start)
        data = file.read(games.stop - games.start)
    made = Made(scores)
    faults = list[str]()
    bounds = sorted({games.start, *find_begins([(games.start, data)]), games.stop})
    for number, (start, stop) in enumerate(pairwise(bounds), games.first):
        try:
            game = read_game(data[start - games.start : stop - games.start])
        except ValueError as error:
            faults.append(f"{games.path}: game {number} at byte {start}: expected standard chess, found {error}")
        else:
            made.add(game)
    return Converted(made.positions(), made.unscored, faults)


def read_game(data: bytes) -> Any:
    """The one game in ``data``. Raises ValueError where it is none of standard chess."""
    tags, moves = split_game(data)
    text = io.StringIO(f"{tags}\n\n{moves}\n")
    game = chess.pgn.read_game(text, Visitor=Builder)
    if left := text.read().strip():
        raise ValueError(f"behind its end, {left[:60]!r}")
    if game.errors:
        raise ValueError(f"{game.errors[0]}")
    board = game.board()
    if type(board) is not chess.Board or board.chess960:
        raise ValueError(f"variant {game.headers.get('Variant')!r}")
    return game


class Builder(chess.pgn.GameBuilder[Any]):
    """Keeps errors with the game; python-chess's own builder would log them, too."""

    ended_with = ""

    def handle_error(self, error: Exception) -> None:
        self.game.errors.append(error)

    def visit_result(self, result: str) -> None:
        before = self.game.headers.get("Result", "*")  # of the tag, or else of an earlier one among the moves
        if before != result and {before, result} <= RESULTS.keys():
            self.handle_error(ValueError(f"the result {result} behind the result {before}"))
        self.ended_with = result
        super().visit_result(result)

    def begin_parse_san(self, board: Any, san: str) -> None:
        if self.ended_with:
            self.handle_error(ValueError(f"the move {san} behind the result {self.ended_with}"))


class Made:
    """The positions of some games."""

    def __init__(self, scores: str) -> None:
        self._is_result = scores == "result"
        self._channels: list[tuple[int, ...]] = []
        self._flags: list[tuple[bool, ...]] = []
        self._scores: list[Score] = []
        self._results = Counter[str]()
        self.unscored = 0

    def add(self, game: Any) -> None:
        result = game.headers.get("Result", "*")
        self._results[result] += 1
        board = game.board()
        node: Any = game
        while node is not None:
            if node.parent is not None:
                board.push(node.move)
            if not board.is_checkmate() and not board.is_stalemate():
                score = RESULTS.get(result) if self._is_result else eval_of(node)
                if score is None:
                    self.unscored += 1
                else:
                    self._channels.append(chess_boards.bitboards(board))
                    self._flags.append(chess_boards.flags(board))
                    self._scores.append(score)
            node = node.next()

    def positions(self) -> Positions:
        packed = chess_boards.pack(self._channels, self._flags, [score.mate for score in self._scores])
        return Positions(packed, self._scores, self._results)


def eval_of(node: Any) -> Score | None:
    """The score of a position, from white's side; None: no comment has one."""
    found = node.eval()
    if found is None:
        return None
    white = found.white()
    mate = white.mate()
    return Score(white.score(), False) if mate is None else Score(mate, True)

"""Positions of the games in PGN files, as records of ``loaderd.schemas.chess_eval``; read by python-chess.

**Scores** are one of

- ``"eval"``: what an engine said of the position, in a comment such as ``[%eval 0.17]`` (pawns) or ``[%eval #-3]``
  (moves to mate), from white's side, behind the move that led to it; as in Lichess's database. Positions without a
  score are left out, and counted.
- ``"result"``: how the game ended, for each of its positions. White's win is stored as "white mates in 1", which
  ``chess_eval`` delivers as 1.0; black's as -1.0; a draw as 0 centipawns, which is 0.0. Games without a result are
  left out, and their positions counted.

Positions of the main line are taken, from the first to the last in which there is a legal move. A game that
python-chess cannot read (one of its moves is illegal, say), one of another variant, and what it would misread
(``pgn_text``) is a fault, and none of its positions is taken.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np

from loaderd.convert.lots import Games
from loaderd.convert.pgn_text import begins_as_pgn, find_begins, split_game
from loaderd.convert.row_source import RowsOrFault
from loaderd.errors import Damage, OptionError, RecordMismatchError, at_damage
from loaderd.schema import Schema
from loaderd.schemas import chess_eval
from loaderd.shards.compression import OnRead
from loaderd.shards.files import open_shard
from loaderd.shards.shard_file import OpenFile, ShardFile

Scores = Literal["eval", "result"]

SCHEMA = Schema.of_stored(chess_eval().features)

_PIECE_BYTES = 1 << 20
_LONGEST_LINE = 16 << 20  # a longer one is none of PGN, and may end anywhere
_SHOWN = 60
_HINT = 'Pass --on-corrupt "skip_record" to leave out such games; or mend the game, and convert to another folder.'
_RESULTS = {"1-0": (1, True), "0-1": (-1, True), "1/2-1/2": (0, False)}


@dataclass(frozen=True)
class Unscored:
    """``count`` positions of a game, maybe all of them, have no score."""

    count: int


def check_installed() -> None:
    """Raise OptionError where python-chess is not installed."""
    try:
        importlib.import_module("chess.pgn")
    except ImportError:
        raise OptionError(
            "to convert PGN, python-chess is needed", hint="Install it: pip install 'loaderd[examples]'"
        ) from None


def is_pgn(file: ShardFile) -> bool:
    """Whether a file begins as PGN does. Raises ShardReadError and StorageError."""
    with closing(open_shard(file)) as opened:
        return begins_as_pgn(_read(opened, 0, 4096))


def find_games(number: int, file: ShardFile, on_read: OnRead) -> Iterator[Games]:
    """Each game of a file, in order, with what follows it up to the next one. ``number``: that of the file.

    Raises ShardReadError and StorageError.
    """
    with closing(open_shard(file)) as opened:
        bounds = chain(find_begins(_pieces(opened, on_read)), [file.size_bytes])
        for game, (start, stop) in enumerate(pairwise(bounds)):
            yield Games(number, start, stop, game)


def _pieces(opened: OpenFile, on_read: OnRead) -> Iterator[tuple[int, bytes]]:
    """A file in pieces of whole lines, each with its offset."""
    offset, rest = 0, b""
    while data := _read(opened, offset, _PIECE_BYTES):
        offset += len(data)
        text = rest + data
        stop = text.rfind(b"\n") + 1 if len(text) < _LONGEST_LINE else len(text)
        yield offset - len(text), text[:stop]
        rest = text[stop:]
        on_read(offset)
    yield offset - len(rest), rest


def read_games(file: ShardFile, games: Games, scores: Scores) -> Iterator[RowsOrFault | Unscored]:
    """For each of ``games``, in order: its rows, (positions,) of ``SCHEMA.row_dtype``, and Unscored; or its fault.

    Raises ShardReadError and StorageError.
    """
    with closing(open_shard(file)) as opened:
        data = _read(opened, games.start, games.stop - games.start)
    bounds = sorted({games.start, *find_begins([(games.start, data)]), games.stop})
    for number, (start, stop) in enumerate(pairwise(bounds), games.first_game):
        try:
            game = _read_game(data[start - games.start : stop - games.start])
        except ValueError as error:
            damage = Damage(file.uri, number, start, "a game of standard chess", f"{error}")
            yield at_damage(RecordMismatchError, damage, hint=_HINT)
        else:
            yield from _positions(game, scores)


def _read_game(data: bytes) -> Any:
    """The one game in ``data``. Raises ValueError where it is none of standard chess."""
    import chess.pgn

    tags, moves = split_game(data)
    text = io.StringIO(f"{tags}\n\n{moves}\n")
    game = chess.pgn.read_game(text, Visitor=_builder())
    if left := text.read().strip():
        raise ValueError(f"behind its end, {left[:_SHOWN]!r}")
    if game.errors:
        raise ValueError(f"{game.errors[0]}")
    board = game.board()
    if type(board) is not chess.Board or board.chess960:
        raise ValueError(f"variant {game.headers.get('Variant')!r}")
    return game


@cache
def _builder() -> Any:
    import chess.pgn

    class Builder(chess.pgn.GameBuilder):  # type: ignore[misc]  # to mypy, chess is Any
        """Keeps errors with the game; python-chess's own builder would log them, too."""

        ended_with = ""

        def handle_error(self, error: Exception) -> None:
            self.game.errors.append(error)

        def visit_result(self, result: str) -> None:
            before = self.game.headers.get("Result", "*")  # of the tag, or else of an earlier one among the moves
            if before != result and {before, result} <= _RESULTS.keys():
                self.handle_error(ValueError(f"the result {result} behind the result {before}"))
            self.ended_with = result
            super().visit_result(result)

        def begin_parse_san(self, board: Any, san: str) -> None:
            if self.ended_with:
                self.handle_error(ValueError(f"the move {san} behind the result {self.ended_with}"))

    return Builder


def _positions(game: Any, scores: Scores) -> Iterator[RowsOrFault | Unscored]:
    from loaderd.convert import chess_boards

    result = _RESULTS.get(game.headers.get("Result", "*"))
    channels, flag_bits, values, mates, unscored = [], [], [], [], 0
    board = game.board()
    node: Any = game
    while node is not None:
        if node.parent is not None:
            board.push(node.move)
        if not board.is_checkmate() and not board.is_stalemate():
            score = result if scores == "result" else _eval_of(node)
            if score is None:
                unscored += 1
            else:
                channels.append(chess_boards.bitboards(board))
                flag_bits.append(chess_boards.flags(board))
                values.append(score[0])
                mates.append(score[1])
        node = node.next()
    if channels:
        rows = np.zeros(len(channels), SCHEMA.row_dtype)
        rows["d"], rows["s"] = chess_boards.pack(channels, flag_bits, mates), values
        yield rows
    if unscored:
        yield Unscored(unscored)


def _eval_of(node: Any) -> tuple[int, bool] | None:
    """(score, whether it counts moves to mate, not centipawns), from white's side; None: no comment has one."""
    found = node.eval()
    if found is None:
        return None
    white = found.white()
    mate = white.mate()
    return (mate, True) if mate is not None else (white.score(), False)


def _read(opened: OpenFile, offset: int, size: int) -> bytes:
    data = bytearray(size)
    return bytes(data[: opened.read_at(offset, memoryview(data))])

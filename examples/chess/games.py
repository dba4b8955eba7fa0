"""Plays games of chess from a seed, takes positions from them, and scores them.

The players know the rules and look one ply ahead. They open at random. Then they prefer moves that win material,
leave nothing hanging, give check, and above all mate. That is fast, and gives positions from all phases of the game,
from even ones to decided ones.

Each call of :func:`play` makes some hundred positions. They depend on its task alone, so the shards do not depend on
the number of processes or on timing.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import chess
import chess.engine
import chess_boards
import numpy as np
import numpy.typing as npt

MAX_PLIES = 240
OPENING_PLIES = 8
STOPPED = "stopped early"  # after MAX_PLIES, or when enough positions were taken
KEPT_SHARE = 0.4  # the share of a game's positions that is taken: neighbours are nearly the same

# Centipawns, indexed by piece type (0: no piece). The king has no value, because it is never taken.
PIECE_VALUE = (0, 100, 320, 330, 500, 900, 0)
MOBILITY_VALUE = (0, 1, 4, 4, 3, 1, 0)  # for each attacked square
CHECK_VALUE = 50
MATE_VALUE = 10_000
TEMPERATURE = 60.0  # centipawns; the higher, the more often a player chooses a move that gains less


@dataclass(frozen=True)
class Task:
    """What a call of :func:`play` makes. ``stockfish`` and ``depth`` are those of :func:`open_scorer`."""

    seed: str
    num_positions: int
    stockfish: str | None
    depth: int


@dataclass(frozen=True)
class Score:
    """From white's side: ``value`` in centipawns or, if ``mate``, in moves to mate (negative: black mates)."""

    value: int
    mate: bool


@dataclass(frozen=True)
class Positions:
    """``packed``: uint8, (n, 194); ``scores``: one for each; ``results``: how many games had which result."""

    packed: npt.NDArray[np.uint8]
    scores: list[Score]
    results: Counter[str]


@dataclass(frozen=True)
class Turn:
    """A position before a move: its bitboards, its legal moves, and what each gains the player, in centipawns."""

    board: chess.Board
    channels: tuple[int, ...]
    moves: list[chess.Move]
    gains: list[int]

    @property
    def mates_in_one(self) -> bool:
        return MATE_VALUE in self.gains


Scorer = Callable[[Turn, int], Score]


def play(task: Task) -> Positions:
    """Play games until ``task.num_positions`` positions are taken, none twice from the same game."""
    rng = random.Random(task.seed)
    channels: list[Sequence[int]] = []
    flag_bits: list[Sequence[bool]] = []
    scores: list[Score] = []
    results = Counter[str]()
    with open_scorer(task.stockfish, task.depth) as score:
        while len(channels) < task.num_positions:
            board = chess.Board()
            seen: set[tuple[object, ...]] = set()
            while board.outcome() is None and board.ply() < MAX_PLIES and len(channels) < task.num_positions:
                turn = look_ahead(board)
                position = (turn.channels, board.turn, board.castling_rights, board.ep_square)
                if board.ply() >= OPENING_PLIES and rng.random() < KEPT_SHARE and position not in seen:
                    seen.add(position)
                    channels.append(turn.channels)
                    flag_bits.append(chess_boards.flags(board))
                    scores.append(score(turn, results.total()))
                board.push(choose(turn, rng))
            outcome = board.outcome()
            results[outcome.result() if outcome else STOPPED] += 1
    return Positions(chess_boards.pack(channels, flag_bits, [each.mate for each in scores]), scores, results)


# --------------------------------------------------------------------------------------------- the players


def look_ahead(board: chess.Board) -> Turn:
    """The legal moves of a position, and what each gains within one ply."""
    channels = chess_boards.bitboards(board)
    # Of the four channels of each piece type, the last two are the squares that white and black attack.
    white_attacks, black_attacks = _union(channels[2::4]), _union(channels[3::4])
    own, theirs = (white_attacks, black_attacks) if board.turn else (black_attacks, white_attacks)
    hanging = theirs & ~own
    moves = list(board.legal_moves)
    return Turn(board, channels, moves, [_gain(board, move, theirs, hanging) for move in moves])


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _gain(board: chess.Board, move: chess.Move, attacked: int, hanging: int) -> int:
    """What a move gains the player, in centipawns.

    ``attacked``: the squares that the opponent attacks. ``hanging``: those of them that the player does not defend.
    """
    mover = board.piece_type_at(move.from_square) or chess.PAWN
    taken = chess.PAWN if board.is_en_passant(move) else board.piece_type_at(move.to_square) or 0
    gain = 0 if board.is_castling(move) else PIECE_VALUE[taken]
    if move.promotion:
        gain += PIECE_VALUE[move.promotion] - PIECE_VALUE[chess.PAWN]
    if hanging >> move.from_square & 1:
        gain += PIECE_VALUE[mover]
    if attacked >> move.to_square & 1:
        gain -= PIECE_VALUE[move.promotion or mover]
    board.push(move)
    if board.is_check():
        gain = MATE_VALUE if board.is_checkmate() else gain + CHECK_VALUE
    board.pop()
    return gain


def choose(turn: Turn, rng: random.Random) -> chess.Move:
    """A random move: in the opening, each is equally likely; later, by the softmax of the gains."""
    if turn.board.ply() < OPENING_PLIES:
        return rng.choice(turn.moves)
    best = max(turn.gains)
    return rng.choices(turn.moves, [math.exp((gain - best) / TEMPERATURE) for gain in turn.gains])[0]


# ---------------------------------------------------------------------------------------------- the scores


def evaluate(turn: Turn) -> Score:
    """Mate in one, if there is one; else material plus mobility (attacked squares), in centipawns."""
    if turn.mates_in_one:
        return Score(1 if turn.board.turn else -1, mate=True)
    total = 0
    for piece_type in chess.PIECE_TYPES:
        first = 4 * (piece_type - 1)
        white, black, white_attacks, black_attacks = (mask.bit_count() for mask in turn.channels[first : first + 4])
        total += PIECE_VALUE[piece_type] * (white - black)
        total += MOBILITY_VALUE[piece_type] * (white_attacks - black_attacks)
    return Score(total, mate=False)


@contextlib.contextmanager
def open_scorer(stockfish: str | None, depth: int) -> Iterator[Scorer]:
    """A scorer: the engine at the path ``stockfish``, searching ``depth`` plies; :func:`evaluate` if that is None.

    The scorer's second argument is the number of the game. When it changes, the engine clears its memory.
    """
    if stockfish is None:
        yield lambda turn, game: evaluate(turn)
        return
    with chess.engine.SimpleEngine.popen_uci(stockfish) as engine:
        # With one thread and a fixed depth, a search gives the same score every time.
        engine.configure({"Threads": 1, "Hash": 16})
        limit = chess.engine.Limit(depth=depth)

        def score(turn: Turn, game: int) -> Score:
            info = engine.analyse(turn.board, limit, game=game, info=chess.engine.INFO_SCORE)
            white = info["score"].white()
            mate, centipawns = white.mate(), white.score()
            return Score(mate, mate=True) if mate is not None else Score(centipawns or 0, mate=False)

        yield score

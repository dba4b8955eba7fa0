"""A game of Go: the rules, and a player without a search.

The player prefers to capture, to save a group in atari, and to answer near the last move; it rarely plays where it
would be captured at once, and never fills its own eye. Otherwise it moves at random. A network can learn this policy,
because it follows from the board and the last move.

Points are numbered row by row from 0; ``size * size`` is a pass.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

EMPTY, BLACK, WHITE = 0, 1, 2
KOMI = 7.5
VISITS = 500  # the sum of a policy target, about
CAPTURE, RESCUE, NEARBY, SELF_ATARI = 40.0, 20.0, 4.0, 0.02  # what makes a move more likely, and by how much


@dataclass(frozen=True)
class Turn:
    """A position before a move. ``player``: BLACK or WHITE, whose turn it is. ``move``: the point that is played.

    ``colors``: of each point, (size * size,). ``liberties``: how many the group on each point has, 0 where it is
    empty. ``ko``: the point that the rule of ko forbids, or -1. ``visits``: point -> how often, out of ``VISITS``
    times, the player would play there.
    """

    player: int
    colors: tuple[int, ...]
    liberties: tuple[int, ...]
    ko: int
    visits: dict[int, int]
    move: int


@dataclass(frozen=True)
class Game:
    """``owners``: the colors that own the points at the end, (size * size,). ``score``: black's lead after komi."""

    turns: list[Turn]
    owners: tuple[int, ...]
    score: float


@dataclass(frozen=True)
class Group:
    """Connected points (``stones``) of one color, or connected empty points. ``touched``: the points beside them."""

    stones: frozenset[int]
    touched: frozenset[int]
    liberties: frozenset[int]


@cache
def neighbours(size: int) -> list[tuple[int, ...]]:
    """For each point, those beside it."""
    steps = ((-1, 0), (0, -1), (0, 1), (1, 0))
    on_board = range(size)
    return [
        tuple(
            (row + down) * size + column + right
            for down, right in steps
            if row + down in on_board and column + right in on_board
        )
        for row in on_board
        for column in on_board
    ]


def group_at(colors: list[int], size: int, point: int) -> Group:
    """The group that ``point`` belongs to."""
    beside, color = neighbours(size), colors[point]
    stones, touched, left = {point}, set[int](), [point]
    while left:
        for other in beside[left.pop()]:
            if colors[other] != color:
                touched.add(other)
            elif other not in stones:
                stones.add(other)
                left.append(other)
    liberties = frozenset(other for other in touched if colors[other] == EMPTY)
    return Group(frozenset(stones), frozenset(touched), liberties)


def groups_of(colors: list[int], size: int) -> list[Group | None]:
    """For each point the group that stands there, or None."""
    found: list[Group | None] = [None] * len(colors)
    for point, color in enumerate(colors):
        if color != EMPTY and found[point] is None:
            group = group_at(colors, size, point)
            for stone in group.stones:
                found[stone] = group
    return found


def weight(colors: list[int], groups: list[Group | None], size: int, player: int, point: int) -> float:
    """How likely the player is to play on an empty point: an ordinary move has weight 1; 0 means never."""
    own, theirs, free = set[Group](), set[Group](), set[int]()
    for other in neighbours(size)[point]:
        group = groups[other]
        if group is None:
            free.add(other)
        else:
            (own if colors[other] == player else theirs).add(group)
    taken = sum(len(group.stones) for group in theirs if len(group.liberties) == 1)
    left = free.union(*(group.liberties for group in own)) - {point}
    if not taken and not left:
        return 0.0  # suicide
    if not free and not theirs and all(len(group.liberties) > 1 for group in own):
        return 0.0  # its own eye
    likely = 1.0 + CAPTURE * taken
    if not taken and len(left) == 1:
        likely *= SELF_ATARI
    elif any(len(group.liberties) == 1 for group in own):
        likely += RESCUE
    return likely


def play_move(colors: list[int], size: int, player: int, point: int) -> int:
    """Put a stone on a point, and take the opponent's groups without liberties.

    Returns the point where the opponent may not play now, because of ko, or -1.
    """
    colors[point] = player
    taken = []
    for other in neighbours(size)[point]:
        if colors[other] == 3 - player:
            group = group_at(colors, size, other)
            if not group.liberties:
                taken += group.stones
                for stone in group.stones:
                    colors[stone] = EMPTY
    own = group_at(colors, size, point)
    is_ko = len(taken) == 1 and len(own.stones) == 1 and len(own.liberties) == 1
    return taken[0] if is_ko else -1


def play(seed: str, size: int) -> Game:
    """Play a game until both players pass, or for ``3 * size * size`` moves. It depends on seed and size alone."""
    rng = random.Random(seed)
    colors, player, ko, last, passes = [EMPTY] * (size * size), BLACK, -1, -1, 0
    turns: list[Turn] = []
    while passes < 2 and len(turns) < 3 * size * size:
        groups = groups_of(colors, size)
        near = neighbours(size)[last] if 0 <= last < size * size else ()
        weights = {
            point: weight(colors, groups, size, player, point) * (NEARBY if point in near else 1.0)
            for point, color in enumerate(colors)
            if color == EMPTY and point != ko
        }
        weights = {point: likely for point, likely in weights.items() if likely} or {size * size: 1.0}
        total = sum(weights.values())
        visits = {point: max(1, round(likely / total * VISITS)) for point, likely in weights.items()}
        move = rng.choices([*weights], [*weights.values()])[0]
        liberties = tuple(0 if group is None else len(group.liberties) for group in groups)
        turns.append(Turn(player, tuple(colors), liberties, ko, visits, move))
        passes = passes + 1 if move == size * size else 0
        ko = -1 if passes else play_move(colors, size, player, move)
        player, last = 3 - player, move
    return Game(turns, *count(colors, size))


def count(colors: list[int], size: int) -> tuple[tuple[int, ...], float]:
    """(owners, score) by area: an empty region belongs to a color if only stones of that color touch it."""
    owners = list(colors)
    for point, color in enumerate(colors):
        if color == EMPTY:
            touching = {colors[other] for other in group_at(colors, size, point).touched}
            owners[point] = touching.pop() if len(touching) == 1 else EMPTY
    return tuple(owners), owners.count(BLACK) - owners.count(WHITE) - KOMI

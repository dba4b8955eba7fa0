"""The 1,858 moves of Leela Chess Zero's policy, and the policy of a board that is mirrored left and right.

The order is that of LeelaChessZero/lczero-training, tf/policy_index.py: from each square, a1 to h8, to each square
that a queen or a knight can reach, in the same order; then promotions to queen, rook and bishop (one to a knight is
the move without a letter). Moves are seen by the side to move, which plays upwards. Castling is the king's move onto
its rook; but a position is mirrored only where nobody may castle.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_FILES = "abcdefgh"


def moves() -> list[str]:
    """The names of the moves, such as "g1f3" and "a7b8q", in the order of the policy."""
    squares = [(rank, file) for rank in range(8) for file in range(8)]
    plain = [_name(*start) + _name(*stop) for start in squares for stop in squares if _is_reached(start, stop)]
    return plain + list(_promotions())


def _is_reached(start: tuple[int, int], stop: tuple[int, int]) -> bool:
    """Whether a queen or a knight goes from ``start`` to ``stop`` on an empty board; squares are (rank, file)."""
    up, right = abs(start[0] - stop[0]), abs(start[1] - stop[1])
    return start != stop and (up == 0 or right == 0 or up == right or {up, right} == {1, 2})


def _promotions() -> Iterator[str]:
    for file in range(8):
        for target in (file - 1, file, file + 1):
            if 0 <= target < 8:
                yield from (_name(6, file) + _name(7, target) + piece for piece in "qrb")


def _name(rank: int, file: int) -> str:
    return f"{_FILES[file]}{rank + 1}"


def mirrored_moves() -> npt.NDArray[np.intp]:
    """intp, (1858,): for each move of the mirrored board's policy, the number of the move whose value it takes."""
    names = moves()
    numbers = {name: number for number, name in enumerate(names)}
    mirror = str.maketrans(_FILES, _FILES[::-1])
    # Only the squares are mirrored: the letter of a promotion's piece may also be that of a file, as in "a7b8b".
    return np.array([numbers[name[:4].translate(mirror) + name[4:]] for name in names], dtype=np.intp)

"""Where the games of a PGN file begin, and what python-chess is given of each: lines of text, no chess.

A game is **tags**, each on a line of its own, and **moves**::

    [Event "A"]
    [Result "1-0"]

    1. e4 { a comment } e5 2. Nf3 1-0

python-chess takes an empty line between moves for the end of the game, passes over words that are no moves, and where
a comment does not end, takes all that follows for the comment. So it gets each game alone, without empty lines, and
:func:`split_game` refuses what it would misread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MARK = b"\xef\xbb\xbf"  # of UTF-8: files may begin with it
_EVENT = re.compile(rb"^\[Event ", re.MULTILINE)
_COMMENTS = re.compile(r"\{[^}]*\}|;[^\n]*|^%[^\n]*", re.MULTILINE)
_SHOWN = 60


def find_begins(offset: int, data: bytes) -> Iterator[int]:
    """The offset at which each game of ``data``, which begins at ``offset``, begins: with a line ``[Event …``."""
    for found in _EVENT.finditer(data):
        yield offset + found.start()


def split_game(data: bytes) -> tuple[str, str]:
    """The tags and the moves of a game, without empty lines; a character for each byte.

    Raises ValueError where python-chess would take one thing for another.
    """
    tags, moves = list[str](), list[str]()
    for line in data.decode("latin-1").split("\n"):
        line = line.removeprefix(_MARK.decode("latin-1"))
        if not line or line.isspace() or (not moves and line[0] in "%;"):
            continue
        if not moves and line.lstrip()[0] == "[":
            tags.append(line.lstrip())
        else:
            moves.append(line)
    text = "\n".join(moves)
    _check_moves(text)
    return "\n".join(tags), text


def _check_moves(text: str) -> None:
    """Outside of comments, there is no bracket."""
    left = _COMMENTS.sub(" ", text)
    for bracket, what in {"{": "a comment without its end", "}": "the end of a comment", "[": "a tag"}.items():
        _, found, behind = left.partition(bracket)
        if found:
            raise ValueError(f"{what} among the moves, {(found + behind)[:_SHOWN]!r}")

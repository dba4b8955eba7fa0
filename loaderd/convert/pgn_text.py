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
from collections.abc import Iterable, Iterator

_MARK = b"\xef\xbb\xbf"  # of UTF-8: files may begin with it, also those that were joined to one
_NAME = rb'[A-Za-z0-9][A-Za-z0-9_+#=:-]*[ \t]+"'
# The tags of a game, and empty lines between them. Group 1: the first of them is the event.
_TAGS = re.compile(
    rb"\n(?:%b)?[ \t]*\[(?:(Event )|%b)[^\n]*(?:\s*\n[ \t]*\[(?!Event )%b[^\n]*)*" % (_MARK, _NAME, _NAME)
)
# The beginning of a line that is neither empty nor a comment.
_TEXT = re.compile(rb"^(?!(?:%b)?(?:[^\S\n]*$|[%%;]))" % _MARK, re.MULTILINE)
_COMMENTS = re.compile(r"\{[^}]*\}|;[^\n]*|^%[^\n]*", re.MULTILINE)
_TAG = re.compile(rf"\[(?:Event |{_NAME.decode()})")
_WHOLE_TAG = re.compile(r'\[[A-Za-z0-9][A-Za-z0-9_+#=:-]*\s+"[^"]*"\]\s*')
_MATTER = re.compile(r"FEN|SetUp|Variant|Result")  # the tags on which positions and scores depend
_SHOWN = 60


def begins_as_pgn(data: bytes) -> bool:
    """Whether a file whose first bytes are ``data`` begins with a tag; empty lines and comments may be before it."""
    text = b"\n" + data
    tags = _TAGS.search(text)
    return tags is not None and _TEXT.search(text, 0, tags.start()) is None


def find_begins(pieces: Iterable[tuple[int, bytes]]) -> Iterator[int]:
    """The offset at which each game begins, in order. ``pieces``: the offsets of whole lines, and these lines.

    A game begins with the first of its tags, in which the event may come but once. Text in front of the first tag of
    all counts as a game. Where there is no tag, there is no game.
    """
    text_at, in_tags, has_event, is_first = -1, False, False, True
    for offset, lines in pieces:
        data, done = b"\n" + lines, 0
        for tags in _TAGS.finditer(data):
            text = _TEXT.search(data, done, tags.start())
            if is_first and text_at < 0 and text is not None:
                text_at = offset + text.start() - 1
            if is_first and text_at >= 0:
                yield text_at
            is_event = tags[1] is not None
            if text is not None or not in_tags or (is_event and has_event):
                yield offset + tags.start()
                has_event = False
            in_tags, has_event, is_first, done = True, has_event or is_event, False, tags.end()
        text = _TEXT.search(data, done)
        if text is not None:
            in_tags = False
            text_at = offset + text.start() - 1 if text_at < 0 else text_at


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
    _check_tags(tags, moves)
    text = "\n".join(moves)
    _check_moves(text)
    return "\n".join(tags), text


def _check_tags(tags: list[str], moves: list[str]) -> None:
    if not any(map(_TAG.match, tags)):
        raise ValueError(f"no tag in front of {''.join([*tags, *moves][:1])[:_SHOWN]!r}")
    for line in tags:
        if _MATTER.search(line) and not _WHOLE_TAG.fullmatch(line):
            raise ValueError(f"{line[:_SHOWN]!r}, which is not one tag on a line of its own")


def _check_moves(text: str) -> None:
    """Outside of comments, there is no bracket."""
    left = _COMMENTS.sub(" ", text)
    for bracket, what in {"{": "a comment without its end", "}": "the end of a comment", "[": "a tag"}.items():
        _, found, behind = left.partition(bracket)
        if found:
            raise ValueError(f"{what} among the moves, {(found + behind)[:_SHOWN]!r}")

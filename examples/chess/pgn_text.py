"""Where the games of a PGN file begin, and what python-chess is given of each: lines of text, no chess.

A game is **tags**, each on a line of its own, and **moves**::

    [Event "A"]
    [Result "1-0"]

    1. e4 { a comment } e5 2. Nf3 1-0

python-chess takes an empty line between moves for the end of the game, looks for moves also inside of words that are
none (f4 in ``♗f4``, which is the bishop's), passes over the other words, and where a comment does not end, takes all
that follows for the comment. So it gets each game alone, without empty lines, and :func:`split_game` refuses what it
would misread.
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
# What python-chess takes for a move, legal or not. In a word of _WORDS, it finds no other one.
_MOVE = (
    r"(?:[PNBRQK]?[a-h]?[1-8]?[-x]?[a-h][1-8](?:=?[nbrqkNBRQK])?|[PNBRQK]?@[a-h][1-8]"
    r"|O-O(?:-O)?|0-0(?:-0)?|--|Z0|0000|@@@@)"
)
_NUMBER = r"[1-9][0-9]{0,3}"
_SUFFIX = r"(?:[+#!?=/]|-(?=[+/])|(?<=[+/])-(?![-+/])|\$[0-9]{1,3}|e\.p\.)"  # with +-, =/+ and such, of Scid
_RESULT = r"(?:\*|1-0|0-1|1/2-1/2)"
_SPACE = r"[\s\x1a()]"  # Ctrl-Z: the end of a file of DOS
_WORDS = re.compile(
    rf"(?:{_SPACE}+|(?:(?:(?:{_NUMBER})?\.+)?{_MOVE}{_SUFFIX}*|{_SUFFIX}+|{_NUMBER}\.*|\.+|{_RESULT})(?={_SPACE}|\Z))*"
)
_VARIATIONS = re.compile(rf"[()]|{_MOVE}")
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
    """Outside of comments, there are whole words of PGN alone, and each variation ends."""
    left = _COMMENTS.sub(" ", text)
    for bracket, what in {"{": "a comment without its end", "}": "the end of a comment", "[": "a tag"}.items():
        _, found, behind = left.partition(bracket)
        if found:
            raise ValueError(f"{what} among the moves, {(found + behind)[:_SHOWN]!r}")
    if (known := _WORDS.match(left)) is not None and known.end() < len(left):
        word = left[known.end() :].split(maxsplit=1)[0].encode("latin-1").decode(errors="backslashreplace")
        raise ValueError(f"a word among the moves that is none of PGN, {word[:_SHOWN]!r}")
    if "(" in left or ")" in left:
        _check_variations(left)


def _check_variations(left: str) -> None:
    """Each variation has its end, and a move that it replaces; python-chess passes over a ``(`` that has none."""
    begins, has_move = [0], [False]
    for found in _VARIATIONS.finditer(left):
        if found[0] == "(":
            if not has_move[-1]:
                raise ValueError(f"a variation without a move in front of it, {left[found.start() :][:_SHOWN]!r}")
            begins.append(found.start())
            has_move.append(False)
        elif found[0] == ")":
            begins.pop()
            has_move.pop()
            if not begins:
                raise ValueError(f"the end of a variation among the moves, {left[found.start() :][:_SHOWN]!r}")
        else:
            has_move[-1] = True
    if len(begins) > 1:
        raise ValueError(f"a variation without its end among the moves, {left[begins[1] :][:_SHOWN]!r}")

"""Removes secrets from texts that people read, and what a terminal would obey.

A URI may hold the key to a bucket, and errors, reports of damage, logs and servers name URIs. The name of a file, a
feature or a consumer, or what a server says, may hold characters that clear a screen, turn the direction of a line,
or begin a line of their own. So all of these texts pass through :func:`readable`: exceptions call it in their
constructors, logs in a filter of the logger, commands where they print. Code that raises or logs need not do anything
itself. The full URI is used only for requests to storage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    import logging

HIDDEN = "***"


def _behind(*schemes: str) -> str:
    """A pattern for the place behind one of these schemes and its slashes: of two, a Path leaves one."""
    return "(?:" + "|".join(f"(?<={scheme}:/)|(?<={scheme}://)" for scheme in schemes) + ")"


# The user and the password in front of the host: s3://KEY:SECRET@bucket. A number behind the colon, and a slash, are
# a port; but a bucket has none, and a secret may begin so. A secret may hold an @, too: it goes to the last one
# before the slash that ends the host. A user alone is a token on the web, but not everywhere: sftp://user@host.
_USER = re.compile(
    rf"(?<=/)(?:(?:{_behind('s3', 'gs', 'abfs', 'abfss')}|"
    rf"(?:{_behind('http', 'https', 's3a', 'gcs', 'az', 'hf')}|(?<=://))(?=[^\s/@?:]*:(?!\d+/)))[^\s/@?:]*:[^\s@]*"
    rf"|{_behind('s3', 'http', 'https')}[^\s/@?#:]+)(?:@[^\s@/?#]*)*(?=@)"
)
_WORD = re.compile(r"\S+")
# ?secret_key=…&X-Amz-Signature=…#token=…; these characters may be quoted, as those of a URI in another URI are.
_PARAMETER = re.compile(r"(?:[?&;#]|%3[fb]|%26|%23)((?:[^=&?;#%\s]|%(?!3[fbd]|26|23))+)(?:=|%3d)", re.IGNORECASE)
_VALUE = re.compile(r"(?:[^&;%\s'\"]|%(?!3b|26))+", re.IGNORECASE)
_MOST_QUOTED = 4
# Whole words of a parameter's name, so that "keys" and "monkey" do not match, but "accountKey" does.
_NAME_PARTS = re.compile(r"[a-z0-9]+|[A-Z]+(?![a-z])|[A-Z][a-z0-9]*")
_SECRET = re.compile(
    r"auth|authorization|bearer|jwt|pass|passphrase|sk"
    r"|(?:access|account|api|auth|aws|client|private|refresh|sas|secret|session){0,3}"
    r"(?:secret|token|password|passwd|pwd|signature|sig|credential|credentials|key|keyid)",
    re.IGNORECASE,
)


def shown(got: Any, most: int) -> str:
    """The first ``most`` characters of ``repr(got)`` without its secrets: where they are cut, they are not found."""
    try:
        text = repr(got)
    except Exception:  # an integer of more than 4,300 digits, or a class of the user's
        text = f"a value of type {type(got).__name__} that cannot be printed"
    return redacted(text)[:most]


def readable(text: str) -> str:
    """``text`` without secrets, and with escapes for characters that cannot be printed: ``\\x1b``, ``\\u202e``.

    It may have several lines. Those behind the first are indented, so that no name can begin one. What this returns
    stays as it is if it comes through here again.
    """
    first, *others = printable(redacted(text)).split("\n")
    return "\n".join([first, *(line if not line or line.startswith("  ") else f"    {line}" for line in others)])


def readable_line(text: str) -> str:
    """The same as one line: line feeds are escaped, too. For a name, or a value, in a line of other texts."""
    return printable(redacted(text), "")


def make_readable(record: logging.LogRecord) -> bool:
    """A filter that takes secrets, and what a terminal would obey, out of a record, and keeps each record."""
    record.msg, record.args = readable(record.getMessage()), ()
    return True


def printable(text: str, kept: str = "\n") -> str:
    """``text`` with escapes for characters that cannot be printed, but for those in ``kept``."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode() for each in text
    )


def redacted(text: str) -> str:
    """``text`` without passwords, keys, tokens and signatures of the URIs in it. A text may come from anybody.

    So the time that it takes grows with the length of the text, and no faster.
    """
    if ":/" not in text:
        return text
    return "".join(_without_values(_WORD.sub(_without_users, text)))


def _without_values(text: str) -> Iterator[str]:
    """The parts of a text without the values of secret parameters."""
    done = 0
    for match in _PARAMETER.finditer(text):
        if match.start() >= done and _is_secret(match[1]) and (value := _VALUE.match(text, match.end())):
            yield text[done : match.end()]
            yield HIDDEN
            done = value.end()
    yield text[done:]


def _is_secret(name: str) -> bool:
    for _ in range(_MOST_QUOTED):
        name = unquote(name)
    return any(map(_SECRET.fullmatch, _NAME_PARTS.findall(name)))


def _without_users(word: re.Match[str]) -> str:
    """A word of a text without users and passwords. They end at an @: behind the last one, there are none."""
    before, at, behind = word[0].rpartition("@")
    return _USER.sub(HIDDEN, before + at) + behind

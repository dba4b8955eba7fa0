"""Removes secrets from texts that people read.

A URI may hold the key to a bucket, and errors, reports of damage, logs and servers name URIs. So all of these texts
pass through :func:`redacted`: exceptions and damages call it in their constructors, warnings where they are sent,
logs in their formatter. Code that writes such a text need not hide anything itself. The full URI is used only for
requests to storage.
"""

from __future__ import annotations

import re
from typing import Any

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
# ?secret_key=…&X-Amz-Signature=…; whole words, so that "keys" and "monkey" do not match, but "accountKey" does. The
# first line says that there is a value: without it, a long name of many such words would be read to its end for each
# of them.
_QUERY = re.compile(
    r"(?<=[?&;])(?=[^=&?;\s]+=[^&;\s'\"])"
    r"((?:[^=&?;\s]*(?:[-_.]|(?-i:[a-z0-9](?=[A-Z])|[A-Z](?=[A-Z][a-z]))))?"
    r"(?:auth|authorization|bearer|jwt|pass|passphrase"
    r"|(?:access|account|api|auth|aws|client|private|refresh|sas|secret|session){0,3}"
    r"(?:secret|token|password|passwd|pwd|signature|sig|credential|credentials|key|key_?id))"
    r"(?:[-_.][^=&?;\s]*)?)=[^&;\s'\"]+",
    re.IGNORECASE,
)


def shown(got: Any, most: int) -> str:
    """The first ``most`` characters of ``repr(got)`` without its secrets: where they are cut, they are not found."""
    return redacted(repr(got))[:most]


def redacted(text: str) -> str:
    """``text`` without passwords, keys, tokens and signatures of the URIs in it. A text may come from anybody.

    So the time that it takes grows with the length of the text, and no faster.
    """
    if ":/" not in text:
        return text
    return _QUERY.sub(rf"\1={HIDDEN}", _WORD.sub(_without_users, text))


def _without_users(word: re.Match[str]) -> str:
    """A word of a text without users and passwords. They end at an @: behind the last one, there are none."""
    before, at, behind = word[0].rpartition("@")
    return _USER.sub(HIDDEN, before + at) + behind

"""Removes secrets from texts that people read.

A URI may hold the key to a bucket, and errors, reports of damage, logs and servers name URIs. So all of these texts
pass through :func:`redacted`: exceptions and damages call it in their constructors, warnings where they are sent,
logs in their formatter. Code that writes such a text need not hide anything itself. The full URI is used only for
requests to storage.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# The user and the password in front of the host: s3://KEY:SECRET@bucket. A number behind the colon, and a slash, are
# a port; but a bucket has none, and a secret may begin so. A secret may hold an @, too: it goes to the last one
# before the slash that ends the host.
_USER = re.compile(
    r"(?:(?<=s3://)|(?<=gs://)|(?<=abfs://)|(?<=abfss://)|(?<=://)(?=[^\s/@?:]*:(?!\d+/)))[^\s/@?:]*:[^\s@]*"
    r"(?:@[^\s@/?#]*)*(?=@)"
)
_WORD = re.compile(r"\S+")
# ?secret_key=…&X-Amz-Signature=…; whole words, so that "keys" and "monkey" do not match. The first line says that
# there is a value: without it, a long name of many such words would be read to its end for each of them.
_QUERY = re.compile(
    r"(?<=[?&;])(?=[^=&?;\s]+=[^&;\s'\"])"
    r"((?:[^=&?;\s]*[-_.])?"
    r"(?:auth|authorization|pass|passphrase|(?:access|api|auth|client|secret|session)?"
    r"(?:secret|token|password|passwd|pwd|signature|sig|credential|credentials|key|key_?id))"
    r"(?:[-_.][^=&?;\s]*)?)=[^&;\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """``text`` without passwords, keys, tokens and signatures of the URIs in it. A text may come from anybody.

    So the time that it takes grows with the length of the text, and no faster.
    """
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1={HIDDEN}", _WORD.sub(_without_users, text))


def _without_users(word: re.Match[str]) -> str:
    """A word of a text without users and passwords. They end at an @: behind the last one, there are none."""
    before, at, behind = word[0].rpartition("@")
    return _USER.sub(HIDDEN, before + at) + behind

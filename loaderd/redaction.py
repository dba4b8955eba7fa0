"""Texts for people hold no secrets.

A URI may have the key to a bucket in it, and it is named in errors, in reports of damage, in logs and by servers. So
each of these is passed through :func:`redacted` where it is made: exceptions and damages by their own constructors,
warnings where they are sent, logs by their formatter. Whoever words a text need not think of it. The full URI is kept
where storage is asked, and nowhere else.
"""

from __future__ import annotations

import re

HIDDEN = "***"

# The user and the password in front of the host: s3://KEY:SECRET@bucket. A number behind the colon is a port.
_USER = re.compile(r"(?<=://)[^\s/@?:]*:(?!\d+/)[^\s@]*(?=@)")
# ?secret_key=…&X-Amz-Signature=…; whole words, so that "keys" or "monkey" are none.
_QUERY = re.compile(
    r"(?<=[?&;])((?:[^=&?\s]*[-_.])?"
    r"(?:secret|token|password|passwd|pwd|signature|sig|credential|credentials|key|key_?id|accesskey|secretkey)"
    r"(?:[-_.][^=&?\s]*)?)=[^&;\s'\"]+",
    re.IGNORECASE,
)


def redacted(text: str) -> str:
    """``text`` without passwords, keys, tokens and signatures of the URIs in it."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1={HIDDEN}", _USER.sub(HIDDEN, text))

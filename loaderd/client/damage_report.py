"""Lists each damaged record once: for the statistics, and in a file if the user asks for one.

The file holds a JSON object a line: the fields of :class:`~loaderd.errors.Damage`, and ``when`` it was found:
``"index"``, before it could be in a batch, or ``"epoch"``, when its batch was taken. Each line is written as soon as
the damage is known. A file that exists is continued; records that it names already are not written again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
from collections.abc import Iterable
from typing import Literal

from loaderd.errors import Damage, OptionError

MAX_FIRST = 1000

_logger = logging.getLogger("loaderd")

_Key = tuple[str, int, int]


class DamageReport:
    """``path``: the file, or None. Raises OptionError where it cannot be written."""

    def __init__(self, path: str | None = None) -> None:
        self.first: list[Damage] = []
        """The first ``MAX_FIRST`` damages that came, also those that the file named already."""
        self._path = path
        self._known: set[_Key] = set()
        self._written: set[_Key] = set()
        self._failed = False
        if path is None:
            return
        try:
            with open(path, "a+b") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError(errno.EINVAL, "it is no regular file")
                file.seek(0)
                self._written = {key for line in file if (key := _key_in(line)) is not None}
        except OSError as error:
            raise OptionError(
                f"report must be a file that can be written, got {path}: {error.strerror}",
                hint="Its folder must exist.",
            ) from None

    def add(self, when: Literal["index", "epoch"], damages: Iterable[Damage]) -> None:
        """Take in damage that was found. If the file cannot be written any more, warn, and leave it as it is."""
        lines = []
        for damage in damages:
            key = (damage.shard, damage.record, damage.offset)
            if len(self.first) < MAX_FIRST and key not in self._known:
                self._known.add(key)
                self.first.append(damage)
            if self._path is not None and key not in self._written:
                self._written.add(key)
                lines.append(json.dumps({**damage.to_wire(), "when": when}))
        if lines and self._path is not None and not self._failed:
            try:
                _append(self._path, "\n".join(lines) + "\n")
            except OSError as error:
                self._failed = True
                _logger.warning(
                    "cannot write to the damage report %s any more; later damage is not in it: %s",
                    self._path,
                    error.strerror,
                )


def _key_in(line: bytes) -> _Key | None:
    """Which record a line of a report names; None for one that was cut, or that somebody else wrote."""
    try:
        found = json.loads(line)
        key = found["shard"], found["record"], found["offset"]
    except (ValueError, TypeError, KeyError):
        return None
    return key if [type(part) for part in key] == [str, int, int] else None


def _append(path: str, text: str) -> None:
    with open(path, "a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            text = "\n" + text  # the last line was cut
        file.write(text.encode())

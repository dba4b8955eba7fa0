"""What ``on_corrupt`` leaves out: counted, named for the statistics, warned of, and listed in a file if asked for.

The file (``report=``) holds a JSON object a line: the fields of :class:`~loaderd.errors.Damage`, and ``when`` it was
found: ``"index"``, before it could be in a batch, or ``"epoch"``, when its batch was taken. Each line is written as
soon as the damage is known. A file that exists is continued; records that it names already are not written again.

Warnings come once of each kind: what the index pass left out, and each kind of error in an epoch. The daemon's
message that tells of them is read where nothing may be raised, but Python's filters may make an error of a warning.
So texts wait until :meth:`SkippedData.warn` is called, where a batch is given out.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import sys
import warnings
from collections.abc import Iterable
from typing import Literal

from loaderd.errors import Damage, LoaderdError, OptionError, SkippedDataWarning
from loaderd.options import OnCorrupt
from loaderd.redaction import readable

MAX_NAMED = 1000

_MORE = "loader.statistics() counts the records (records_skipped) and names them (damages)."

_logger = logging.getLogger("loaderd")

_Key = tuple[str, int, int]


class SkippedData:
    """See the module's docstring. ``report``: the file, or None. Raises OptionError where it cannot be written."""

    def __init__(self, report: str | None = None) -> None:
        self.num_records = 0
        """Records that were left out of batches."""
        self.damages: list[Damage] = []
        """The first ``MAX_NAMED`` damages that came, also those that the file named already."""
        self._named: set[_Key] = set()
        self._warned: set[str] = set()
        self._warnings: list[str] = []
        self._report = report
        self._reported = set() if report is None else _records_in(report)

    def add_damages(self, when: Literal["index", "epoch"], damages: Iterable[Damage]) -> None:
        """Name damage that was found. If the file cannot be written any more, warn, and leave it as it is."""
        lines = []
        for damage in damages:
            key = (damage.shard, damage.record, damage.offset)
            if len(self.damages) < MAX_NAMED and key not in self._named:
                self._named.add(key)
                self.damages.append(damage)
            if self._report is not None and key not in self._reported:
                self._reported.add(key)
                lines.append(json.dumps({**damage.to_wire(), "when": when}))
        if lines and self._report is not None:
            try:
                _append(self._report, "\n".join(lines) + "\n")
            except OSError as error:
                said = "cannot write to the damage report %s any more; later damage is not in it: %s"
                _logger.warning(said, self._report, error.strerror)
                self._report = None

    def add_to_batch(self, num_records: int, errors: Iterable[LoaderdError], on_corrupt: OnCorrupt) -> None:
        """``num_records`` were left out of the batch that is taken, because of ``errors``."""
        self.num_records += num_records
        records = "1 record is" if self.num_records == 1 else f"{self.num_records:,} records are"
        text = f'{records} left out of batches so far (on_corrupt="{on_corrupt}"). The first reason: '
        for error in errors:
            self.add_damages("epoch", error.damages)
            self.warn_later(type(error).__name__, f"{text}{error.message}. {_MORE}")

    def warn_later(self, kind: str, text: str) -> None:
        """Have :meth:`warn` say ``text``, once for each ``kind``."""
        if text and kind not in self._warned:
            self._warned.add(kind)
            self._warnings.append(readable(text))

    def warn(self) -> None:
        """Warn of what is new. Raises what the filters of ``warnings`` make of it."""
        while self._warnings:
            warn_user(self._warnings.pop(0), SkippedDataWarning)


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the line that uses loaderd or a binding of it. Raises what the filters of ``warnings`` make of that."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("loaderd"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _records_in(report: str) -> set[_Key]:
    """The records that a report names. Raises OptionError where it is no file that can be written."""
    try:
        with open(report, "a+b") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            file.seek(0)
            return {key for line in file if (key := _key_in(line)) is not None}
    except OSError as error:
        raise OptionError(
            f"report must be a file that can be written, got {report}: {error.strerror}",
            hint="Its folder must exist.",
        ) from None


def _key_in(line: bytes) -> _Key | None:
    """Which record a line of a report names; None for one that was cut, or that somebody else wrote."""
    try:
        values = json.loads(line)
        key = values["shard"], values["record"], values["offset"]
    except (ValueError, TypeError, KeyError):
        return None
    return key if [type(part) for part in key] == [str, int, int] else None


def _append(path: str, text: str) -> None:
    with open(path, "a+b") as file:
        if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            text = "\n" + text  # the last line was cut
        file.write(text.encode())

"""What a child writes to its standard output and error, for ``--log-format json``: then all output must be JSON.

Lines of the child's own log are JSON already and are passed on; all others, such as what a user's module prints,
become messages of the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 16

_logger = logging.getLogger("loaderd")


class Output:
    """A pipe. Children of the child inherit it, so it may stay open after the child's end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._begun = b""

    def fileno(self) -> int:
        return self._read_fd

    def close_write_end(self) -> None:
        """Call this when the child has inherited the write end."""
        os.close(self.write_fd)

    def take(self) -> bool:
        """Pass on what has come, without waiting; returns False at the end of the pipe."""
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return True
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > _MOST_LINE_BYTES:
            lines.append(self._begun)
            self._begun = b""
        for line in lines:
            self._pass_on(line)
        return bool(data)

    def close(self) -> None:
        """Pass on what is left, and close the pipe."""
        while select.select([self._read_fd], [], [], 0)[0] and self.take():
            pass
        if self._begun:
            self._pass_on(self._begun)
        os.close(self._read_fd)
        self._read_fd = -1

    @property
    def is_open(self) -> bool:
        return self._read_fd >= 0

    def _pass_on(self, line: bytes) -> None:
        if line.startswith(b'{"time": ') and line.endswith(b"}"):
            _write(line + b"\n")
        elif line.strip():
            _logger.info("%s printed: %s", self._name, line.decode(errors="replace"))


def _write(data: bytes) -> None:
    """Write to standard error, if possible; without Python's buffer, which would keep what cannot be written."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]

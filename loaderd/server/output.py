"""What a child writes to its standard output and error, where the log is to be JSON and nothing else.

Its log is lines of JSON, which go on as they are; all other lines, such as what a user's module prints or a library
complains of, become records of the log.
"""

from __future__ import annotations

import logging
import os
import select
import sys

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 16

_logger = logging.getLogger("loaderd")


class Output:
    """A pipe. Children of the child have it too, so it may end after the child."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._begun = b""

    def fileno(self) -> int:
        return self._read_fd

    def close_write_end(self) -> None:
        """To be called when the child has inherited it."""
        os.close(self.write_fd)

    def take(self) -> bool:
        """Pass on what has come, without waiting; returns whether more can come."""
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
        """Pass on the rest."""
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
            sys.stderr.buffer.write(line + b"\n")
            sys.stderr.buffer.flush()
        elif line.strip():
            _logger.info("%s printed: %s", self._name, line.decode(errors="replace"))

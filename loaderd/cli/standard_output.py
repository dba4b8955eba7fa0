"""Standard output that cannot be written: a reader who has gone, as with ``| head``; a full disk; none at all.

And standard error, whose loss changes no exit status.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

_CANNOT = 2
_READER_GONE = 128 + signal.SIGPIPE


class OutputError(BaseException):
    """Standard output cannot be written. No Exception, so that no command takes it for storage's or a server's."""

    def __init__(self, cause: OSError) -> None:
        self.reader_gone = isinstance(cause, BrokenPipeError)
        super().__init__(f"standard output cannot be written: {cause.strerror or cause}")


class _Output:
    """A stream whose errors are told apart from all others: they are OutputErrors.

    What its encoding lacks is escaped: a bar in ASCII, or the name of a file that is no valid Unicode.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        encoding = self._stream.encoding or "utf-8"
        try:
            return self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            raise OutputError(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputError(error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Errors(_Output):
    """Standard error. What cannot be written there is lost, and the exit status is what it would be."""

    def write(self, text: str) -> int:
        with suppress(OutputError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OutputError):
            super().flush()


def with_output(run: Callable[[], int]) -> int:
    """The exit status that ``run`` returns, once all that it printed is written.

    If that cannot be written, the status says so, and not what ``run`` found: nobody has read that. It is 141 if the
    reader has gone, as if SIGPIPE had ended the program; else 2, with the reason on standard error.
    """
    output, errors = _Output(_opened(sys.stdout)), _Errors(_opened(sys.stderr))
    with redirect_stderr(cast(TextIO, errors)):
        try:
            with redirect_stdout(cast(TextIO, output)):
                try:
                    return run()
                finally:
                    output.flush()
        except OutputError as error:
            return _end(error, output)


def _opened(stream: TextIO | None) -> TextIO:
    """None: it was closed when the program began."""
    return stream or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _end(error: OutputError, output: _Output) -> int:
    # What is left in its buffer goes nowhere, or Python would complain at its exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    if error.reader_gone:
        return _READER_GONE
    sys.stderr.write(f"{error}\n")
    return _CANNOT

"""Programs run as a user runs them: in a fresh process each, with what they print, and how they end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_KILL_LIMIT_S = 60.0
_PIPE_LIMIT_S = 30.0  # by then after the end of a program, its pipes must be closed, however busy the machine

QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "1",  # without what TensorFlow says of the machine; with its warnings and errors
    "TF_ENABLE_ONEDNN_OPTS": "0",  # or TensorFlow prints a remark on rounding
    "OPENBLAS_NUM_THREADS": "1",
}


@contextlib.contextmanager
def without_what_keras_imports() -> Iterator[None]:
    """Keras imports these where they are installed, for wrappers and plots: two of TensorFlow's seven seconds."""
    hidden = {name: None for name in ("sklearn", "matplotlib") if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type] # None is what the import system has for "not to be found"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@dataclass(frozen=True)
class Ended:
    """A program that is over."""

    status: int
    """Its exit status, or minus the number of the signal that ended it, as ``subprocess`` has it."""
    stdout: str
    stderr: str
    time_s: float
    """``time.monotonic()`` when it was found to have ended."""
    hung: bool
    """Whether it had to be killed, at the limit."""
    holds_pipes: bool
    """Whether something that it left still had its standard output or error open half a minute later."""


class Program:
    """A program that runs: the leader of a session, and of a process group."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
        stdin: bytes = b"",
    ) -> None:
        """``environment``: beside ours; ``stdin``: at most what a pipe holds."""
        source, sink = os.pipe()
        os.write(sink, stdin)
        os.close(sink)
        self._process = subprocess.Popen(
            command,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **QUIET, **environment},
            cwd=folder,
            start_new_session=True,
        )
        os.close(source)
        assert self._process.stdout is not None and self._process.stderr is not None
        self.pid = self._process.pid
        self._end = os.pidfd_open(self.pid)  # can be read when it is over
        self._readers = [_Reader(os.dup(pipe.fileno())) for pipe in (self._process.stdout, self._process.stderr)]
        self._process.stdout.close()
        self._process.stderr.close()

    def is_over(self, limit_s: float = 0.0) -> bool:
        """Whether it has ended, or does so within ``limit_s``."""
        return bool(select.select([self._end], [], [], limit_s)[0])

    def wait(self, limit_s: float, examine: Callable[[int], None] | None = None) -> Ended:
        """Until it is over. At the limit it is killed, after ``examine(pid)`` has had a look at it."""
        hung = not self.is_over(limit_s)
        if hung:
            if examine is not None:
                examine(self.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            assert self.is_over(_KILL_LIMIT_S), f"process {self.pid} cannot be killed"
        time_s = time.monotonic()
        os.close(self._end)
        status = self._process.wait()
        until_s = time.monotonic() + _PIPE_LIMIT_S
        for reader in self._readers:
            reader.join(max(0.0, until_s - time.monotonic()))
        stdout, stderr = (reader.text for reader in self._readers)
        return Ended(status, stdout, stderr, time_s, hung, any(reader.is_alive() for reader in self._readers))


class _Reader(threading.Thread):
    """Reads a pipe until nobody has its other end."""

    def __init__(self, pipe: int) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._read = bytearray()
        self.start()

    def run(self) -> None:
        with open(self._pipe, "rb", buffering=0) as file:
            while data := file.read(65536):
                self._read += data

    @property
    def text(self) -> str:
        """So far."""
        return bytes(self._read).decode(errors="replace")

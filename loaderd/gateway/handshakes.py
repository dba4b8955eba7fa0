"""Counts TLS handshakes that fail. gRPC only writes a line to standard error for each, however many a caller makes.

::

    gRPC, and what makers print ──► standard error, now a pipe ──┬── a failed handshake ──► counted, at times logged
                                                                 ├── the rest of gRPC's log ──► nowhere
    the log of this process ─────────────────────────────────────┴── other lines ──► where standard error went before
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable

from loaderd.gateway.tally import SOMEWHERE

Refused = Callable[[str, str], None]
"""(host, why)."""

_READ_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 16
_FAILED = re.compile(rb"Handshake failed with error .*:([^:]+)$")
# "I0000 00:00:1795396453.738688   26708 file.cc:2158] …". What is fatal (F) is passed on.
_OF_GRPC = re.compile(rb"[IWE]\d{4} \d\d:|WARNING: All log messages before absl")


def watch_handshakes(refused: Refused) -> None:
    """Have ``refused`` called, in another thread, for each handshake that fails from now on."""
    os.environ.pop("GRPC_VERBOSITY", None)  # at each level that it can name, gRPC omits these lines, or says too much
    before = os.dup(2)
    sys.stderr = os.fdopen(before, "w", buffering=1, errors="backslashreplace")
    read_fd, write_fd = os.pipe()
    os.dup2(write_fd, 2)
    os.close(write_fd)
    threading.Thread(target=_read, args=(read_fd, before, refused), name="handshakes", daemon=True).start()


def _read(read_fd: int, before: int, refused: Refused) -> None:
    begun = b""
    while data := os.read(read_fd, _READ_BYTES):
        *lines, begun = (begun + data).split(b"\n")
        if len(begun) > _MOST_LINE_BYTES:
            lines.append(begun)
            begun = b""
        for line in lines:
            if not _OF_GRPC.match(line):
                with contextlib.suppress(OSError):  # the disk is full: go on, or those who write to the pipe wait
                    os.write(before, line + b"\n")
            elif found := _FAILED.search(line):
                refused(SOMEWHERE, f"the TLS handshake failed: {found[1].decode(errors='replace').strip()}")

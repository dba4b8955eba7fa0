"""What comes out of the gateway's standard error, where TLS handshakes that fail are found."""

from __future__ import annotations

import os

from loaderd.gateway.handshakes import _read

FAILED = (
    b"E0000 00:00:1795396453.738688   26708 file.cc:2158] Handshake failed with error SSL_ERROR_SSL: x: http request"
)


def test_handshakes_are_counted_though_standard_error_cannot_be_written():
    """And the pipe is read on: where nobody reads it, all that write to it stand still."""
    said = []
    read_fd, write_fd = os.pipe()
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        os.write(write_fd, b"a print\n" + FAILED + b"\n")
        os.close(write_fd)
        _read(read_fd, full, lambda host, why: said.append((host, why)))
    finally:
        os.close(read_fd)
        os.close(full)
    assert said == [("somewhere", "the TLS handshake failed: http request")]

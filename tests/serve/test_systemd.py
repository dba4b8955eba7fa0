"""What systemd is told of a server: sd_notify(3)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.serving import Server

Start = Callable[..., Server]


@pytest.mark.slow
def test_systemd_is_told(start: Start, tmp_path: Path):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        server = start(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert systemd.recv(100) == b"READY=1"
        server.process.send_signal(signal.SIGHUP)
        assert [systemd.recv(100), systemd.recv(100)] == [b"RELOADING=1", b"READY=1"]
        server.process.send_signal(signal.SIGTERM)
        assert systemd.recv(100) == b"STOPPING=1"
        assert server.wait_end() == 0


@pytest.mark.slow
def test_systemd_does_not_wait_for_a_reload_that_cannot_begin(start: Start, tmp_path: Path):
    """The environment in which the server runs is being installed anew: for a moment there is no Python."""
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        path = os.pathsep.join(sys.path)
        server = start(through=[str(python)], NOTIFY_SOCKET=str(tmp_path / "notify"), PYTHONPATH=path)
        assert systemd.recv(100) == b"READY=1"
        python.unlink()
        server.process.send_signal(signal.SIGHUP)
        server.wait_line("reload failed, the server goes on as it was: cannot start a process")
        python.symlink_to(sys.executable)
        server.process.send_signal(signal.SIGHUP)
        assert [systemd.recv(100) for _ in range(3)] == [b"READY=1", b"RELOADING=1", b"READY=1"]

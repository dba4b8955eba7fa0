"""Telling systemd how the server is (sd_notify), where it wants to know: ``Type=notify``."""

from __future__ import annotations

import contextlib
import os
import socket


def keep_alive() -> None:
    """All is well, where systemd asks for that again and again: ``WatchdogSec=``."""
    if "WATCHDOG_USEC" in os.environ:
        notify("WATCHDOG=1")


def notify(state: str) -> None:
    """Send such a line as "READY=1" to $NOTIFY_SOCKET, if there is one."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), socket.MSG_DONTWAIT, address)  # a server does not wait for who looks after it

"""Messages to systemd about the state of the server (sd_notify), for units of ``Type=notify``."""

from __future__ import annotations

import contextlib
import os
import socket


def keep_alive() -> None:
    """Tell systemd that all is well, if it wants to hear that regularly (``WatchdogSec=``)."""
    if "WATCHDOG_USEC" in os.environ:
        notify("WATCHDOG=1")


def notify(state: str) -> None:
    """Send a line such as "READY=1" to $NOTIFY_SOCKET, if that is set."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        address = "\0" + path[1:] if path.startswith("@") else path
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), socket.MSG_DONTWAIT, address)  # a busy systemd must not stop a server

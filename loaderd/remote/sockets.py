"""The network sockets that gRPC has open in this process, of which Flight gives no hold.

They are found among the process's descriptors. What can be done with one that is somebody else's: set options that it
reads itself, look at its counters, and shut it down, which its owner takes for the other end's doing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from urllib.parse import unquote

# A peer that is dead or cut off answers none of these, and is given up after about 40 s.
_IDLE_S = 20
_PROBE_EVERY_S = 5
_PROBES = 4
_UNANSWERED_MS = 40_000

_NO_LINGER = struct.pack("ii", 1, 0)

# struct tcp_info of Linux: tcpi_bytes_acked and tcpi_bytes_received, after the fields of the first version.
_TCP_INFO_BYTES = struct.Struct("=QQ")
_TCP_INFO_OFFSET = 120


def open_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process; each is a copy for the caller, closed when the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed just now
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock


def notice_dead_peers(port: int) -> None:
    """Have connections to or from ``port``, those yet to come to a listening one included, end with their peers."""
    for sock in open_sockets():
        with contextlib.suppress(OSError):
            peer = peer_of(sock)
            if port in (sock.getsockname()[1], None if peer is None else peer[1]):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def bytes_of(sock: socket.socket) -> tuple[int, int]:
    """How many bytes the connection has sent, as far as they were acknowledged, and received."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    sent, received = _TCP_INFO_BYTES.unpack_from(info, _TCP_INFO_OFFSET)
    return sent, received


Peer = tuple[str, int]
"""Host and port of the other end of a connection."""


def peer_of(sock: socket.socket) -> Peer | None:
    """None: it has none, for it listens, or is gone."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return None
    return host.removeprefix("::ffff:"), int(port)


def parse_peer(text: str) -> Peer:
    """The peer of a call as gRPC writes it: "ipv4:127.0.0.1:40000", "ipv6:%5B::1%5D:40000"."""
    host, _, port = unquote(text).partition(":")[2].rpartition(":")
    return host.strip("[]"), int(port)


def cut(sock: socket.socket) -> None:
    """End the connection at once: what is on its way is lost. Raises OSError where it has ended."""
    # Otherwise, who is in the middle of sending would hear of it a minute later: nobody takes what he sends.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.shutdown(socket.SHUT_RDWR)


def cut_off(peer: Peer) -> None:
    """End the connection with ``peer``, and with it all calls that it carries."""
    for sock in open_sockets():
        if peer_of(sock) == peer:
            with contextlib.suppress(OSError):
                cut(sock)

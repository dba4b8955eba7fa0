"""Looks after the gateway's network connections, where gRPC does not: it takes messages of any size, for any time.

A thread looks at the counters of each connection ten times a second, and cuts those off that send more than a
consumer has to say:

- one that has not made a call with the token yet may send a handshake and a call, and take some seconds;
- one that has may send requests, and acknowledge what it gets.

gRPC keeps what has come of a message until it is complete, so this also bounds the memory that a connection takes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

from loaderd.remote.sockets import Peer, bytes_of, cut, open_sockets, peer_of

UNKNOWN_BYTES = 128 << 10
"""What may come from a connection before its first call with the token."""
UNKNOWN_S = 15.0
TRUSTED_BYTES = 2 << 20
"""What a consumer may send at once, and further ``TRUSTED_BYTES_PER_S``, and a half of what it gets."""
TRUSTED_BYTES_PER_S = 64 << 10

_LOOK_EVERY_S = 0.1

_logger = logging.getLogger("loaderd")


class Watch:
    """Of the connections that come to ``port``. Runs until the process ends."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._trusted: dict[Peer, float] = {}
        self._since_s: dict[Peer, float] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def trust(self, peer: Peer) -> None:
        """The peer has made a call with the token."""
        with self._lock:
            self._trusted[peer] = time.monotonic()

    def _run(self) -> None:
        while True:
            self._look(time.monotonic())
            time.sleep(_LOOK_EVERY_S)

    def _look(self, now_s: float) -> None:
        present: set[Peer] = set()
        ended: list[str] = []
        for sock in open_sockets():
            with contextlib.suppress(OSError):  # it ends just now
                peer = peer_of(sock)
                if peer is not None and sock.getsockname()[1] == self._port:
                    present.add(peer)
                    why = self._why_not(sock, peer, now_s)
                    if why:
                        ended.append(f"{peer[0]}:{peer[1]}, for {why}")
                        cut(sock)
        if ended:
            _logger.warning("%d connections are ended, the first one with %s", len(ended), ended[0])
        with self._lock:
            for peer, since_s in list(self._trusted.items()):
                if peer not in present and since_s < now_s:  # else it may have come after the look at it
                    del self._trusted[peer]
        for peer in self._since_s.keys() - present:
            del self._since_s[peer]

    def _why_not(self, sock: socket.socket, peer: Peer, now_s: float) -> str:
        age_s = now_s - self._since_s.setdefault(peer, now_s)
        sent, received = bytes_of(sock)
        with self._lock:
            trusted = peer in self._trusted
        if trusted:
            limit = TRUSTED_BYTES + round(age_s * TRUSTED_BYTES_PER_S) + sent // 2
            return f"it has sent {received:,} bytes, and a consumer sends less" if received > limit else ""
        if age_s > UNKNOWN_S:
            return f"in {UNKNOWN_S:g} s it made no call that was allowed"
        return f"it has sent {received:,} bytes, and no call that was allowed" if received > UNKNOWN_BYTES else ""

"""Sockets that are somebody else's in this process: found, watched and cut."""

from __future__ import annotations

import os
import socket

import pytest

from loaderd.remote.sockets import bytes_of, cut_off, notice_dead_peers, open_sockets, parse_peer, peer_of


@pytest.fixture(params=["127.0.0.1", "::1", "dual"])
def listener(request):
    dual = request.param == "dual"
    host = "::" if dual else request.param
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, dualstack_ipv6=dual)
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listener:
        yield listener


def connected(listener):
    host = "127.0.0.1" if listener.getsockname()[0] in ("::", "127.0.0.1") else "::1"
    ours = socket.create_connection((host, listener.getsockname()[1]), timeout=10)
    theirs, _ = listener.accept()
    return ours, theirs


def test_connections_to_come_notice_dead_peers(listener):
    notice_dead_peers(listener.getsockname()[1])
    ours, theirs = connected(listener)
    with ours, theirs:
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 40_000
        assert not ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_one_connection_is_found_counted_and_cut(listener):
    ours, theirs = connected(listener)
    others = connected(listener)
    with ours, theirs, others[0], others[1]:
        peer = peer_of(theirs)
        assert peer == ours.getsockname()[:2]
        assert peer in [peer_of(sock) for sock in open_sockets()]
        ours.sendall(bytes(1000))
        assert theirs.recv(1000, socket.MSG_WAITALL) == bytes(1000)
        theirs.sendall(b"y")  # and acknowledges what came
        assert ours.recv(1) == b"y"
        assert bytes_of(theirs)[1] == 1000
        assert bytes_of(ours) == (1001, 1)  # the first byte is the handshake's
        cut_off(peer)
        assert ours.recv(1) == b""
        others[0].sendall(b"x")
        assert others[1].recv(1) == b"x"


def test_how_grpc_writes_a_peer():
    assert parse_peer("ipv4:127.0.0.1:40000") == ("127.0.0.1", 40000)
    assert parse_peer("ipv6:%5B::1%5D:40000") == ("::1", 40000)
    assert parse_peer("ipv6:%5Bfe80::1%25eth0%5D:40000") == ("fe80::1%eth0", 40000)


def test_nothing_is_left_open():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        list(open_sockets())
    assert len(os.listdir("/proc/self/fd")) == before

"""How long a server is left alone that has not answered."""

from __future__ import annotations

import time

from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.servers import Servers
from loaderd.remote.source import Settings


def test_the_only_server_is_asked_again_at_once_after_a_long_attempt():
    """Where there are others, a server is set aside for some times the attempt that failed, here for 4 s or more."""
    lost_s = 2.0
    began_s = time.monotonic()
    asked: list[str] = []

    def call(calls: Calls, timeout_s: float) -> str:
        asked.append(calls.address)
        if len(asked) == 1:
            time.sleep(lost_s)
            raise OutOfReach("it stalls")
        return "an answer"

    servers = Servers(("grpc://127.0.0.1:9",), Settings(), lambda text: None)
    assert servers.ask(call, 60.0) == "an answer"
    assert len(asked) == 2 and time.monotonic() - began_s < 2 * lost_s

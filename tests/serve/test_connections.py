"""How many may be connected to a server at its Unix socket: consumers, and those who only ask something."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import BusyError
from tests.helpers.serving import MODULE, Server, wait_until

MOST = 2 + 32
"""Connections to a server with one consumer."""


@pytest.fixture
def server(tmp_path: Path, write_numbered: Callable[[Sequence[int]], list[Path]]) -> Iterator[Server]:
    write_numbered([300])
    (tmp_path / "sets.py").write_text(MODULE)
    started = Server(tmp_path, "sets:train", "--workers", "1", "--max-consumers", "1")
    started.wait_line("connect with")
    yield started
    started.close()


def test_who_asks_something_takes_no_room_of_consumers(server: Server):
    """A consumer on this machine, and two monitors."""
    here = f"unix://{server.path}"
    with server.connected(""), server.connected(""), loaderd.connect(here, "train", batch_size=10) as loader:
        assert sum(batch.num_records for batch in loader) == 300
        assert len(ask_status(here)["consumers"]) == 1


def test_too_many_connections_are_refused_for_the_moment(server: Server):
    def is_full() -> bool:
        with contextlib.ExitStack() as opened:
            for _ in range(MOST):
                opened.enter_context(server.connected(""))
            try:
                ask_status(f"unix://{server.path}")
            except BusyError as error:
                return "has as many connections as it may have" in str(error)
            return False  # the first were sent away meanwhile, as they say nothing

    wait_until(is_full)
    server.wait_line("is sent away: the server has as many connections as it may have")

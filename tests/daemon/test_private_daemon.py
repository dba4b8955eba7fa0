"""What a loader's own daemon says to its consumer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from loaderd.daemon.private_daemon import PrivateDaemon


def test_its_warnings_hold_no_secret():
    said: list[Any] = []
    daemon: Any = object.__new__(PrivateDaemon)
    daemon._event_loop = SimpleNamespace(post=lambda _, message: said.append(message))
    daemon._worker_manager = SimpleNamespace(pool=SimpleNamespace(restarts=0))
    daemon._sessions = {}
    daemon._warn("s3://me:secret@bucket/a is slow")
    (warned,) = said
    assert warned.text == "s3://***@bucket/a is slow"

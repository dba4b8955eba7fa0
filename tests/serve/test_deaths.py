"""Which tickets processes of the network server have died of."""

from __future__ import annotations

import time

import pytest

from loaderd.serve.deaths import Deaths


def test_a_ticket_that_was_worked_at_is_known_to_all_processes(monkeypatch: pytest.MonkeyPatch):
    records = Deaths()
    processes = [Deaths(records.fd, place) for place in range(3)]

    def known(ticket: bytes) -> list[int]:
        return [each.number_of(ticket) for each in processes]

    with processes[1].working_at(b"deadly"), processes[2].working_at(b"sound"):
        for is_death in (True, True, False):
            with processes[0].working_at(b"deadly"):
                records.record_end(0, is_death)
        records.record_end(1, True)
    assert (known(b"deadly"), known(b"sound")) == ([3] * 3, [0] * 3)
    records.record_end(0, True)  # it works at none any more
    assert known(b"deadly") == [3] * 3
    later_s = time.monotonic() + 301
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert known(b"deadly") == [0] * 3, "it is forgotten"

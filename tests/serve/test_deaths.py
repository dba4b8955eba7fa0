"""Which tickets processes of the network server have died of."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from loaderd.serve.deaths import Deaths


def check() -> None:
    """Somebody waits for the answer."""


def test_a_ticket_that_was_worked_at_is_known_to_all_processes(monkeypatch: pytest.MonkeyPatch):
    records = Deaths()
    processes = [Deaths(records.fd, place) for place in range(3)]

    def known(ticket: bytes) -> list[tuple[int, int]]:
        return [each.of(ticket) for each in processes]

    with processes[1].working_at(b"deadly", check), processes[2].working_at(b"sound", check):
        for is_death in (True, True, False):
            with processes[0].working_at(b"deadly", check):
                records.record_end(0, is_death)
        records.record_end(1, True)
    assert (known(b"deadly"), known(b"sound")) == ([(3, 3)] * 3, [(0, 0)] * 3)
    records.record_end(0, True)  # it works at none any more
    assert known(b"deadly") == [(3, 3)] * 3
    later_s = time.monotonic() + 301
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert known(b"deadly") == [(0, 0)] * 3, "it is forgotten"


def test_a_ticket_beside_another_is_suspected_and_then_made_alone():
    records = Deaths()
    with records.working_at(b"sound", check), records.working_at(b"deadly", check):
        records.record_end(0, True)
    assert records.of(b"sound") == records.of(b"deadly") == (1, 0)
    under_way: list[str] = []

    def work(name: str, alone: bool) -> None:
        with records.working_at(name.encode(), check, alone):
            under_way.append(name)
            assert not (alone or "alone" in under_way) or len(under_way) == 1
            time.sleep(0.01)
            under_way.remove(name)

    with ThreadPoolExecutor(8) as pool:
        works = [
            pool.submit(work, "alone" if number % 5 == 0 else str(number), number % 5 == 0) for number in range(40)
        ]
        for each in works:
            each.result()

"""Of the waits for copies to a device, what counts as copying."""

from __future__ import annotations

import time

from loaderd.client.elements import DeviceCopyTimer


class Counted:
    """What a loader is told."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []
        self._stream = self

    def count_device_wait(self, waited_ns: int, ahead: int) -> None:
        self.waits.append((waited_ns, ahead))


def test_a_wait_counts_as_far_as_a_copy_takes():
    counted = Counted()
    waits = DeviceCopyTimer(counted, 3)  # type: ignore[arg-type]
    for copy_ns, num_records in [(9000, 10), (5000, 10), (7000, 10), (800, 1)]:
        waits.took(copy_ns, num_records)
    for waited_ns, num_records in [(400, 10), (5000, 10), (90_000, 10), (90_000, 4), (90_000, 0)]:
        waits.waited(waited_ns, num_records)
    assert counted.waits == [(400, 3), (5000, 3), (5000, 3), (2000, 3), (0, 3)] and waits.copies_timed == 4


def test_who_waits_gets_what_was_waited_for():
    counted = Counted()
    waits = DeviceCopyTimer(counted, 0)  # type: ignore[arg-type]
    waits.took(10**12, 10)
    began_ns = time.monotonic_ns()
    assert waits.wait(10, lambda: time.sleep(0.02) or "copies") == "copies"
    ((waited_ns, _),) = counted.waits
    assert 20e6 <= waited_ns <= time.monotonic_ns() - began_ns

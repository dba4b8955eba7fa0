"""What the readers of the fuzz test see: ``readers.py``."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from tests.reliability.readers import Readers


def test_a_record_that_comes_twice_in_a_batch_is_repeated():
    readers = Readers(3)
    readers.over.set()
    readers.add("one", lambda: iter([np.array([0, 1, 1]), np.array([2])]))
    readers.threads[0].join()
    assert readers.wrong == ["one: 0 records lost, 1 repeated in epoch 0"]


def test_of_members_that_begin_at_once_one_tells_it():
    """Whoever has counted its batch looks at the count only when the other one has counted, too, if that can be."""
    counted: set[int] = set()
    both = threading.Event()

    class Batches(Counter):
        def __setitem__(self, name: str, count: int) -> None:
            super().__setitem__(name, count)
            counted.add(threading.get_ident())
            if count == 2:
                both.set()

        def __getitem__(self, name: str) -> int:
            if threading.get_ident() in counted:
                both.wait(0.2)
            return super().__getitem__(name)

    readers = Readers(2)
    readers.over.set()
    readers.batches = Batches()
    readers.add("two", *[lambda number=number: iter([np.array([number])]) for number in range(2)])
    for thread in readers.threads:
        thread.join()
    assert readers.batches["two"] == 2 and not readers.wrong
    assert readers.began.acquire(blocking=False)

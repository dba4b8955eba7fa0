"""What the readers of the fuzz test see: ``readers.py``."""

from __future__ import annotations

import numpy as np

from tests.reliability.readers import Readers


def test_a_record_that_comes_twice_in_a_batch_is_repeated():
    readers = Readers(3)
    readers.over.set()
    readers.add("one", lambda: iter([np.array([0, 1, 1]), np.array([2])]))
    readers.threads[0].join()
    assert readers.wrong == ["one: 0 records lost, 1 repeated in epoch 0"]

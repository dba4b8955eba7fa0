"""The floor: processes that merely write as many bytes as the batches have, and nothing else.

::

    slot      0 │ 1 │ 2 │ 3 │ … │ 31      each batch_size × (1536 + 10 + 1) float32, in shared memory
    writer    0   1   0   1   …   1

Nothing is read, decoded, handed over or waited for, so no loader on this machine that writes unpacked float32
can be faster. Thirty-two slots of 512 records are 100 MB, more than a cache holds. Carries no records: unchecked.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from interface import Config, Step

NUM_SLOTS = 32
FLOATS_PER_RECORD = 8 * 8 * 24 + 10 + 1


def _write_for_ever(slots: npt.NDArray[np.float32], notify: int) -> None:
    for value, slot in enumerate(itertools.cycle(slots)):
        slot.fill(value)
        os.write(notify, b"\0")


def steps(config: Config) -> Iterator[Step]:
    memory = mmap.mmap(-1, NUM_SLOTS * config.batch_size * FLOATS_PER_RECORD * 4)  # shared and anonymous
    slots = np.frombuffer(memory, np.float32).reshape(NUM_SLOTS, -1)
    written, notify = os.pipe()
    fork = multiprocessing.get_context("fork")  # the memory is inherited; there are no threads here
    writers = [
        fork.Process(target=_write_for_ever, args=(slots[first :: config.workers], notify), daemon=True)
        for first in range(config.workers)
    ]
    try:
        for writer in writers:
            writer.start()
        while True:
            yield Step(len(os.read(written, 4096)) * config.batch_size, None)
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
        os.close(written)
        os.close(notify)

"""The floor: processes that merely write as many bytes as the batches have, and nothing else.

::

    slot      0 │ 1 │ 2 │ 3 │ … │ n - 1      each the bytes of a batch, in shared memory
    writer    0   1   0   1   …   1

Nothing is read, decoded, handed over or waited for, so no loader that writes as much memory can be faster on this
machine. All slots together are 100 MB, more than most caches hold: 32 slots of 512 chess records in float32. A
loader whose slots stay in the cache can be faster than this. The batches hold no records, so they are not checked.
"""

from __future__ import annotations

import itertools
import mmap
import multiprocessing
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from harness.interface import Config, Step

SLOTS_BYTES = 100 << 20


def _write_for_ever(slots: npt.NDArray[np.uint8], notify: int) -> None:
    for value, slot in enumerate(itertools.cycle(slots)):
        slot.fill(value % 256)
        os.write(notify, b"\0")


def steps(config: Config) -> Iterator[Step]:
    batch_bytes = config.batch_size * config.delivered().record_bytes
    num_slots = max(2, SLOTS_BYTES // batch_bytes // config.workers) * config.workers
    memory = mmap.mmap(-1, num_slots * batch_bytes)  # shared and anonymous
    slots = np.frombuffer(memory, np.uint8).reshape(num_slots, -1)
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

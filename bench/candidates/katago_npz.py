"""KataGo's files, as ``python/katago/train/data_processing_pytorch.py`` of lightvector/KataGo reads them.

::

    a thread: whole file ──np.load──► arrays ──unpackbits, astype──► float32 ──► the next file's, while
    the consumer takes slices of this one's: a batch each

Rows come in the file's order (KataGo shuffles them into files beforehand), files in a random one; rows at the end of
a file that fill no batch are left out. Written anew after its steps, and kinder: no batch is turned by a symmetry,
none has its history masked, and none is copied to PyTorch's tensors.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from harness.interface import Config, Step

NOTE = "rows are not shuffled"

KATAGO = "loaderd.schemas:katago"
SIZE, NUM_PLANES, NUM_TARGETS, WEIGHT = 19, 22, 80, 25
FILES_AHEAD = 1

Arrays = dict[str, npt.NDArray[Any]]


def cannot(config: Config) -> str | None:
    return None if config.schema == KATAGO and not config.packed else f"it is written for the fields of {KATAGO}"


def _load(path: str, batch_size: int) -> Arrays:
    """All of a file's batches, unpacked."""
    with np.load(path) as npz:
        used = len(npz["globalInputNC"]) // batch_size * batch_size
        packed = npz["binaryInputNCHWPacked"][:used]
        policy = npz["policyTargetsNCMove"][:used].astype(np.float32)
        facts, targets = npz["globalInputNC"][:used], npz["globalTargetsNC"][:used]
        scores = npz["scoreDistrN"][:used].astype(np.float32)
        value_targets = npz["valueTargetsNCHW"][:used].astype(np.float32)
    targets = np.pad(targets, ((0, 0), (0, NUM_TARGETS - targets.shape[1])))  # files before version 3 have fewer
    bits = np.unpackbits(packed, axis=2)[:, :, : SIZE * SIZE]
    return {
        "planes": bits.reshape(used, NUM_PLANES, SIZE, SIZE).astype(np.float32),
        "global": facts,
        "policy": policy[:, 0],
        "next_policy": policy[:, 1],
        "targets": targets,
        "weight": targets[:, WEIGHT],
        "scores": scores,
        "value_targets": value_targets,
    }


def _paths(config: Config) -> Iterator[str]:
    paths = list(config.shards)
    for _ in itertools.count() if config.epochs is None else range(config.epochs):
        random.shuffle(paths)
        yield from paths


def steps(config: Config) -> Iterator[Step]:
    paths = _paths(config)
    with ThreadPoolExecutor(FILES_AHEAD) as pool:

        def begin(count: int) -> Iterator[Future[Arrays]]:
            return (pool.submit(_load, path, config.batch_size) for path in itertools.islice(paths, count))

        pending, without = deque(begin(1 + FILES_AHEAD)), 0
        while pending:
            arrays = pending.popleft().result()
            pending.extend(begin(1))
            without = 0 if len(arrays["weight"]) else without + 1
            if without == 2 * len(config.shards):  # files in a row: a whole epoch is among them
                raise ValueError(f"no file has {config.batch_size} rows, a batch")
            for first in range(0, len(arrays["weight"]), config.batch_size):
                stop = first + config.batch_size
                yield Step(config.batch_size, {name: values[first:stop] for name, values in arrays.items()})
            del arrays

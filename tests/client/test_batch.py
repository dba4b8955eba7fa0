"""A batch as a mapping, and on its way to other code."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest

import loaderd
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import Restarted


def test_what_rebuilds_mappings_gets_a_batch(numbered: Numbered):
    """By the constructor of the mapping's type, of a mapping or of pairs, as frameworks do."""
    with numbered.loader([30], batch_size=20) as loader:
        batch = next(iter(loader))
        for made in (OrderedDict, dict, list):
            rebuilt = type(batch)(made([(name, array[:5]) for name, array in batch.items()]))
            assert list(rebuilt) == list(batch) == ["bits", "id"] and rebuilt.num_records == 5
            assert np.array_equal(rebuilt["id"], batch["id"][:5])
        lists = type(batch)({name: array.tolist() for name, array in batch.items()})
        assert repr(type(batch)({"id": 3.5})) == "Batch(id: 3.5)" and len(repr(lists)) < 250
    with pytest.raises(KeyError, match="no field 'absent'; there are bits, id"):
        rebuilt["absent"]


def test_a_pickled_batch_is_its_arrays_alone(numbered: Numbered):
    """Not the memory of all slots. The copy outlives the loader, and is no longer in the slot."""
    with numbered.loader([300], batch_size=100) as loader:
        batch = next(iter(loader))
        size = sum(array.nbytes for array in batch.values())
        data = pickle.dumps(batch)
        assert size < len(data) < size + 1000
        numbers = batch["id"].tolist()
        deep = copy.deepcopy(batch)
        del batch
        assert loader.statistics().slots_lent == 0
    for copied in (pickle.loads(data), deep):
        assert type(copied) is loaderd.Batch and copied["id"].tolist() == numbers and copied.num_records == 100


def test_a_block_is_the_memory_of_the_fields_if_that_is_ours_alone(server: Restarted, numbered: Numbered):
    shards = numbered.write([300], "others")
    with numbered.loader(shards, batch_size=99) as ours, server.connect(sharing="mirrored") as shared:
        for loader, is_ours in ((ours, True), (shared, False)):
            batch = next(iter(loader))
            for names in (["bits", "id"], ["id"], ["id", "bits"]):
                ((block, offsets),) = batch._blocks(names)
                assert block.flags.writeable and min(offsets.values()) == 0
                assert np.shares_memory(block, batch["id"]) == is_ours
                for name in names:
                    values = block[offsets[name] :][: batch[name].nbytes]
                    assert values.tobytes() == batch[name].tobytes() and offsets[name] % 64 == 0
            ((copied, offsets),) = batch.copy()._blocks(["bits", "id"])
            assert copied.ctypes.data % 64 == 0 and not np.shares_memory(copied, batch["id"])
            assert copied[offsets["id"] :][: batch["id"].nbytes].tobytes() == batch["id"].tobytes()


def test_large_fields_that_nobody_wants_are_in_no_block():
    arrays = {"bit": np.ones((9, 8), np.uint8), "id": np.arange(9), "big": np.zeros((9, 20_000)), "z": np.ones(9)}
    copied = loaderd.Batch(arrays).copy()
    near, far = copied._blocks(["z", "id", "bit"])
    assert list(near.offsets) == ["bit", "id"] and list(far.offsets) == ["z"]
    for block in (near, far):
        assert len(block.bytes) < 300 and np.shares_memory(block.bytes, copied[min(block.offsets)])
        for name, offset in block.offsets.items():
            assert block.bytes[offset:][: arrays[name].nbytes].tobytes() == arrays[name].tobytes()
    (whole,) = loaderd.Batch(arrays)._blocks(["z", "id", "bit"])  # which knows no memory, and copies
    assert len(whole.bytes) < 500 and set(whole.offsets) == {"z", "id", "bit"}

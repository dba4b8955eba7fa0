"""A batch as a mapping, and on its way to other code."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import loaderd

Write = Callable[[Sequence[int]], list[Path]]


def test_what_rebuilds_mappings_gets_a_batch(write_numbered: Write, numbered_schema: loaderd.Schema):
    """By the constructor of the mapping's type, of a mapping or of pairs, as frameworks do."""
    with loaderd.Loader(write_numbered([30]), numbered_schema, batch_size=20, workers=1) as loader:
        batch = next(iter(loader))
        for made in (OrderedDict, dict, list):
            rebuilt = type(batch)(made([(name, array[:5]) for name, array in batch.items()]))
            assert list(rebuilt) == list(batch) == ["bits", "id"] and rebuilt.num_records == 5
            assert np.array_equal(rebuilt["id"], batch["id"][:5])
        lists = type(batch)({name: array.tolist() for name, array in batch.items()})
        assert repr(type(batch)({"id": 3.5})) == "Batch(id: 3.5)" and len(repr(lists)) < 250
    with pytest.raises(KeyError, match="no field 'absent'; there are bits, id"):
        rebuilt["absent"]


def test_a_pickled_batch_is_its_arrays_alone(write_numbered: Write, numbered_schema: loaderd.Schema):
    """Not the memory of all slots. The copy outlives the loader, and is no longer in the slot."""
    with loaderd.Loader(write_numbered([300]), numbered_schema, batch_size=100, workers=1) as loader:
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

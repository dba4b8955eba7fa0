"""Slots and windows: aligned, apart from each other, shared by descriptor."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderd.memory.layout import SlotLayout, WindowLayout
from loaderd.memory.shared import SharedMemory
from loaderd.schema import FieldSpec

specs_of = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        FieldSpec,
        st.lists(st.integers(1, 5), max_size=3).map(tuple),
        st.sampled_from(["float32", "int8", "float64", "bool"]).map(np.dtype),
    ),
    min_size=1,
)


@given(specs=specs_of, batch_size=st.integers(1, 40), slots=st.integers(1, 3))
def test_fields_of_slots_are_aligned_and_apart(specs: Mapping[str, FieldSpec], batch_size: int, slots: int):
    layout = SlotLayout(specs, batch_size)
    memory = np.zeros(slots * layout.slot_bytes + 64, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: slots * layout.slot_bytes]
    views = [layout.views(memory, slot) for slot in range(slots)]
    for slot in views:
        for name, view in slot.items():
            assert view.shape == (batch_size, *specs[name].shape) and view.dtype == specs[name].dtype
            assert view.ctypes.data % 64 == 0
            bytes_of = view.reshape(-1).view(np.uint8)
            assert not bytes_of.any(), "no two fields overlap"
            bytes_of[:] = 1


@given(row_bytes=st.integers(1, 60).map(lambda n: 8 * n), rows=st.integers(1, 300), arenas=st.integers(1, 3))
def test_arenas_are_apart(row_bytes: int, rows: int, arenas: int):
    layout = WindowLayout(row_bytes, rows)
    memory = np.zeros(arenas * layout.arena_bytes, dtype=np.uint8)
    for arena in range(arenas):
        places, window = layout.places(memory, arena), layout.rows(memory, arena)
        assert places.shape == (rows,) and window.shape == (rows, row_bytes)
        assert not places.any() and not window.any()
        places[:], window[:] = 1, 1


def test_memory_is_shared_by_descriptor_and_outlives_it():
    memory = SharedMemory.create("test", 10_000)
    other = SharedMemory(os.dup(memory.fd))
    memory.bytes[5000] = 42
    assert other.bytes[5000] == 42 and len(other.bytes) == 10_000
    view = other.bytes[5000:]
    memory.close_fd()
    memory.close_fd()
    other.close_fd()
    del memory, other
    assert view[0] == 42

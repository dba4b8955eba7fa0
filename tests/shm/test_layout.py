"""Slots and windows: aligned, apart from each other, and as large as they need be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.schema import FieldSpec, resolve_dtype
from loaderd.schemas import chess_eval
from loaderd.shm.layout import SlotLayout, WindowLayout

specs_of = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        FieldSpec,
        st.lists(st.integers(1, 5), max_size=3).map(tuple),
        st.sampled_from(["float32", "int8", "float64", "bool"]).map(np.dtype),
    ),
    min_size=1,
)


@given(specs=specs_of, batch_size=st.integers(1, 40), slots=st.integers(1, 3), several_readers=st.booleans())
def test_fields_of_slots_are_aligned_and_apart(
    specs: Mapping[str, FieldSpec], batch_size: int, slots: int, several_readers: bool
):
    layout = SlotLayout(specs, batch_size, several_readers)
    memory = np.zeros(slots * layout.slot_bytes + 64, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: slots * layout.slot_bytes]
    views = [layout.views(memory, slot) for slot in range(slots)]
    for slot in views:
        for name, view in slot.items():
            assert view.shape == (batch_size, *specs[name].shape) and view.dtype == specs[name].dtype
            assert view.ctypes.data % 64 == (32 if several_readers else 0)
            bytes_of = view.reshape(-1).view(np.uint8)
            assert not bytes_of.any(), "no two fields overlap"
            bytes_of[:] = 1


@given(row_bytes=st.integers(1, 60).map(lambda n: 8 * n), rows=st.integers(1, 300), arenas=st.integers(1, 3))
def test_arenas_are_apart(row_bytes: int, rows: int, arenas: int):
    layout = WindowLayout(row_bytes, rows)
    memory = np.zeros(arenas * layout.arena_bytes, dtype=np.uint8)
    for arena in range(arenas):
        window = layout.rows(memory, arena)
        assert window.shape == (rows, row_bytes)
        assert not window.any()
        window[:] = 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64"])
def test_values_keep_their_dtype(dtype: str):
    specs = {"x": FieldSpec((), resolve_dtype("int8")), "y": FieldSpec((3,), resolve_dtype(dtype))}
    layout = SlotLayout(specs, 5)
    memory = np.zeros(2 * layout.slot_bytes, dtype=np.uint8)
    view = layout.views(memory, 1)["y"]
    view[2] = 1
    assert view.dtype == resolve_dtype(dtype) and view.shape == (5, 3)
    start = layout.slot_bytes + layout.offsets["y"] + 2 * 3 * view.itemsize
    written = np.flatnonzero(memory)
    assert len(written) and start <= written.min() <= written.max() < start + 3 * view.itemsize


def test_what_a_chess_batch_takes():
    layout = SlotLayout(chess_eval().specs, 512)
    assert layout.offsets == {"board": 0, "flags": 512 * 1536 * 4, "score": 512 * (1536 + 10) * 4}
    assert layout.slot_bytes == 512 * (1536 + 10 + 1) * 4 + 2048, "up to a whole page"
    window = WindowLayout(chess_eval().row_bytes, 262_144)
    assert window.arena_bytes == 262_144 * 208


def test_sizes_are_whole_pages():
    for rows in (0, 1, 1023, 1024, 1025):
        layout = WindowLayout(8, rows)
        assert layout.arena_bytes % 4096 == 0
        assert layout.arena_bytes >= rows * 8
        assert layout.rows(np.zeros(layout.arena_bytes, dtype=np.uint8), 0).shape == (rows, 8)

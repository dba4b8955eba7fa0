"""Slots and windows: aligned, apart from each other, and as large as they need be."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
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
        st.sampled_from(["float32", "int8", "float64", "bool", "bfloat16"]).map(resolve_dtype),
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


@given(row_bytes=st.integers(1, 60).map(lambda n: 8 * n), rows=st.integers(0, 1100), arenas=st.integers(1, 3))
def test_arenas_are_apart(row_bytes: int, rows: int, arenas: int):
    layout = WindowLayout(row_bytes, rows)
    assert layout.arena_bytes % 4096 == 0
    memory = np.zeros(arenas * layout.arena_bytes, dtype=np.uint8)
    for arena in range(arenas):
        window = layout.rows(memory, arena)
        assert window.shape == (rows, row_bytes)
        assert not window.any()
        window[:] = 1


def test_what_a_chess_batch_takes():
    layout = SlotLayout(chess_eval().specs, 512)
    assert layout.offsets == {"board": 0, "flags": 512 * 1536 * 4, "score": 512 * (1536 + 10) * 4}
    assert layout.slot_bytes == 512 * (1536 + 10 + 1) * 4 + 2048, "up to a whole page"
    window = WindowLayout(chess_eval().row_bytes, 262_144)
    assert window.arena_bytes == 262_144 * 208

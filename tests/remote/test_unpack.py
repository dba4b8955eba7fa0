"""Received batches become what a loader's workers would have made of the same records."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderd
from loaderd.decode.fields import BatchDecoder
from loaderd.errors import ServerError
from loaderd.memory.layout import SlotLayout
from loaderd.remote.arrow import arrow_schema, record_batch, stored_specs
from loaderd.remote.unpack import SlotFiller
from loaderd.schema.packed import packed_schema, unpacking_schema

BATCH_SIZE = 40
SCHEMAS = {
    "chess": loaderd.schemas.chess_eval(),
    "chess in bfloat16": loaderd.schemas.chess_eval(dtype="bfloat16"),
    "mnist": loaderd.schemas.mnist(),
    "big-endian": loaderd.Schema(
        {"x": loaderd.Raw(">i2", (3,)), "b": loaderd.PackedBits(13)},
        {"x": loaderd.Array("x", dtype="float64", scale=0.5), "b": loaderd.Bits("b", shape=(13,), dtype="bool")},
    ),
}


@given(
    st.sampled_from(list(SCHEMAS)), st.booleans(), st.integers(0, BATCH_SIZE), st.integers(0, 2), st.integers(0, 99)
)
def test_slots_hold_what_workers_would_have_made(name, packed, num_records, slot, seed):
    schema = SCHEMAS[name]
    rows = np.frombuffer(np.random.default_rng(seed).bytes(num_records * schema.row_bytes), np.uint8)
    rows = rows.reshape(num_records, schema.row_bytes)

    def decoded(by):
        out = {name: np.zeros((num_records, *spec.shape), spec.dtype) for name, spec in by.specs.items()}
        BatchDecoder(by).decode(rows, out)
        return out

    unpacking = unpacking_schema(schema)
    sent = decoded(packed_schema(schema) if packed else schema)
    specs = stored_specs(unpacking) if packed else unpacking.specs
    layout = SlotLayout(unpacking.specs, BATCH_SIZE)
    memory = np.full(3 * layout.slot_bytes, 7, np.uint8)
    SlotFiller(unpacking, packed, memory, layout).fill(slot, record_batch(arrow_schema(specs), sent, num_records))
    found = layout.views(memory, slot)
    for field, expected in decoded(schema).items():
        assert found[field][:num_records].tobytes() == expected.tobytes()
    others = np.delete(memory.reshape(3, -1), slot, axis=0)
    assert (others == 7).all()


def test_more_records_than_were_asked_for_are_refused():
    unpacking = unpacking_schema(SCHEMAS["mnist"])
    layout = SlotLayout(unpacking.specs, 2)
    filler = SlotFiller(unpacking, False, np.zeros(layout.slot_bytes, np.uint8), layout)
    arrays = {name: np.zeros((3, *spec.shape), spec.dtype) for name, spec in unpacking.specs.items()}
    with pytest.raises(ServerError, match="at most 2 records, got 3"):
        filler.fill(0, record_batch(arrow_schema(unpacking.specs), arrays, 3))

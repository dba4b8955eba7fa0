"""Fields of any shape and dtype become Arrow columns, without a copy, and anybody can read them by the metadata."""

from __future__ import annotations

import gc
import json
import math
import weakref

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

import loaderd
from loaderd.gateway.arrow import arrow_schema, record_batch, stored_specs
from loaderd.schema import FieldSpec
from loaderd.schema.features import resolve_dtype

DTYPES = ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", "bfloat16", "complex128", "S5", "M8[s]"]

field_specs = st.builds(
    FieldSpec, st.lists(st.integers(1, 4), max_size=3).map(tuple), st.sampled_from(DTYPES).map(resolve_dtype)
)
specs_of_batches = st.dictionaries(st.text(min_size=1, max_size=8), field_specs, min_size=1, max_size=4)


def random_arrays(specs, num_records, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: np.frombuffer(rng.bytes(num_records * spec.record_bytes), np.uint8)
        .view(spec.dtype)
        .reshape(num_records, *spec.shape)
        for name, spec in specs.items()
    }


def arrays_of(batch):
    """The fields of a batch, by what Arrow and the metadata say of them alone."""
    found = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        shape, dtype = json.loads(field.metadata[b"shape"]), resolve_dtype(field.metadata[b"dtype"].decode())
        values = column.flatten() if shape else column  # of a slice, what it shows
        data = values.buffers()[1]
        size = dtype.itemsize
        flat = np.frombuffer(data, np.uint8, len(values) * size, values.offset * size) if data else np.empty(0, "u1")
        found[field.name] = flat.view(dtype).reshape(len(column), *shape)
    return found


def through_ipc(batch, compression):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


@given(specs_of_batches, st.integers(0, 9), st.sampled_from([None, "lz4", "zstd"]), st.data())
def test_what_goes_in_comes_out(specs, num_records, compression, data):
    arrays = random_arrays(specs, num_records)
    batch = record_batch(arrow_schema(specs), arrays, num_records)
    batch.validate(full=True)
    first = data.draw(st.integers(0, num_records))
    for received, start in [(batch, 0), (through_ipc(batch, compression), 0), (batch.slice(first), first)]:
        found = arrays_of(received)
        assert list(found) == list(specs)
        for name, spec in specs.items():
            assert found[name].dtype == spec.dtype and found[name].shape == (num_records - start, *spec.shape)
            assert found[name].tobytes() == arrays[name][start:].tobytes()


@given(specs_of_batches)
def test_the_metadata_say_what_the_field_is(specs):
    for field, spec in zip(arrow_schema(specs), specs.values(), strict=True):
        shape = json.loads(field.metadata[b"shape"])
        assert tuple(shape) == spec.shape and not field.nullable
        assert resolve_dtype(field.metadata[b"dtype"].decode()) == spec.dtype
        if spec.shape:
            assert field.type.list_size == math.prod(spec.shape)


def test_a_batch_is_a_view_and_keeps_its_arrays_alive():
    specs = {"board": FieldSpec((8, 8, 24), np.dtype("float32"))}
    arrays = {"board": np.ones((3, 8, 8, 24), np.float32)}
    address = arrays["board"].__array_interface__["data"][0]
    gone: list[bool] = []
    weakref.finalize(arrays["board"], gone.append, True)
    batch = record_batch(arrow_schema(specs), arrays, 3)
    found = arrays_of(batch)["board"]
    assert found.__array_interface__["data"][0] == address
    del arrays, batch
    gc.collect()
    assert not gone
    del found
    assert gone


def test_a_foreign_reader_gets_plain_numbers():
    specs = {"board": FieldSpec((2, 3), np.dtype("float32")), "score": FieldSpec((), np.dtype("int64"))}
    arrays = {"board": np.arange(12, dtype="f4").reshape(2, 2, 3), "score": np.array([5, -1])}
    table = record_batch(arrow_schema(specs), arrays, 2).to_pydict()
    assert table == {"board": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], "score": [5, -1]}


def test_the_fields_of_a_packed_batch():
    unpacking = loaderd.Schema(
        {"d": loaderd.PackedBits(20), "score": loaderd.Raw("float32"), "x": loaderd.Raw("int16", (2,))},
        {"bits": loaderd.Bits("d", shape=(20,)), "score": loaderd.Array("score"), "x": loaderd.Array("x")},
    )
    assert stored_specs(unpacking) == {
        "d": FieldSpec((3,), np.dtype("uint8")),
        "score": FieldSpec((), np.dtype("float32")),
        "x": FieldSpec((2,), np.dtype("int16")),
    }

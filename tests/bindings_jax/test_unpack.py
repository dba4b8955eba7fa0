"""``unpack="device"`` in JAX makes what the workers make, bit for bit, on the default device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import loaderd
from loaderd.schema import Schema, packed_schema
from tests.schema.any_schema import schemas
from tests.schema.test_device_program import decoded

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-torch")
unpack = pytest.importorskip("loaderd_jax.unpack")


def check(schema: Schema) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (9, schema.row_bytes), np.uint8)
    expected = decoded(schema, rows)
    packed = decoded(packed_schema(schema, for_device=True), rows)
    names = [name for name, spec in schema.specs.items() if spec.dtype.isnative]
    if not names:
        return
    unpacker = unpack.Unpacker(schema.device_program(), names)
    with jax.enable_x64(True):
        found = unpacker({name: jax.device_put(packed[name]) for name in unpacker.inputs})
    for name in names:
        assert (found[name].shape, found[name].dtype) == (expected[name].shape, expected[name].dtype), name
        assert np.asarray(found[name]).tobytes() == expected[name].tobytes(), name


@settings(max_examples=100, deadline=None)
@given(schemas())
def test_any_schema(schema: Schema):
    check(schema)


@pytest.mark.parametrize("make", [loaderd.schemas.chess_eval, loaderd.schemas.lc0, loaderd.schemas.katago])
def test_ready_made_schemas(make: Any):
    check(make())

"""Files as Ceres writes them, against a plain decoding of what CeresTrain's data set does with them."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import SchemaError, WorkerError
from loaderd.schema import packed_schema
from loaderd.schemas.ceres import RECORD
from tests.helpers.decoding import decoded, rows_of_records
from tests.helpers.device_program import run


def records(count: int) -> bytes:
    """Of each, the index in the parent is its number; moves have indices of their own, as far as there are any."""
    rng, stored = np.random.default_rng(count), bytearray()
    for number in range(count):
        moves = rng.permutation(1858)[: rng.integers(1, 93)].tolist()
        values = rng.random(len(moves)).astype("<f2").tolist()
        moves, values = moves + moves[-1:] * (92 - len(moves)), values + values[-1:] * (92 - len(values))
        chances = rng.dirichlet(np.ones(3), 3).reshape(-1)
        stored += struct.pack("<10f56x3f2eh", *chances, *rng.standard_normal(4), *rng.random(2), number)
        stored += struct.pack("<92h", *moves)
        stored += np.array(values, "<f2").tobytes() + rng.integers(-128, 128, 64 * 137).astype("i1").tobytes()
    return bytes(stored)


def plainly(record: bytes) -> dict[str, Any]:
    """The fields of a record, each as bytes."""
    policies = np.zeros(1858, np.float16)
    indices, values = struct.unpack_from("<92h", record, 114), struct.unpack_from("<92e", record, 298)
    for index, value in zip(indices, values, strict=True):
        policies[index] = value
    squares = np.array([number / 100 for number in struct.unpack_from("<8768b", record, 482)], np.float32)
    (mlh,) = np.frombuffer(record[100:104], "<f4")
    return {
        "squares": squares.tobytes(),
        "policies": policies.tobytes(),
        "wdl_nondeblundered": record[:12],
        "wdl_deblundered": record[12:24],
        "wdl_q": record[24:36],
        "q_deviation_lower": struct.pack("<f", *struct.unpack_from("<e", record, 108)),
        "q_deviation_upper": struct.pack("<f", *struct.unpack_from("<e", record, 110)),
        "played_q_suboptimality": record[36:40],
        "mlh": (np.square(mlh / np.float32(0.1)) / np.float32(100)).tobytes(),
        "unc": struct.pack("<f", abs(*struct.unpack_from("<f", record, 104))),
        "uncertainty_policy": struct.pack("<f", abs(*struct.unpack_from("<f", record, 96))),
        "policy_index_in_parent": record[112:114],
    }


@pytest.mark.parametrize("for_device", [False, True])
def test_records_as_ceres_writes_them(for_device: bool):
    assert RECORD.itemsize == 9250
    schema, stored = loaderd.schemas.ceres_tpg(), records(150)
    fields = decoded(packed_schema(schema, True) if for_device else schema, rows_of_records(schema, stored))
    fields |= run(schema.device_program(), fields) if for_device else {}
    for number in range(150):
        found = {name: fields[name][number].tobytes() for name in schema.fields}
        assert found == plainly(stored[number * 9250 : (number + 1) * 9250])


def test_integers_hold_no_hundredths():
    with pytest.raises(SchemaError, match="ceres_tpg: dtype must hold fractions, got int8"):
        loaderd.schemas.ceres_tpg("int8")


@pytest.mark.parametrize("index", [1858, -1])
def test_an_index_that_is_no_move_is_named(index: int):
    stored, schema = bytearray(records(1)), loaderd.schemas.ceres_tpg()
    stored[114:116] = struct.pack("<h", index)
    for made in (schema, packed_schema(schema, for_device=True)):
        with pytest.raises(WorkerError, match=f"found {index % 65_536}"):
            decoded(made, rows_of_records(schema, bytes(stored)))

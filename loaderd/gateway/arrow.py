"""Batches as Arrow record batches, without a copy.

========================  ==========================================================  =============================
a field of shape and      is a column                                                 whose metadata say
========================  ==========================================================  =============================
(), float32               float                                                       shape "[]", dtype "float32"
(8, 8, 24), float32       fixed_size_list of 1536 float                               shape "[8, 8, 24]", "float32"
(10,), bool               fixed_size_list of 10 uint8, each 0 or 1                    shape "[10]", "bool"
(4,), bfloat16            fixed_size_list of 4 uint16, the bits of each value         shape "[4]", "bfloat16"
(), complex128            fixed_size_binary of 16 bytes                               shape "[]", "complex128"
========================  ==========================================================  =============================

Nothing is ever null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from loaderd.schema import FieldSpec, Schema

AnyArray = npt.NDArray[Any]
Specs = Mapping[str, FieldSpec]

_NATIVE = frozenset(
    np.dtype(name) for name in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "float16", "float32", "float64")
)


def stored_specs(unpacking: Schema) -> dict[str, FieldSpec]:
    """The fields of a packed batch, which are the features of the schema that unpacks it (``schema.packed``)."""
    rows = {name: feature.row_dtype for name, feature in unpacking.features.items()}
    return {name: FieldSpec(row.shape, row.base) for name, row in rows.items()}


def arrow_schema(specs: Specs) -> pa.Schema:
    """The Arrow schema of batches of these fields."""
    return pa.schema([_arrow_field(name, spec) for name, spec in specs.items()])


def _arrow_field(name: str, spec: FieldSpec) -> pa.Field:
    metadata = {"shape": json.dumps(list(spec.shape)), "dtype": _dtype_name(spec.dtype)}
    column = _value_type(spec.dtype)
    if spec.shape:
        column = pa.list_(pa.field("item", column, nullable=False), math.prod(spec.shape))
    return pa.field(name, column, nullable=False, metadata=metadata)


def _dtype_name(dtype: np.dtype[Any]) -> str:
    # numpy.dtype() does not take the names of dtypes such as "V4" or "S5", nor the string of bfloat16.
    has_name = dtype.kind not in "SUV" or dtype.type.__module__ != "numpy"
    return str(dtype.name if has_name else dtype.str)


def _value_type(dtype: np.dtype[Any]) -> pa.DataType:
    if dtype in _NATIVE:
        return pa.from_numpy_dtype(dtype)
    if dtype.itemsize in (1, 2, 4, 8):
        return pa.from_numpy_dtype(np.dtype(f"u{dtype.itemsize}"))
    return pa.binary(dtype.itemsize)


def record_batch(schema: pa.Schema, arrays: Mapping[str, AnyArray], num_records: int) -> pa.RecordBatch:
    """A record batch of ``schema`` (:func:`arrow_schema`) made of ``arrays``: each (num_records, …), C-contiguous.

    Its columns keep the arrays alive, and so the slot in which the arrays lie.
    """
    columns = []
    for field in schema:
        values = pa.py_buffer(arrays[field.name].reshape(-1).view(np.uint8))
        is_list = pa.types.is_fixed_size_list(field.type)
        value_type = field.type.value_type if is_list else field.type
        length = num_records * (field.type.list_size if is_list else 1)
        column = pa.Array.from_buffers(value_type, length, [None, values], 0)
        if is_list:
            column = pa.Array.from_buffers(field.type, num_records, [None], 0, children=[column])
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)

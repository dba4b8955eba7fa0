"""Descriptions of what a record stores, and of what a batch holds. Nothing is decoded here."""

from loaderd.schema.c_function import CFunction
from loaderd.schema.codes import Codes, PrefixCodes
from loaderd.schema.dense import OneHot, Scatter
from loaderd.schema.features import Feature, Float, Int64, Length, PackedBits, Raw, Shape, resolve_dtype
from loaderd.schema.field_spec import FieldSpec
from loaderd.schema.fields import Array, Bits, Derived, Field, Fill, Packed, Planes, Spread
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.schema.records import FixedRecords
from loaderd.schema.schema import Schema
from loaderd.schema.sparse import Sparse

__all__ = [
    "Array",
    "Bits",
    "CFunction",
    "Codes",
    "Derived",
    "Feature",
    "Field",
    "FieldSpec",
    "Fill",
    "FixedRecords",
    "Float",
    "Int64",
    "Length",
    "OneHot",
    "Packed",
    "PackedBits",
    "Planes",
    "PrefixCodes",
    "Raw",
    "Scatter",
    "Schema",
    "Shape",
    "Sparse",
    "Spread",
    "packed_schema",
    "resolve_dtype",
    "unpacking_schema",
]

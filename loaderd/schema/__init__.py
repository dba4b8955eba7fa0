"""What a record stores, and what a batch shall hold: a description, with no decoding in it."""

from loaderd.schema.features import Feature, Float, Int64, PackedBits, Raw, Shape, resolve_dtype
from loaderd.schema.fields import Array, Bits, Derived, Field, Packed
from loaderd.schema.packed import packed_schema, unpacking_schema
from loaderd.schema.schema import FieldSpec, Schema

__all__ = [
    "Array",
    "Bits",
    "Derived",
    "Feature",
    "Field",
    "FieldSpec",
    "Float",
    "Int64",
    "Packed",
    "PackedBits",
    "Raw",
    "Schema",
    "Shape",
    "packed_schema",
    "resolve_dtype",
    "unpacking_schema",
]

"""What a field of a batch looks like, by its definition and the features that it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaderd.errors import SchemaError
from loaderd.schema.exact import is_cast
from loaderd.schema.features import Feature, Float, Int64, PackedBits, Raw, Shape, check_shape
from loaderd.schema.fields import Array, Bits, Derived, Field, Fill, Packed, Planes, Spread
from loaderd.schema.representable import check_representable, holds_numbers


@dataclass(frozen=True)
class FieldSpec:
    """What one field of a batch looks like, without the batch dimension."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def record_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def spec_of(name: str, definition: Field, features: Mapping[str, Feature]) -> FieldSpec:
    """Shape and dtype of field ``name``; raises SchemaError where it does not fit its feature."""
    if isinstance(definition, (Derived, Fill)):
        assert definition.shape is not None  # the schema has found out that of a Derived
        return FieldSpec(definition.shape, definition.dtype)
    if isinstance(definition, Planes):
        return _planes_spec(name, [spec_of(name, part, features) for part in definition.parts])
    feature = features.get(definition.feature)
    if feature is None:
        raise SchemaError(f"field {name!r} reads feature {definition.feature!r}, which is none of {sorted(features)}")
    if isinstance(definition, Spread):
        return _spread_spec(name, definition, feature)
    if isinstance(definition, Array):
        if isinstance(feature, PackedBits):
            raise SchemaError(
                f"field {name!r}: feature {definition.feature!r} is PackedBits; read it with Bits or Packed"
            )
        return _array_spec(name, definition, feature)
    if not isinstance(feature, PackedBits):
        raise SchemaError(
            f"field {name!r}: feature {definition.feature!r} must be PackedBits, got {type(feature).__name__}"
        )
    if isinstance(definition, Packed):
        return FieldSpec((feature.num_bytes,), definition.dtype)
    return _bits_spec(name, definition, feature)


def _bits_spec(name: str, definition: Bits, feature: PackedBits) -> FieldSpec:
    if definition.stop > feature.num_bits:
        raise SchemaError(
            f"field {name!r} needs bits {definition.start}…{definition.stop - 1} of feature {definition.feature!r}, "
            f"which has {feature.num_bits}"
        )
    return FieldSpec(definition.shape, definition.dtype)


def _array_spec(name: str, definition: Array, feature: Raw | Int64 | Float) -> FieldSpec:
    dtype = feature.value_dtype if definition.dtype is None else definition.dtype
    shape = feature.shape if definition.shape is None else definition.shape
    if definition.first is None and math.prod(shape) != feature.num_values:
        raise SchemaError(f"field {name!r}: shape {shape} must hold {feature.num_values} values")
    if definition.first is not None and definition.first + math.prod(shape) > feature.num_values:
        last = definition.first + math.prod(shape) - 1
        raise SchemaError(
            f"field {name!r} needs values {definition.first}…{last} of feature {definition.feature!r}, "
            f"which has {feature.num_values}"
        )
    if not is_cast(feature.value_dtype, dtype):
        raise SchemaError(
            f"field {name!r}: feature {definition.feature!r} of {feature.value_dtype} cannot be cast to {dtype}",
            hint="Numbers and dates become numbers or dates, and text becomes text that is as wide. A Derived field "
            "can take a part of complex numbers.",
        )
    for what, value in (("scale", definition.scale), ("offset", definition.offset)):
        if value is not None:
            check_representable((value,), dtype, f"field {name!r}: {what}")
    return FieldSpec(shape, dtype.newbyteorder("="))


def _spread_spec(name: str, definition: Spread, feature: Feature) -> FieldSpec:
    if isinstance(feature, PackedBits):
        what, count = "bit", feature.num_bits
        if definition.first is None:
            raise SchemaError(
                f"field {name!r}: feature {definition.feature!r} is PackedBits, of which Spread repeats one bit",
                hint="Say which: first=0 is the first one.",
            )
    else:
        what, count = "value", feature.num_values
        if not holds_numbers(feature.value_dtype) or feature.value_dtype.kind == "c":
            raise SchemaError(
                f"field {name!r} must spread real numbers, got feature {definition.feature!r} of {feature}"
            )
        if definition.first is None:
            return FieldSpec(check_shape((*feature.shape, *definition.shape), f"field {name!r}"), definition.dtype)
    if definition.first >= count:
        raise SchemaError(
            f"field {name!r} needs {what} {definition.first} of feature {definition.feature!r}, which has {count}"
        )
    return FieldSpec(definition.shape, definition.dtype)


def _planes_spec(name: str, specs: list[FieldSpec]) -> FieldSpec:
    shown = ", ".join(f"{spec.dtype} {spec.shape}" for spec in specs)
    if not all(spec.shape for spec in specs) or len({(spec.dtype, spec.shape[1:]) for spec in specs}) > 1:
        raise SchemaError(f"field {name!r}: the parts of a Planes must differ in their first axis only, got {shown}")
    return FieldSpec((sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]), specs[0].dtype)

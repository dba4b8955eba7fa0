"""A schema as plain values, for a message or a file, and back. No code travels: such a schema has no ``Derived``.

Values that arrive are not trusted. They are read key by key, into the kinds of ``_VALUES`` and within limits, and no
memory is allocated by the sizes that they claim.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from loaderd.errors import SchemaError
from loaderd.schema.features import MAX_AXES, Float, Int64, PackedBits, Raw, Shape, is_numpys, resolve_dtype
from loaderd.schema.fields import Array, Bits, Derived, Fill, Packed, Planes, Spread
from loaderd.schema.schema import Schema

MAX_PARTS = 1000
"""The most features, and the most fields, of a schema that travels."""
MAX_RECORD_BYTES = 1 << 30
"""The most bytes of all its features together, and of all its fields together."""
_MAX_NAME = 1000
# ``Bits`` makes lists and arrays of that many values when it checks its arguments.
_MAX_CHANNELS = 1 << 20
_DTYPE = re.compile(
    r"[<>|][biufcSU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?|[a-z]{3,9}[0-9][0-9a-z_]{0,12}"
)


def to_wire(schema: Schema) -> dict[str, Any]:
    """``schema`` as values that msgpack and JSON know, without what only workers need: defaults, pads, intermediates.

    Raises SchemaError where it has a ``Derived`` field, or is beyond the limits of :func:`from_wire`.
    """
    wire = {
        "features": {name: _part_to_wire(name, feature) for name, feature in schema.features.items()},
        "fields": {name: _part_to_wire(name, definition) for name, definition in schema.fields.items()},
    }
    from_wire(wire)
    return wire


def from_wire(wire: Any) -> Schema:
    """The schema of ``wire``, from :func:`to_wire`. ``wire`` may come from anybody; raises SchemaError."""
    try:
        return _schema_from_wire(wire)
    except SchemaError:
        raise
    except (OverflowError, TypeError, ValueError) as error:  # from numpy, or for infinite or huge numbers
        raise SchemaError(f"a schema that came as values does not hold together: {error}") from None


def _schema_from_wire(wire: Any) -> Schema:
    _require_keys(wire, {"features", "fields"}, "a schema")
    features = _parts(wire["features"], "features", _FEATURES)
    _check_size("the features", sum(feature.num_bytes for feature in features.values()))
    schema = Schema(features, _parts(wire["fields"], "fields", _FIELDS))
    _check_size("the fields", schema.record_bytes)
    return schema


def _parts(wire: Any, what: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    _require(isinstance(wire, Mapping) and len(wire) <= MAX_PARTS, what, f"at most {MAX_PARTS}, by name", wire)
    return {_text(name): _part_from_wire(part, kinds) for name, part in wire.items()}


def _part_from_wire(wire: Any, kinds: Mapping[str, type]) -> Any:
    kind = wire.get("kind") if isinstance(wire, Mapping) else None
    _require(isinstance(kind, str) and kind in kinds, "a part of a schema", f"of the kinds {list(kinds)}", wire)
    values = _VALUES[kinds[str(kind)]]
    given = {key: read for key, read in values.items() if key in wire or key not in _SELDOM}
    _require_keys(wire, {"kind", *given}, str(kind))
    return kinds[str(kind)](**{key: read(wire[key]) for key, read in given.items()})


def _part_to_wire(name: str, part: Any) -> dict[str, Any]:
    if isinstance(part, Derived):
        raise SchemaError(f"field {name!r}: a schema that travels must have no Derived field")
    if isinstance(part, Planes):
        return {"kind": "Planes", "parts": [_part_to_wire(name, each) for each in part.parts]}
    values = {key: getattr(part, key) for key in _VALUES[type(part)]}
    said = {
        key: _value_to_wire(value) for key, value in values.items() if key not in _SELDOM or value != _SELDOM[key]
    }
    return {"kind": type(part).__name__, **said}


def _require(condition: bool, what: str, must: str, got: Any) -> None:
    if not condition:
        raise SchemaError(f"{what} must be {must}, got {reprlib.repr(got)}")


def _require_keys(wire: Any, keys: set[str], what: str) -> None:
    is_it = isinstance(wire, Mapping) and set(wire) == keys
    _require(is_it, what, f"a mapping of {sorted(keys)}", wire)


def _check_size(what: str, num_bytes: int) -> None:
    _require(num_bytes <= MAX_RECORD_BYTES, what, f"{MAX_RECORD_BYTES} bytes a record at most", num_bytes)


# ---------------------------------------------------------------------------------------------- the values of a part


def _value_to_wire(value: Any) -> Any:
    if isinstance(value, np.dtype):
        # "bfloat16" and "float8_e5m2" (their str, "<V2" and "<f1", name no dtype); else such as "<f4".
        return value.str if is_numpys(value) and value.kind != "V" else value.name
    if isinstance(value, (list, tuple)):
        return [_value_to_wire(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


def _text(value: Any) -> str:
    is_name = isinstance(value, str) and len(value) <= _MAX_NAME
    _require(is_name, "a name", f"text of at most {_MAX_NAME} characters", value)
    return str(value)


def _count(value: Any) -> int:
    most = 8 * MAX_RECORD_BYTES
    _require(type(value) is int and 0 <= value <= most, "a count", f"an integer from 0 to {most}", value)
    return int(value)


def _number(value: Any) -> int | float:
    _require(type(value) in (int, float), "a scale or offset", "a number", value)
    return float(value) if isinstance(value, float) else int(value)


def _flag(value: Any) -> bool:
    _require(isinstance(value, bool), "a flag", "True or False", value)
    return bool(value)


def _list_of(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    def read_all(value: Any) -> tuple[Any, ...]:
        _require(isinstance(value, (list, tuple)), "values", "a list", value)
        return tuple(read(each) for each in value)

    return read_all


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _shape(value: Any) -> Shape:
    shape = _list_of(_count)(value)
    fits = len(shape) <= MAX_AXES and math.prod(shape) <= 8 * MAX_RECORD_BYTES
    _require(fits, "a shape", f"of at most {MAX_AXES} axes, and of a size in range", shape)
    return shape


def _bits_shape(value: Any) -> Shape:
    shape = _shape(value)
    _require(not shape or shape[-1] <= _MAX_CHANNELS, "the last axis of bits", f"at most {_MAX_CHANNELS}", shape)
    return shape


def _scale(value: Any) -> Any:
    return _list_of(_number)(value) if isinstance(value, (list, tuple)) else _number(value)


def _dtype(value: Any) -> np.dtype[Any]:
    is_name = isinstance(value, str) and _DTYPE.fullmatch(value) is not None
    dtype = resolve_dtype(value) if is_name else np.dtype(np.object_)
    # Only the name that ``to_wire`` writes is taken, so each dtype has one. Void dtypes, such as structs, have none.
    known = not dtype.hasobject and dtype.type is not np.void and _value_to_wire(dtype) == value
    _require(known, "a dtype", 'one such as "<f4" or "bfloat16"', value)
    return dtype


def _planes(value: Any) -> list[Any]:
    few = isinstance(value, (list, tuple)) and len(value) <= MAX_PARTS
    _require(few, "the parts of planes", f"a list of at most {MAX_PARTS}", value)
    return [_part_from_wire(part, _PARTS_OF_PLANES) for part in value]


_VALUES: dict[type, dict[str, Callable[[Any], Any]]] = {
    PackedBits: {"num_bits": _count},
    Raw: {"dtype": _dtype, "shape": _shape},
    Int64: {"shape": _shape},
    Float: {"shape": _shape},
    Bits: {
        "feature": _text,
        "shape": _bits_shape,
        "start": _count,
        "channel_order": _optional(_list_of(_count)),
        "scale": _optional(_scale),
        "dtype": _dtype,
        "bit_order": _text,
        "plane_bytes": _optional(_count),
    },
    Packed: {"feature": _text},
    Array: {
        "feature": _text,
        "dtype": _optional(_dtype),
        "scale": _optional(_number),
        "offset": _optional(_number),
        "shape": _optional(_shape),
        "first": _optional(_count),
        "wrap": _flag,
    },
    Spread: {
        "feature": _text,
        "shape": _shape,
        "scale": _number,
        "dtype": _dtype,
        "first": _optional(_count),
        "bit_order": _text,
    },
    Fill: {"value": _number, "shape": _shape, "dtype": _dtype},
    Planes: {"parts": _planes},
}
# Sent only where they differ from these values: so an older version understands all other schemas.
_SELDOM = {"bit_order": "big", "plane_bytes": None, "first": None, "wrap": False}
_FEATURES = {kind.__name__: kind for kind in (PackedBits, Raw, Int64, Float)}
_FIELDS = {kind.__name__: kind for kind in (Bits, Packed, Array, Spread, Fill, Planes)}
_PARTS_OF_PLANES = {kind.__name__: kind for kind in (Bits, Array, Spread, Fill)}

"""A schema as plain values, for a message or a file, and back. No code travels: such a schema has no ``Derived``.

Values that arrive are not trusted. Each part is made by its own constructor, which checks its arguments; here its
kind, names, dtype and all sizes are checked. No memory is allocated by the sizes that values claim.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from loaderd.errors import SchemaError
from loaderd.schema.codes import Codes, PrefixCodes
from loaderd.schema.dense import OneHot, Scatter
from loaderd.schema.device_program import table_bytes
from loaderd.schema.features import Float, Int64, Length, PackedBits, Raw, is_numpys, resolve_dtype
from loaderd.schema.fields import Array, Bits, Derived, Fill, Packed, Permuted, Planes, Spread
from loaderd.schema.schema import Schema
from loaderd.schema.sparse import Sparse

MAX_PARTS = 1000
"""The most features, and the most fields, of a schema that travels."""
MAX_RECORD_BYTES = 1 << 30
"""The most bytes of all its features together, and of all its fields together."""
MAX_TABLE_BYTES = 1 << 29
"""The most bytes of the tables from which a device makes its fields."""
_MAX_NAME = 1000
_DTYPE = re.compile(
    r"[<>|][biufcSU][0-9]{1,9}|[<>][mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?|[a-z]{3,9}[0-9][0-9a-z_]{0,12}"
)
_FEATURES = {kind.__name__: kind for kind in (PackedBits, Raw, Int64, Float)}
_PARTS_OF_PLANES = {kind.__name__: kind for kind in (Bits, Array, Spread, Fill)}
_OTHER_FIELDS = (Packed, Planes, Permuted, Sparse, Codes, PrefixCodes, Scatter, OneHot)
_FIELDS = {**_PARTS_OF_PLANES, **{kind.__name__: kind for kind in _OTHER_FIELDS}}
_PERMUTED = {**_PARTS_OF_PLANES, "Planes": Planes, "Permuted": Permuted}
_TABLES = ("table", "values")
_OF_WORKERS = ("default", "pad", "cut", "as_list")
# Sent only where they differ from the kind's own default: so an older version understands all other schemas.
_SELDOM = ("bit_order", "plane_bytes", "places", "first", "wrap", "order")


def to_wire(schema: Schema) -> dict[str, Any]:
    """``schema`` as values that msgpack and JSON know, without what only workers need: defaults, pads, intermediates.

    A ``Length`` is a number like others there. Raises SchemaError where there is a ``Derived`` field, or where the
    schema is beyond the limits of :func:`from_wire`.
    """
    wire = {
        "features": {name: _part_to_wire(name, feature) for name, feature in schema.features.items()},
        "fields": {name: _part_to_wire(name, definition) for name, definition in schema.fields.items()},
    }
    from_wire(wire)
    return wire


def _part_to_wire(name: str, part: Any) -> dict[str, Any]:
    if isinstance(part, Derived):
        raise SchemaError(f"field {name!r}: a schema that travels must have no Derived field")
    if isinstance(part, Length):
        part = Raw(part.value_dtype)
    if isinstance(part, Planes):
        return {"kind": "Planes", "parts": [_part_to_wire(name, each) for each in part.parts]}
    defaults = {field.name: field.default for field in fields(part)}
    values = {key: getattr(part, key) for key in _keys_of(type(part))}
    for key, value in values.items():
        if isinstance(value, (*_PARTS_OF_PLANES.values(), Planes, PrefixCodes)):
            values[key] = _part_to_wire(name, value)
    sent = {key: value for key, value in values.items() if key not in _SELDOM or value != defaults[key]}
    return {"kind": type(part).__name__, **{key: _value_to_wire(value) for key, value in sent.items()}}


def _keys_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.name not in _OF_WORKERS]


def _value_to_wire(value: Any) -> Any:
    if isinstance(value, np.dtype):
        # "bfloat16" and "float8_e5m2" (their str, "<V2" and "<f1", name no dtype); else such as "<f4".
        return value.str if is_numpys(value) and value.kind != "V" else value.name
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def from_wire(wire: Any) -> Schema:
    """The schema of ``wire``, from :func:`to_wire`. ``wire`` may come from anybody; raises SchemaError."""
    try:
        return _schema_from_wire(wire)
    except SchemaError:
        raise
    except (OverflowError, RecursionError, TypeError, ValueError) as error:  # for what is missing, huge or nested
        raise SchemaError(f"a schema that came as values does not hold together: {error!s:.200}") from None


def _schema_from_wire(wire: Any) -> Schema:
    is_schema = isinstance(wire, Mapping) and wire.keys() == {"features", "fields"}
    _require(is_schema, "a schema", "a mapping of its features and fields", wire)
    features = _parts(wire["features"], "features", _FEATURES)
    _check_size("the features", sum(feature.num_bytes for feature in features.values()))
    schema = Schema(features, _parts(wire["fields"], "fields", _FIELDS))
    _check_size("the fields", schema.record_bytes)
    tables = sum(table_bytes(name, definition, features) for name, definition in schema.fields.items())
    _require(tables <= MAX_TABLE_BYTES, "the tables of the fields", f"{MAX_TABLE_BYTES} bytes at most", tables)
    return schema


def _parts(wire: Any, what: str, kinds: Mapping[str, Any]) -> dict[str, Any]:
    _require(isinstance(wire, Mapping) and len(wire) <= MAX_PARTS, what, f"at most {MAX_PARTS}, by name", wire)
    for name in wire:
        _require(_is_name(name), "a name", f"text of at most {_MAX_NAME} characters", name)
    return {name: _part_from_wire(part, kinds) for name, part in wire.items()}


def _part_from_wire(wire: Any, kinds: Mapping[str, Any]) -> Any:
    kind = wire.get("kind") if isinstance(wire, Mapping) else None
    _require(isinstance(kind, str) and kind in kinds, "a part of a schema", f"of the kinds {list(kinds)}", wire)
    values = {key: value for key, value in wire.items() if key != "kind"}
    keys = _keys_of(kinds[str(kind)])
    _require(values.keys() <= set(keys), str(kind), f"a mapping of {keys}", wire)
    for key, value in values.items():
        if key == "dtype":
            values[key] = None if value is None else _dtype(value)
        elif key == "of":
            values[key] = _part_from_wire(value, _PERMUTED)
        elif key == "feature" and isinstance(value, Mapping):
            values[key] = _part_from_wire(value, {"PrefixCodes": PrefixCodes})
        elif key == "parts":
            few = isinstance(value, (list, tuple)) and len(value) <= MAX_PARTS
            _require(few, "the parts of planes", f"a list of at most {MAX_PARTS}", value)
            values[key] = [_part_from_wire(part, _PARTS_OF_PLANES) for part in value]
        else:
            is_plain = value is None or isinstance(value, (bool, int, float, list, tuple)) or _is_name(value)
            _require(is_plain, key, "a number, a list or a short text", value)
            if key in _TABLES and isinstance(value, (list, tuple)):
                _require(_has_numbers_alone(value), key, "lists of numbers", value)
    return kinds[str(kind)](**values)


def _has_numbers_alone(given: Any) -> bool:
    """Whether nested lists hold nothing else: of texts, numpy makes an array as wide as the longest is for each."""
    lists = [given]
    while lists:
        for value in lists.pop():
            if isinstance(value, (list, tuple)):
                lists.append(value)
            elif not isinstance(value, (int, float)):
                return False
    return True


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_NAME


def _dtype(value: Any) -> np.dtype[Any]:
    must = 'one such as "<f4" or "bfloat16"'
    _require(isinstance(value, str) and _DTYPE.fullmatch(value) is not None, "a dtype", must, value)
    dtype = resolve_dtype(value)
    _require(dtype.type is not np.void, "a dtype", must, value)
    return dtype


def _require(condition: bool, what: str, must: str, got: Any) -> None:
    if not condition:
        raise SchemaError(f"{what} must be {must}, got {reprlib.repr(got)}")


def _check_size(what: str, num_bytes: int) -> None:
    _require(num_bytes <= MAX_RECORD_BYTES, what, f"{MAX_RECORD_BYTES} bytes a record at most", num_bytes)

"""What is computed of each record once, when its shard is indexed: whether it is in the data set (``where=``).

The function reads fields of the schema, or stored features; no other feature of a record is parsed for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from loaderd.errors import SchemaError
from loaderd.schema.c_function import CFunction
from loaderd.schema.features import Length, PackedBits
from loaderd.schema.fields import Array, Derived, Field, Packed, derived_in, features_of, parts_of
from loaderd.schema.functions import digest_of
from loaderd.schema.schema import Schema


@dataclass(frozen=True)
class RecordValues:
    """``where``: the function and its inputs. ``schema``: what a record is read by; its fields are the inputs."""

    schema: Schema
    where: Derived

    @classmethod
    def of(cls, schema: Schema, where: Derived) -> RecordValues:
        """Raises SchemaError where the inputs are no fields or features, or are drawn at random."""
        if where.random or where.shape not in (None, ()) or where.dtype not in (None, np.dtype(np.bool_)):
            raise SchemaError(
                f"where must return a bool for each record, and draw nothing: shape () and dtype bool may be left "
                f"out; got shape {where.shape}, dtype {where.dtype}, random={where.random!r}"
            )
        if isinstance(where.function, CFunction):
            raise SchemaError("where must be a function of arrays, and a field that it reads may be a CFunction's")
        return cls(_reading_schema(schema, where.inputs), where)

    def __getstate__(self) -> dict[str, Any]:
        return {"schema": self.schema, "where": self.where}

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        function: Any = self.where.function
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        return f"{getattr(function, '__module__', None) or '?'}.{name}"

    @cached_property
    def key(self) -> str | None:
        """A digest, in hex, that differs where a function or what it reads does; None where that cannot be told."""
        schema = self.schema
        seen: list[Any] = [schema.stored_fingerprint, self.where.inputs, self.name, self.where.function]
        for name in schema.evaluation_order:
            for part in parts_of(schema.definition_of(name)):
                # All arguments: a repr leaves out the numbers of tables.
                seen += [name, type(part).__name__, list(vars(part).items())]
        return digest_of(seen)


def _reading_schema(schema: Schema, inputs: Sequence[str]) -> Schema:
    """The part of ``schema`` that makes ``inputs``; a stored feature among them becomes a field, as it is stored."""
    known: dict[str, Field] = {**schema.intermediates, **schema.fields}
    for name in inputs:
        if name not in known and name in schema.features:
            known[name] = Packed(name) if isinstance(schema.features[name], PackedBits) else Array(name)
        if name not in known:
            there = ", ".join(dict.fromkeys((*schema.fields, *schema.intermediates, *schema.features)))
            raise SchemaError(f"where: {name!r} is no field, intermediate or stored feature; there are {there}")
    needed = list(inputs)
    for name in needed:  # grows
        needed += [source for derived in derived_in(known[name]) for source in derived.inputs if source not in needed]
        if any(derived.random for derived in derived_in(known[name])):
            raise SchemaError(
                f"where: field {name!r} is drawn at random, anew in each epoch, and where= is computed once"
            )
    fields = {name: known[name] for name in inputs}
    intermediates = {name: known[name] for name in needed if name not in fields}
    read = {feature for name in needed for feature in features_of(known[name])}
    features = schema.features
    if schema.records is None and read:  # records of a fixed size are copied as a whole
        read |= {each.feature for name, each in features.items() if name in read and isinstance(each, Length)}
        features = {name: feature for name, feature in features.items() if name in read}
    return Schema(features, fields, intermediates)

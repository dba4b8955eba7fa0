"""What is computed of each record once, when its shard is indexed.

Whether it is in the data set (``where=``), and how much it weighs where records are drawn (``sample=``). The
functions read fields of the schema, or stored features; no other feature of a record is parsed for them.
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
from loaderd.schema.functions import digest_of, name_of
from loaderd.schema.schema import Schema


@dataclass(frozen=True)
class RecordValues:
    """``where``, ``weight``: the functions and their inputs; of each, None: there is none, but one there is.

    ``schema``: what a record is read by; its fields are the inputs.
    """

    schema: Schema
    where: Derived | None
    weight: Derived | None = None

    @classmethod
    def of(cls, schema: Schema, where: Derived | None, weight: str | Derived | None = None) -> RecordValues:
        """``weight``: a function, or the name of a field or feature.

        Raises SchemaError where the inputs are no fields or features, or are drawn at random.
        """
        if isinstance(weight, str):
            weight = Derived(_itself, weight)
        if where is not None:
            _check(schema, where, "where", "a bool", np.dtype(np.bool_))
        if weight is not None:
            _check(schema, weight, "the weight of sample", "a number", weight.dtype)
        functions = [each for each in (where, weight) if each is not None]
        return cls(_reading_schema(schema, functions), where, weight)

    def __getstate__(self) -> dict[str, Any]:
        return {"schema": self.schema, "where": self.where, "weight": self.weight}

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that the index of a shard has of them."""
        return ("passing",) * (self.where is not None) + ("weights",) * (self.weight is not None)

    @property
    def where_name(self) -> str:
        """The name of ``where``, for messages; "": there is none."""
        return "" if self.where is None else _name_of(self.where)

    @property
    def weight_name(self) -> str:
        """That of ``weight``."""
        return "" if self.weight is None else _name_of(self.weight)

    @cached_property
    def key(self) -> str | None:
        """A digest, in hex, that differs where a function or what it reads does; None where that cannot be told."""
        schema = self.schema
        seen: list[Any] = [schema.stored_fingerprint]
        for function in (self.where, self.weight):
            seen += [None] if function is None else [function.inputs, _name_of(function), function.function]
        for name in schema.evaluation_order:
            for part in parts_of(schema.definition_of(name)):
                # All arguments: a repr leaves out the numbers of tables.
                seen += [name, type(part).__name__, list(vars(part).items())]
        return digest_of(seen)


def _itself(values: Any) -> Any:
    return values


def _name_of(derived: Derived) -> str:
    function: Any = derived.function
    if function is _itself:
        return derived.inputs[0]
    return name_of(function)


def _check(schema: Schema, derived: Derived, what: str, result: str, dtype: Any) -> None:
    if derived.random or derived.shape not in (None, ()) or derived.dtype not in (None, dtype):
        raise SchemaError(
            f"{what} must return {result} for each record, and draw nothing: shape () and dtype may be left "
            f"out; got shape {derived.shape}, dtype {derived.dtype}, random={derived.random!r}"
        )
    if isinstance(derived.function, CFunction):
        raise SchemaError(f"{what} must be a function of arrays, and a field that it reads may be a CFunction's")
    known = dict.fromkeys((*schema.fields, *schema.intermediates, *schema.features))
    for name in derived.inputs:
        if name not in known:
            raise SchemaError(
                f"{what}: {name!r} is no field, intermediate or stored feature; there are {', '.join(known)}"
            )


def _reading_schema(schema: Schema, functions: Sequence[Derived]) -> Schema:
    """The part of ``schema`` that makes the inputs of the functions; a stored feature among them becomes a field."""
    inputs = list(dict.fromkeys(name for function in functions for name in function.inputs))
    known: dict[str, Field] = {**schema.intermediates, **schema.fields}
    for name in inputs:
        if name not in known and name in schema.features:
            known[name] = Packed(name) if isinstance(schema.features[name], PackedBits) else Array(name)
    needed = list(inputs)
    for name in needed:  # grows
        needed += [source for derived in derived_in(known[name]) for source in derived.inputs if source not in needed]
        if any(derived.random for derived in derived_in(known[name])):
            raise SchemaError(
                f"field {name!r} is drawn at random, anew in each epoch, and where= and sample= are computed once"
            )
    fields = {name: known[name] for name in inputs}
    intermediates = {name: known[name] for name in needed if name not in fields}
    read = {feature for name in needed for feature in features_of(known[name])}
    features = schema.features
    if schema.records is None and read:  # records of a fixed size are copied as a whole
        read |= {each.feature for name, each in features.items() if name in read and isinstance(each, Length)}
        features = {name: feature for name, feature in features.items() if name in read}
    return Schema(features, fields, intermediates)

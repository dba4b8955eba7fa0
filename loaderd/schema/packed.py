"""One schema cut in two: what a server sends packed, and how its consumer finishes it.

::

    rows ──packed_schema(s)──► batch: features as stored, and finished fields ──► server ══ network ══► consumer
                                                                                                            │
    the fields of s ◄──unpacking_schema(s)── rows that have the fields of that batch as features ◄──────────┘

A feature travels as it is stored where that takes fewer bytes than the fields that are made of it: 194 bytes of bits
instead of 6,184 of floats. The server's workers finish all other fields, and every ``Derived`` field, so that its
function stays on the server.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace

from loaderd.schema.features import Feature, PackedBits, Raw
from loaderd.schema.fields import Array, Derived, Field, Fill, Packed, Planes, derived_in, parts_of
from loaderd.schema.schema import Schema
from loaderd.schema.specs import spec_of


def packed_schema(schema: Schema) -> Schema:
    """What a server sends: the features that travel as stored, and the fields that the workers finish.

    The rows are those of ``schema``: the same features, in rows of the same bytes.
    """
    travelling = _travelling(schema)
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if not _is_unpacked_later(definition, travelling):
            fields[name] = definition
            continue
        for feature in _features_of(definition):
            is_packed = isinstance(schema.features[feature], PackedBits)
            fields[travelling[feature]] = Packed(feature) if is_packed else Array(feature)
    # A derived field may read fields that are not delivered any more.
    kept = {name: definition for name, definition in schema.fields.items() if name not in fields}
    return Schema(schema.features, fields, {**schema.intermediates, **kept})


def unpacking_schema(schema: Schema) -> Schema:
    """The consumer's schema: it makes the fields of ``schema`` from the fields of :func:`packed_schema`.

    The latter are its features: ``PackedBits``, or ``Raw`` in this machine's byte order. It has no ``Derived`` field.
    """
    travelling, packed = _travelling(schema), packed_schema(schema)
    features: dict[str, Feature] = {}
    for name, spec in packed.specs.items():
        is_packed = isinstance(packed.fields[name], Packed)
        features[name] = PackedBits(8 * spec.record_bytes) if is_packed else Raw(spec.dtype, spec.shape)
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if _is_unpacked_later(definition, travelling):
            fields[name] = _renamed(definition, travelling)
        else:
            fields[name] = Packed(name) if isinstance(definition, Packed) else Array(name)
    return Schema(features, fields)


def _features_of(definition: Field) -> tuple[str, ...]:
    """The features of which a field is made; none where a function makes it, or a part of it."""
    if derived_in(definition):
        return ()
    parts = (part for part in parts_of(definition) if not isinstance(part, (Fill, Derived)))
    return tuple(dict.fromkeys(part.feature for part in parts))


def _is_unpacked_later(definition: Field, travelling: Container[str]) -> bool:
    """Whether the consumer makes the field, from features that travel as they are stored."""
    features = _features_of(definition)
    return bool(features) and all(feature in travelling for feature in features)


def _renamed(definition: Field, names: dict[str, str]) -> Field:
    """The field, reading its features under other names."""
    if isinstance(definition, Planes):
        return Planes([_renamed(part, names) for part in definition.parts])  # type: ignore[misc]  # parts stay parts
    if isinstance(definition, (Derived, Fill)):
        return definition
    return replace(definition, feature=names[definition.feature])


def _travelling(schema: Schema) -> dict[str, str]:
    """For each feature that travels as it is stored, its name on the way, which no field or intermediate has."""
    names: dict[str, str] = {}
    for feature in _smaller_as_stored(schema):
        name = feature
        while name in schema.fields or name in schema.intermediates or name in names.values():
            name += " (stored)"
        names[feature] = name
    return names


def _smaller_as_stored(schema: Schema) -> list[str]:
    """The features that take fewer bytes than what is made of them, in those fields that need no other feature."""
    features = list(dict.fromkeys(name for field in schema.fields.values() for name in _features_of(field)))
    while True:
        finished_bytes = dict.fromkeys(features, 0)
        for name, definition in schema.fields.items():
            if _is_unpacked_later(definition, features):
                for part in parts_of(definition):
                    for feature in _features_of(part):
                        finished_bytes[feature] += spec_of(name, part, schema.features).record_bytes
        smaller = [name for name in features if schema.features[name].num_bytes < finished_bytes[name]]
        if len(smaller) == len(features):
            return features
        features = smaller  # fields that need another one are finished after all: look again at what is made of these

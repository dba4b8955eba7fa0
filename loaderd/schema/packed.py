"""One schema cut in two: what travels packed, over a network or to a device, and how it is finished there.

::

    rows ──packed_schema(s)──► batch: features as stored, and finished fields ──► server ══ network ══► consumer
                                                                                                            │
    the fields of s ◄──unpacking_schema(s)── rows that have the fields of that batch as features ◄──────────┘

A feature travels as it is stored where that takes fewer bytes than the fields that are made of it: 194 bytes of bits
instead of 6,184 of floats. The workers in front of the way finish all other fields, and every ``Derived`` field, so
that its function stays there; and where the way leads to a device, what a device program cannot make.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from loaderd.schema.features import Feature, PackedBits, Raw
from loaderd.schema.fields import Array, Derived, Field, Fill, Packed, Planes, derived_in, parts_of
from loaderd.schema.schema import Schema

if TYPE_CHECKING:
    from loaderd.schema.device_program import DeviceProgram

_Sources = Mapping[str, tuple[str, ...]]
"""For each field, the features of which it can be made behind the way; none: it is finished in front of it."""


def packed_schema(schema: Schema, for_device: bool = False) -> Schema:
    """What travels: the features as they are stored, and the fields that the workers finish.

    The rows are those of ``schema``: the same features, in rows of the same bytes. ``for_device``: a device program
    finishes it, and no worker.
    """
    sources = _sources(schema, for_device)
    travelling = _travelling(schema, sources)
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if not _is_unpacked_later(sources[name], travelling):
            fields[name] = definition
            continue
        for feature in sources[name]:
            is_packed = isinstance(schema.features[feature], PackedBits)
            fields[travelling[feature]] = Packed(feature) if is_packed else Array(feature)
    # A derived field may read fields that are not delivered any more.
    kept = {name: definition for name, definition in schema.fields.items() if name not in fields}
    return Schema(schema.features, fields, {**schema.intermediates, **kept})


def unpacking_schema(schema: Schema, for_device: bool = False) -> Schema:
    """The schema behind the way: it makes the fields of ``schema`` from the fields of :func:`packed_schema`.

    The latter are its features: ``PackedBits``, or ``Raw`` in this machine's byte order. It has no ``Derived`` field.
    """
    sources = _sources(schema, for_device)
    travelling, packed = _travelling(schema, sources), packed_schema(schema, for_device)
    features: dict[str, Feature] = {}
    for name, spec in packed.specs.items():
        is_packed = isinstance(packed.fields[name], Packed)
        features[name] = PackedBits(8 * spec.record_bytes) if is_packed else Raw(spec.dtype, spec.shape)
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if _is_unpacked_later(sources[name], travelling):
            fields[name] = _renamed(definition, travelling)
        else:
            fields[name] = Packed(name) if isinstance(definition, Packed) else Array(name)
    return Schema(features, fields)


def device_program(schema: Schema) -> DeviceProgram:
    """How a device makes the fields of ``schema`` from those of ``packed_schema(schema, for_device=True)``."""
    from loaderd.schema.device_program import DeviceProgram, steps_of

    unpacking = unpacking_schema(schema, for_device=True)
    steps = {name: steps_of(name, definition, unpacking.features) for name, definition in unpacking.fields.items()}
    return DeviceProgram({name: known for name, known in steps.items() if known is not None})


def _sources(schema: Schema, for_device: bool) -> _Sources:
    sources = {}
    for name, definition in schema.fields.items():
        is_finished = bool(derived_in(definition))
        if for_device and not is_finished:
            from loaderd.schema.device_program import steps_of

            is_finished = steps_of(name, definition, schema.features) is None
        sources[name] = () if is_finished else _features_of(definition)
    return sources


def _features_of(definition: Field) -> tuple[str, ...]:
    """The features that a field without derived parts reads."""
    parts = (part for part in parts_of(definition) if not isinstance(part, (Fill, Derived)))
    return tuple(dict.fromkeys(part.feature for part in parts))


def _is_unpacked_later(sources: tuple[str, ...], travelling: Container[str]) -> bool:
    """Whether a field is made behind the way, from features that travel as they are stored."""
    return bool(sources) and all(feature in travelling for feature in sources)


def _renamed(definition: Field, names: dict[str, str]) -> Field:
    """The field, reading its features under other names."""
    if isinstance(definition, Planes):
        return Planes([_renamed(part, names) for part in definition.parts])  # type: ignore[misc]  # parts stay parts
    if isinstance(definition, (Derived, Fill)):
        return definition
    return replace(definition, feature=names[definition.feature])


def _travelling(schema: Schema, sources: _Sources) -> dict[str, str]:
    """For each feature that travels as it is stored, its name on the way, which no field or intermediate has."""
    names: dict[str, str] = {}
    for feature in _smaller_as_stored(schema, sources):
        name = feature
        while name in schema.fields or name in schema.intermediates or name in names.values():
            name += " (stored)"
        names[feature] = name
    return names


def _smaller_as_stored(schema: Schema, sources: _Sources) -> list[str]:
    """The features that take fewer bytes than what is made of them, in those fields that need no other feature."""
    features = list(dict.fromkeys(feature for each in sources.values() for feature in each))
    while True:
        finished_bytes = dict.fromkeys(features, 0)
        for name, definition in schema.fields.items():
            if _is_unpacked_later(sources[name], features):
                for part in parts_of(definition):
                    for feature in _features_of(part):
                        finished_bytes[feature] += part.spec(name, schema.features).record_bytes
        smaller = [name for name in features if schema.features[name].num_bytes < finished_bytes[name]]
        if len(smaller) == len(features):
            return features
        features = smaller  # fields that need another one are finished after all: look again at what is made of these

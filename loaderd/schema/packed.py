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

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loaderd.schema.features import Feature, PackedBits, Raw
from loaderd.schema.fields import Array, Field, Packed, derived_in, features_of, parts_of, renamed
from loaderd.schema.schema import Schema

if TYPE_CHECKING:
    from loaderd.schema.device_program import DeviceProgram


def packed_schema(schema: Schema, for_device: bool = False) -> Schema:
    """What travels: the features as they are stored, and the fields that the workers finish.

    The rows are those of ``schema``: the same features, in rows of the same bytes. ``for_device``: a device program
    finishes it, and no worker.
    """
    unpacked, names = _cut(schema, for_device)
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if name not in unpacked:
            fields[name] = definition
            continue
        for feature in unpacked[name]:
            is_packed = isinstance(schema.features[feature], PackedBits)
            fields[names[feature]] = Packed(feature) if is_packed else Array(feature)
    # A derived field may read fields that are not delivered any more.
    kept = {name: definition for name, definition in schema.fields.items() if name not in fields}
    return Schema(schema.features, fields, {**schema.intermediates, **kept})


def unpacking_schema(schema: Schema, for_device: bool = False) -> Schema:
    """The schema behind the way: it makes the fields of ``schema`` from the fields of :func:`packed_schema`.

    The latter are its features: ``PackedBits``, or ``Raw`` in this machine's byte order. It has no ``Derived`` field.
    """
    unpacked, names = _cut(schema, for_device)
    packed = packed_schema(schema, for_device)
    features: dict[str, Feature] = {}
    for name, spec in packed.specs.items():
        definition = packed.fields[name]
        stored = schema.features[definition.feature] if isinstance(definition, Packed) else None
        features[name] = (
            PackedBits(stored.num_bits) if isinstance(stored, PackedBits) else Raw(spec.dtype, spec.shape)
        )
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if name in unpacked:
            fields[name] = renamed(definition, names)
        else:
            fields[name] = Packed(name) if isinstance(definition, Packed) else Array(name)
    return Schema(features, fields)


def device_program(schema: Schema) -> DeviceProgram:
    """How a device makes the fields of ``schema`` from those of ``packed_schema(schema, for_device=True)``."""
    from loaderd.schema.device_program import DeviceProgram, steps_of

    unpacking = unpacking_schema(schema, for_device=True)
    steps = {name: steps_of(name, definition, unpacking.features) for name, definition in unpacking.fields.items()}
    return DeviceProgram({name: known for name, known in steps.items() if known is not None})


def _cut(schema: Schema, for_device: bool) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """The fields that are made behind the way, each with the features that it needs; and the names of these there.

    Each of the features takes fewer bytes than what is made of it.
    """
    unpacked = {
        name: features
        for name, definition in schema.fields.items()
        if (features := features_of(definition)) and _can_be_unpacked(name, definition, schema.features, for_device)
    }
    while True:
        made_bytes = dict.fromkeys((feature for features in unpacked.values() for feature in features), 0)
        for name in unpacked:
            for part in parts_of(schema.fields[name]):
                for feature in features_of(part):
                    made_bytes[feature] += part.spec(name, schema.features).record_bytes
        larger = {feature for feature, made in made_bytes.items() if schema.features[feature].num_bytes >= made}
        if not larger:
            break
        # What needs one of these is finished in front of the way: look again at what is made of the others.
        unpacked = {name: features for name, features in unpacked.items() if not larger.intersection(features)}
    return unpacked, _names_of_stored(schema)


def _names_of_stored(schema: Schema) -> dict[str, str]:
    """By feature, a name that no field has. In an unpacking schema, features have such names, and keep them."""
    fields = {*schema.fields, *schema.intermediates}
    names = {feature: feature for feature in schema.features if feature not in fields}
    for feature in [feature for feature in schema.features if feature in fields]:
        name = feature
        while name in fields or name in names.values():
            name += " (stored)"
        names[feature] = name
    return names


def _can_be_unpacked(name: str, definition: Field, features: Mapping[str, Feature], for_device: bool) -> bool:
    if derived_in(definition):
        return False
    if not for_device:
        return True
    from loaderd.schema.device_program import steps_of

    return steps_of(name, definition, features) is not None

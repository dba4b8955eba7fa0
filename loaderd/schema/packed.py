"""One schema cut in two: what travels packed, over a network or to a device, and how it is finished there.

::

    rows ──packed_schema(s)──► batch: features as stored, and finished fields ──► server ══ network ══► consumer
                                                                                                            │
    the fields of s ◄──unpacking_schema(s)── rows that have the fields of that batch as features ◄──────────┘

A feature travels as it is stored where that takes fewer bytes than the fields that are made of it: 194 bytes of bits
instead of 6,184 of floats. The workers in front of the way finish all other fields, and every ``Derived`` field, so
that its function stays there; and where the way leads to a device, what a device program cannot make.

Of a ``Derived`` field that takes the values of another one from other places (``schema.permute``), only the draw is
made in front of the way: the number of a record's table, one byte, travels beside what the other field is made of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from loaderd.schema.features import Feature, PackedBits, Raw
from loaderd.schema.fields import (
    MAX_TABLES,
    Array,
    Bits,
    Derived,
    Field,
    Packed,
    Permuted,
    Planes,
    Spread,
    derived_in,
    features_of,
    parts_of,
    permuted_in,
    renamed,
)
from loaderd.schema.permute import permutation_of
from loaderd.schema.schema import Schema

if TYPE_CHECKING:
    from loaderd.schema.device_program import DeviceProgram


def packed_schema(schema: Schema, for_device: bool = False) -> Schema:
    """What travels: the features as they are stored, and the fields that the workers finish.

    The rows are those of ``schema``: the same features, in rows of the same bytes. ``for_device``: a device program
    finishes it, and no worker.
    """
    cut = _cut(schema, for_device)
    fields: dict[str, Field] = {}
    for name, definition in schema.fields.items():
        if name not in cut.unpacked:
            fields[name] = definition
            continue
        for feature in features_of(cut.unpacked[name]):
            if feature in cut.draws:
                fields[feature] = cut.draws[feature]
                continue
            is_packed = isinstance(schema.features[feature], PackedBits)
            fields[cut.names[feature]] = Packed(feature) if is_packed else Array(feature)
    # A derived field may read fields that are not delivered any more.
    kept = {name: definition for name, definition in schema.fields.items() if name not in fields}
    return Schema(schema.features, fields, {**schema.intermediates, **kept})


def unpacking_schema(schema: Schema, for_device: bool = False) -> Schema:
    """The schema behind the way: it makes the fields of ``schema`` from the fields of :func:`packed_schema`.

    The latter are its features: ``PackedBits``, or ``Raw`` in this machine's byte order. It has no ``Derived`` field.
    """
    cut = _cut(schema, for_device)
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
        if name in cut.unpacked:
            fields[name] = renamed(cut.unpacked[name], cut.names)
        else:
            fields[name] = Packed(name) if isinstance(definition, Packed) else Array(name)
    return Schema(features, fields)


def device_program(schema: Schema) -> DeviceProgram:
    """How a device makes the fields of ``schema`` from those of ``packed_schema(schema, for_device=True)``."""
    from loaderd.schema.device_program import DeviceProgram, permutes_of, steps_of

    unpacking = unpacking_schema(schema, for_device=True)
    steps = {name: steps_of(name, definition, unpacking.features) for name, definition in unpacking.fields.items()}
    permutes = {name: permutes_of(name, each, unpacking.features) for name, each in unpacking.fields.items()}
    return DeviceProgram(
        {name: known for name, known in steps.items() if known is not None},
        {name: each for name, each in permutes.items() if each},
    )


class _Cut(NamedTuple):
    """``unpacked``: the fields that are made behind the way, as they are made there.

    Each of the features that they read takes fewer bytes than what is made of it. ``names``: those of features there.
    ``draws``: fields that travel beside them, by name: the numbers of :class:`Permuted` ones.
    """

    unpacked: dict[str, Field]
    names: dict[str, str]
    draws: dict[str, Derived]


def _cut(schema: Schema, for_device: bool) -> _Cut:
    names = _names_of_stored(schema)
    fields, draws = _with_draws(schema, names)
    features = {**schema.features, **dict.fromkeys(draws, Raw("uint8"))}
    unpacked = {
        name: definition
        for name, definition in fields.items()
        if features_of(definition) and _can_be_unpacked(name, definition, features, for_device)
    }
    while True:
        made_bytes = dict.fromkeys((one for definition in unpacked.values() for one in features_of(definition)), 0)
        for name, definition in unpacked.items():
            itemsize = definition.spec(name, features).dtype.itemsize
            for part in parts_of(definition):
                for feature in features_of(part):
                    made_bytes[feature] += math.prod(part.spec(name, features).shape) * itemsize
        larger = {one for one, made in made_bytes.items() if features[one].num_bytes >= made}
        larger -= {permuted.number for definition in unpacked.values() for permuted in permuted_in(definition)}
        if not larger:
            break
        # What needs one of these is finished in front of the way: look again at what is made of the others.
        unpacked = {name: each for name, each in unpacked.items() if not larger.intersection(features_of(each))}
    return _Cut(unpacked, {**names, **dict(zip(draws, draws, strict=True))}, draws)


def _with_draws(schema: Schema, names: Mapping[str, str]) -> tuple[dict[str, Field], dict[str, Derived]]:
    """The fields, with :class:`Permuted` ones in place of functions that permute; and what draws their numbers."""
    fields, draws = dict(schema.fields), dict[str, Derived]()

    def permuted(name: str, definition: Field, is_inner: bool = False) -> Field | None:
        """What is left to do of a function that permutes; of others, None."""
        if not isinstance(definition, Derived) or (permutation := permutation_of(definition.function)) is None:
            return None
        draw, sources, inner = permutation
        source, stream = definition.inputs[0], definition.random
        of = schema.definition_of(source)
        if isinstance(of, Derived) and not is_inner:
            of = permuted(source, of, is_inner=True) or of
        is_made = isinstance(of, (Bits, Array, Spread, Planes, Permuted)) and not derived_in(of)
        if not is_made or len(sources) > MAX_TABLES or schema.spec_of(source).shape != definition.shape:
            return None
        drawn = Derived(draw, definition.inputs[1:], (), "uint8", name if stream is True else stream)
        number = next((known for known, each in draws.items() if each == drawn), "")
        if not number:
            number = f"{drawn.random} (drawn)"
            while number in {*schema.fields, *schema.intermediates, *names.values(), *schema.features, *draws}:
                number += " (drawn)"
            draws[number] = drawn
        return Permuted(of, number, sources, inner, definition.dtype)  # type: ignore[arg-type]  # checked above

    for name, definition in schema.fields.items():
        fields[name] = permuted(name, definition) or definition
    return fields, draws


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

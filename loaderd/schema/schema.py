"""Features and fields together: which field reads which feature, and what a row looks like.

A :class:`Schema` has two sides. **Stored features** say what is in each ``tf.train.Example``:
:class:`PackedBits`, :class:`Raw`, :class:`Int64`, :class:`Float`, and how many values a record has of these,
:class:`Length`; or, by :class:`FixedRecords`, what is in each record of fixed size. **Fields** say what comes out
of a batch: :class:`Bits`, :class:`Packed`, :class:`Array`, :class:`Spread`, :class:`Fill`, :class:`Sparse`,
some of these joined in :class:`Planes`, and :class:`Derived`. Between the two lies the **row**: the stored features
of one record, each at a fixed place in a fixed number of bytes. Records are shuffled and kept as rows, and become
fields last.

::

    Example on disk ──parse──► row (packed, ``row_bytes``) ──shuffle──► row ──decode──► fields of a batch
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError, names_its_arguments
from loaderd.schema.codes import Codes, PrefixCodes
from loaderd.schema.dense import OneHot, Scatter
from loaderd.schema.features import Feature, Float, Int64, Length, PackedBits, Raw, check_lengths
from loaderd.schema.field_spec import FieldSpec, check_name
from loaderd.schema.fields import (
    Array,
    Bits,
    Derived,
    Field,
    Fill,
    Packed,
    Permuted,
    Planes,
    Spread,
    derived_in,
    parts_of,
)
from loaderd.schema.records import FixedRecords
from loaderd.schema.sparse import Sparse
from loaderd.schema.trial import try_out

if TYPE_CHECKING:
    from loaderd.schema.device_program import DeviceProgram

_ROW_ALIGNMENT_BYTES = 8
# The size of a numpy dtype is a C int. Behind the features, a row has up to 8 bytes of padding, and 8 of its key.
_MAX_FEATURE_BYTES = 2**31 - 1 - 2 * _ROW_ALIGNMENT_BYTES


@dataclass(frozen=True)
class Schema:
    """Stored ``features`` by name, and the ``fields`` of a batch by name, in the order of delivery.

    ``intermediates`` are fields that :class:`Derived` ones read and that are not delivered themselves. The functions
    of Derived fields without a shape or a dtype are called here, with records of zeros, to learn them.
    Raises :class:`~loaderd.errors.SchemaError` where the parts don't fit together.
    """

    features: Mapping[str, Feature]
    fields: Mapping[str, Field]
    intermediates: Mapping[str, Field] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, kinds, hint in _PARTS:
            parts = getattr(self, name)
            if not isinstance(parts, Mapping):
                raise SchemaError(f"{name} must be a mapping of names to {_named(kinds)}, got {parts!r:.200}")
            for key, part in parts.items():
                check_name(key, f"each key of {name}")
                if not isinstance(part, kinds):
                    raise SchemaError(f"{name}[{key!r}] must be {_named(kinds)}, got {part!r:.200}", hint=hint)
            if not isinstance(parts, FixedRecords):  # these cannot be changed
                object.__setattr__(self, name, MappingProxyType(dict(parts)))
        if not self.features or not self.fields:
            raise SchemaError("a schema must have at least one stored feature and one field")
        check_lengths(self.features)
        both = sorted(set(self.fields) & set(self.intermediates))
        if both:
            raise SchemaError(f"a name must be a field or an intermediate, not both: {both}")
        for name in self.evaluation_order:
            self._try_out(name)
            _ = self.spec_of(name)
        _ = self.row_dtype

    def _try_out(self, name: str) -> None:
        """Find out shape and dtype of what is derived, where they are left out; its inputs are known."""
        definition = self.definition_of(name)
        if not derived_in(definition):
            return
        tried: list[Any] = []
        for number, part in enumerate(parts_of(definition)):
            what = f"field {name!r}, part {number}" if isinstance(definition, Planes) else f"field {name!r}"
            tried.append(try_out(what, part, name, self.spec_of) if isinstance(part, Derived) else part)
        known = Planes(tried) if isinstance(definition, Planes) else tried[0]
        kept = "fields" if name in self.fields else "intermediates"
        object.__setattr__(self, kept, MappingProxyType({**getattr(self, kept), name: known}))

    def __eq__(self, other: object) -> bool:
        """Whether both read and deliver the same, in the same order; functions compare as in :class:`Derived`."""
        if not isinstance(other, Schema):
            return NotImplemented
        orders = [(list(each.features), list(each.fields)) for each in (self, other)]
        return orders[0] == orders[1] and all(getattr(self, name) == getattr(other, name) for name, _, _ in _PARTS)

    def __hash__(self) -> int:
        return hash((tuple(self.features), tuple(self.fields)))

    def __reduce__(self) -> tuple[Any, ...]:
        features = self.records or dict(self.features)
        return Schema, (features, dict(self.fields), dict(self.intermediates))

    @property
    def records(self) -> FixedRecords | None:
        """How records of fixed size are stored; None: each is a ``tf.train.Example`` in a TFRecord file."""
        return self.features if isinstance(self.features, FixedRecords) else None

    @classmethod
    def of_stored(cls, features: Mapping[str, Feature]) -> Schema:
        """A schema in which every feature is a field of the same name, as it is stored: bits stay packed."""
        fields = {
            name: Packed(name) if isinstance(each, PackedBits) else Array(name) for name, each in features.items()
        }
        return cls(features, fields)

    def as_examples(self) -> Schema:
        """The same schema for TFRecord shards of the stored features, as ``loaderd convert`` writes them.

        What a record must hold (``FixedRecords.expect``) was checked when it was converted.
        """
        return Schema(dict(self.features), self.fields, self.intermediates)

    def as_records(self) -> Schema:
        """The same schema for records of fixed size or npz, as ``loaderd convert`` writes them (``--format``).

        The stored features stand one behind the other, without gaps; an Int64 is 8 bytes a number, little-endian.
        Lists stand there with their padding, and behind all features the length of each list that has no ``Length``.
        """
        features = with_lengths(self.features)
        bits = [name for name, each in features.items() if isinstance(each, PackedBits)]
        expect = {} if self.records is None else self.records.expect_as_bytes(bits)
        if any(isinstance(each, Length) for each in features.values()):
            stored = {
                name: each if isinstance(each, Length) else replace(each, default=None)
                for name, each in features.items()
            }
            return Schema(FixedRecords(stored, expect=expect), self.fields, self.intermediates)
        dtype = np.dtype([(name, each.row_dtype.base, each.row_dtype.shape) for name, each in features.items()])
        return Schema(FixedRecords(dtype, bits, expect), self.fields, self.intermediates)

    def definition_of(self, name: str) -> Field:
        """The field or intermediate of that name."""
        return self.fields[name] if name in self.fields else self.intermediates[name]

    @property
    def specs(self) -> dict[str, FieldSpec]:
        """Shape and dtype of each delivered field, in order."""
        return {name: self.spec_of(name) for name in self.fields}

    @property
    def record_bytes(self) -> int:
        """Bytes that one record takes in a batch."""
        return sum(spec.record_bytes for spec in self.specs.values())

    def spec_of(self, name: str) -> FieldSpec:
        """Shape and dtype of a field or intermediate; raises SchemaError where it does not fit its feature."""
        return self.definition_of(name).spec(name, self.features)

    @property
    def evaluation_order(self) -> list[str]:
        """Fields and intermediates, each behind the inputs that it is derived from."""
        done: list[str] = []

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in done:
                return
            if name in path:
                raise SchemaError(f"derived fields depend on each other in a circle: {' → '.join((*path, name))}")
            if name not in self.fields and name not in self.intermediates:
                raise self._no_input(path[-1], name)
            for derived in derived_in(self.definition_of(name)):
                for source in derived.inputs:
                    visit(source, (*path, name))
            done.append(name)

        for name in (*self.fields, *self.intermediates):
            visit(name, ())
        return done

    def _no_input(self, derived: str, name: str) -> SchemaError:
        """The error for the field ``derived``, whose input ``name`` is no field or intermediate."""
        if name not in self.features:
            there = ", ".join((*self.fields, *self.intermediates))
            return SchemaError(
                f"field {derived!r} is derived from {name!r}, which is no field or intermediate; there are {there}"
            )
        kind = "Bits" if isinstance(self.features[name], PackedBits) else "Array"
        return SchemaError(
            f"field {derived!r} is derived from {name!r}, which is a stored feature, and no field or intermediate",
            hint=f"Make it one: Schema(features, fields, intermediates={{{name!r}: loaderd.{kind}({name!r})}}).",
        )

    @property
    def made_fields(self) -> list[str]:
        """The delivered fields and what they are derived from, each behind its inputs."""
        needed = set(self.fields)
        order = self.evaluation_order
        for name in reversed(order):
            if name in needed:
                needed.update(source for derived in derived_in(self.definition_of(name)) for source in derived.inputs)
        return [name for name in order if name in needed]

    @property
    def checked_fields(self) -> list[str]:
        """Those that a device makes, which cannot say that a record is damaged: so workers look at what they read."""
        made = self.made_fields
        kept = [name for name in self.intermediates if name not in made]
        return [name for name in kept if isinstance(self.intermediates[name], _CHECKED_KINDS)]

    @cached_property
    def row_dtype(self) -> np.dtype[Any]:
        """The structured dtype of a row: one member for each stored feature; its itemsize is a multiple of 8 bytes.

        Behind each PackedBits feature the row has at least one byte more, because words may be read past its end. The
        last 8 bytes are the record's key, where the schema needs one. Raises SchemaError where it would be too large.
        """
        offsets = []
        end = last = 0
        for feature in self.features.values():
            alignment = 1 if isinstance(feature, PackedBits) else feature.value_dtype.alignment
            end = -(-end // alignment) * alignment
            offsets.append(end)
            end += feature.num_bytes
            last = max(last, end + isinstance(feature, PackedBits))
        if last > _MAX_FEATURE_BYTES:
            raise SchemaError(f"the features must be {_MAX_FEATURE_BYTES} bytes a record at most, got {last}")
        return np.dtype(
            {
                "names": list(self.features),
                "formats": [feature.row_dtype for feature in self.features.values()],
                "offsets": offsets,
                "itemsize": (-(-last // _ROW_ALIGNMENT_BYTES) + self.needs_record_key) * _ROW_ALIGNMENT_BYTES,
            }
        )

    @cached_property
    def row_offsets(self) -> Mapping[str, int]:
        """The byte of a row where each stored feature begins."""
        members: Mapping[str, Any] = self.row_dtype.fields or {}
        return {name: members[name][1] for name in self.features}

    @property
    def row_bytes(self) -> int:
        """Bytes that one record takes while it is packed."""
        return self.row_dtype.itemsize

    @property
    def needs_record_key(self) -> bool:
        """Whether any field or intermediate is derived with randomness."""
        every = (*self.fields.values(), *self.intermediates.values())
        return any(derived.random for definition in every for derived in derived_in(definition))

    def device_program(self) -> DeviceProgram:
        """How a device makes the fields of packed batches (``unpack="device"``): print it to read it."""
        from loaderd.schema.packed import device_program

        return device_program(self)

    def record_keys(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
        """uint64, (n,): a view of the records' keys in ``rows``, uint8 (n, row_bytes). Only if keys are needed."""
        keys: npt.NDArray[np.uint64] = rows[:, -_ROW_ALIGNMENT_BYTES:].view(np.uint64)[:, 0]
        return keys

    @property
    def stored_fingerprint(self) -> str:
        """A digest, in hex, of the stored features (not of the fields). It tells which bytes of a record are read."""
        text = repr([(name, repr(feature)) for name, feature in self.features.items()])
        if self.records is not None:
            text += repr((self.records.record_bytes, [self.records.offset_of(name) for name in self.records]))
            if self.records.padded:  # without what is not given: fingerprints of schemas are older than it
                text += repr(sorted(self.records.padded.items()))
            text += "" if self.records.sizes is None else repr((self.records.sizes, dict(self.records.fill)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_lengths(features: Mapping[str, Feature]) -> dict[str, Feature]:
    """The features, and a :class:`Length` for each list of any length that has none: how many values to write.

    In records of a fixed size there is no place for more.
    """
    every = dict(features)
    if isinstance(features, FixedRecords):
        return every
    counted = {each.feature for each in features.values() if isinstance(each, Length)}
    for name, feature in features.items():
        if feature.pad is not None and feature.varies and name not in counted:
            length = f"{name}_length"
            while length in every:
                length += "_"
            every[length] = Length(name)
    return every


_FEATURE_KINDS = (PackedBits, Raw, Int64, Float, Length)
_FIELD_KINDS = (
    Bits,
    Packed,
    Array,
    Spread,
    Fill,
    Sparse,
    Codes,
    PrefixCodes,
    Scatter,
    OneHot,
    Planes,
    Permuted,
    Derived,
)
_CHECKED_KINDS = (Sparse, Codes, Scatter, OneHot)
_HINT_FEATURES = "What is stored; what comes out of it belongs in fields. See loaderd_tf.schema_from_features, too."
_HINT_FIELDS = "What comes out; what is stored in a record belongs in features."
_PARTS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("features", _FEATURE_KINDS, _HINT_FEATURES),
    ("fields", _FIELD_KINDS, _HINT_FIELDS),
    ("intermediates", _FIELD_KINDS, _HINT_FIELDS),
)


def _named(kinds: tuple[type, ...]) -> str:
    *first, last = (kind.__name__ for kind in kinds if kind is not Permuted)  # no user's
    return f"{', '.join(first)} or {last}"


for _kind in (Schema, FixedRecords, *_FEATURE_KINDS, *_FIELD_KINDS):
    _kind.__init__ = names_its_arguments(_kind.__init__)  # type: ignore[method-assign]

"""Records of fixed size: what is stored in shards that are no TFRecord, described by numpy's structured dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.schema.features import Feature, Length, PackedBits, Raw, check_integer, check_lengths, is_integer
from loaderd.schema.representable import as_plain, as_values

MOST_IN_FRONT = 4
"""How many records of a stream are looked at to learn their size."""


class FixedRecords(Mapping[str, Feature]):
    """The features of a :class:`Schema` whose shards hold records of ``dtype``, one behind the other.

    ``dtype``: a structured one. A record takes ``dtype.itemsize`` bytes, and each field is a feature of that name: a
    :class:`Raw` or, if it is named in ``bits``, a :class:`PackedBits`. Fields that nobody reads can be left out:
    numpy's ``dtype[["planes", "result"]]`` has two fields of a record, and the size of the whole record.

    ``expect``: by field, a value that each record must hold, such as a version. A record with another value is a
    RecordMismatchError.

    ``sizes``: for records of several versions in one data set, such as ``("version", {6: 8356, 7: 8396})``: the field
    that tells them apart, and how many bytes a record takes with each value of it, at most those of ``dtype``. The
    records of one file, or of one member of a tar, are of one version; any other record is a RecordMismatchError. A
    shorter record lacks the last fields, which are 0 in its row, or what ``fill`` says by field. Plain files, those
    compressed with gzip or zstd, and tars may have several sizes: any other shard is a ShardFormatError.

    ``padded``: by field, how many entries of its first axis the array of an npz must have at least. Missing entries
    are zeros, so that files of several versions are one data set. 0: a file has the whole array or none; without it,
    the field is zeros. (Other files hold all fields as ``dtype`` has them.)

    A shard may be a plain file of such records, or one compressed with gzip or zstd; a tar of such compressed files;
    or an npz that has an array for each field, with one row for each record, or a single value for all of them; axes
    of length 1 don't count; or an npy: an array of ``dtype``, or, of a dtype with one field, one with a row of
    values for each record; or a Parquet or Arrow file with a column for each field. Its first bytes tell which it is.

    In place of ``dtype`` and ``bits``, the features themselves may be given by name, as for a ``tf.train.Example``:
    ``FixedRecords({"moves": Int64((200,), pad=-1), "num_moves": Length("moves")})``. In Parquet and Arrow, one with a
    ``pad`` or a ``cut`` is a column of lists, or of bytes, of any length, and its :class:`Length` is counted. Other
    shards hold lists with their padding, and a Length as int32, as ``loaderd convert`` writes them. A ``default`` is
    what a null of Parquet and Arrow becomes.
    """

    def __init__(
        self,
        dtype: Any,
        bits: Collection[str] = (),
        expect: Mapping[str, Any] | None = None,
        padded: Mapping[str, int] | None = None,
        sizes: tuple[str, Mapping[int, int]] | None = None,
        fill: Mapping[str, Any] | None = None,
    ) -> None:
        self._given: dict[str, Feature] = {}
        if isinstance(dtype, Mapping) and dtype and all(isinstance(each, Feature) for each in dtype.values()):
            self._given = dict(dtype)
            dtype = [(name, each.row_dtype.base, each.row_dtype.shape) for name, each in dtype.items()]
            if bits:
                raise SchemaError(f"FixedRecords: bits must not be given with features, got {bits!r:.200}")
            bits = [name for name, each in self._given.items() if isinstance(each, PackedBits)]
        try:
            self.dtype: np.dtype[Any] = np.dtype(dtype)
        except (TypeError, ValueError) as error:
            raise SchemaError(f"FixedRecords: dtype must be one of numpy's, got {dtype!r:.200}: {error}") from None
        # By names: dtype.fields has a title as another name for its field.
        fields = {name: self.dtype.fields[name] for name in self.dtype.names} if self.dtype.fields else {}
        if not fields or self.dtype.hasobject:
            raise SchemaError(f"FixedRecords: dtype must be a structured one of fixed size, got {self.dtype}")
        for what, given in (("expect", expect), ("padded", padded), ("fill", fill)):
            if given is not None and not isinstance(given, Mapping):
                raise SchemaError(f"FixedRecords: {what} must be a mapping of fields to values, got {given!r:.200}")
        expect, padded, fill = expect or {}, padded or {}, fill or {}
        bits = [bits] if isinstance(bits, str) or not isinstance(bits, Iterable) else list(bits)
        for what, names in (("bits", bits), ("expect", [*expect]), ("padded", [*padded]), ("fill", [*fill])):
            unknown = [name for name in names if name not in list(fields)]
            if unknown:
                raise SchemaError(
                    f"FixedRecords: {what} must name fields of the dtype, {list(fields)}, got {unknown!r:.200}"
                )
        self.bits = frozenset(bits)
        self.expect = MappingProxyType({name: as_plain(value) for name, value in expect.items()})
        self.fill = MappingProxyType({name: as_plain(value) for name, value in fill.items()})
        for what, values in (("expect", self.expect), ("fill", self.fill)):
            for name, value in values.items():
                _values_of(fields[name][0], value, name, what)
        self.sizes = None if sizes is None else self._checked_sizes(sizes)
        if held := [name for name in self.fill if self.offset_of(name) < min(self.all_sizes)]:
            raise SchemaError(f"FixedRecords: fill must name fields that some of sizes lack, got {held!r:.200}")
        for name, least in padded.items():
            entries = fields[name][0].shape[0] if fields[name][0].shape else 0
            check_integer(least, f"FixedRecords: padded[{name!r}]", 0, entries)
        self.padded = MappingProxyType({name: int(least) for name, least in padded.items()})
        self._features: dict[str, Feature] = {}
        for name, (dtype_of_field, *_) in fields.items():
            if dtype_of_field.base.fields:
                raise SchemaError(
                    f"FixedRecords: field {name!r} must hold values, got the structured {dtype_of_field}"
                )
            is_bits = name in self.bits
            raw = Raw(dtype_of_field.base, dtype_of_field.shape)
            self._features[name] = self._given.get(name) or (PackedBits(8 * raw.num_bytes) if is_bits else raw)
        check_lengths(self)

    def __getitem__(self, name: str) -> Feature:
        return self._features[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FixedRecords):
            return NotImplemented
        same = self.dtype == other.dtype and list(self) == list(other)
        same = same and self._features == other._features and self.sizes == other.sizes
        # As text: NaN is no equal of itself.
        fills = [repr(sorted(each.fill.items())) for each in (self, other)]
        return same and (self.expect, self.padded) == (other.expect, other.padded) and fills[0] == fills[1]

    def __hash__(self) -> int:
        return hash((self.dtype.itemsize, tuple(self), self.bits))

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self._given, ()) if self._given else (self.dtype, tuple(sorted(self.bits)))
        return FixedRecords, (*given, dict(self.expect), dict(self.padded), self.sizes, dict(self.fill))

    def __repr__(self) -> str:
        given = f"{self._given!r}" if self._given else f"{self.dtype!r}, bits={sorted(self.bits)}"
        padded = f", padded={dict(self.padded)}" if self.padded else ""
        sizes = "" if self.sizes is None else f", sizes={self.sizes}, fill={dict(self.fill)}"
        return f"FixedRecords({given}, expect={dict(self.expect)}{padded}{sizes})"

    @property
    def is_of_features(self) -> bool:
        """Whether it was made of features, and not of a dtype."""
        return bool(self._given)

    @property
    def record_bytes(self) -> int:
        """Bytes of a record in a shard; of the longest one, where they have several sizes."""
        return self.dtype.itemsize

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """How many bytes a record may have."""
        return (self.record_bytes,) if self.sizes is None else tuple(sorted(set(self.sizes[1].values())))

    def size_in(self, front: bytes | memoryview) -> int:
        """Bytes of each record of a stream that begins with ``front``: a few records, or as many as there are.

        It is the size with which most of them hold the value that it belongs to: one of them may be damaged.
        """
        if self.sizes is None:
            return self.record_bytes
        name, sizes = self.sizes
        assert self.dtype.fields is not None
        field, offset = self.dtype.fields[name][:2]
        front = front[: MOST_IN_FRONT * self.record_bytes]
        held = {
            size: [
                int(np.frombuffer(front, field, 1, start + offset)[0]) == value
                for start in range(0, len(front) - offset - field.itemsize + 1, size)
            ]
            for value, size in sizes.items()
        }
        best = max(held, key=lambda size: (sum(held[size]), held[size][:1]))
        return best if any(held[best]) else self.record_bytes

    def lacking(self, size: int) -> dict[str, bytes]:
        """What the fields hold that a record of ``size`` bytes does not have."""
        assert self.dtype.fields is not None
        fields = {name: self.dtype.fields[name][0] for name in self if self.offset_of(name) >= size}
        zeros = {name: np.zeros(field.shape, field.base) for name, field in fields.items()}
        filled = {
            name: _values_of(fields[name], self.fill[name], name, "fill") for name in fields if name in self.fill
        }
        return {name: values.tobytes() for name, values in (zeros | filled).items()}

    @property
    def in_words(self) -> str:
        """Such as "records of 8,356 bytes with version 6 or 8,396 bytes with version 7, input_format 1"."""
        expected = [f"{name} {value}" for name, value in self.expect.items()]
        if self.sizes is None:
            return ", ".join([f"records of {self.record_bytes:,} bytes", *expected]).replace(", ", " with ", 1)
        name, sizes = self.sizes
        some = " or ".join(f"{size:,} bytes with {name} {value}" for value, size in sizes.items())
        return ", ".join([f"records of {some}", *expected])

    def offset_of(self, name: str) -> int:
        """The byte of a record at which the field begins."""
        fields = self.dtype.fields
        assert fields is not None
        offset: int = fields[name][1]
        return offset

    def by_columns(self, names: Sequence[str]) -> dict[str, FixedRecords]:
        """What the files of each name of ``Columns`` hold: its field.

        The files of one name that is no field hold all fields that have no files of their own. Raises SchemaError
        where a field has no files, or there is another such name, or where records have several ``sizes``.
        """
        if self.sizes is not None:
            raise SchemaError(f"Columns hold rows of one size, but FixedRecords have several: sizes={self.sizes}")
        assert self.dtype.fields is not None
        fields = {name: self.dtype.fields[name][0] for name in self}
        counted = {name: of for of in names for name in self.lengths_of(of)}
        others = [name for name in self if name not in names and name not in counted]
        rest = [name for name in names if name not in self]
        if len(rest) > 1 or bool(rest) != bool(others):
            raise SchemaError(
                f"Columns must name the fields of FixedRecords, {list(self)}, got {list(names)}",
                hint="One name may be no field: its files hold all fields that have no files of their own.",
            )
        own = {name: [name, *self.lengths_of(name)] if name in self else others for name in names}
        return {
            name: FixedRecords(
                {each: self[each] for each in of_name}
                if self._given
                else np.dtype([(each, fields[each]) for each in of_name]),
                padded={each: least for each, least in self.padded.items() if each in of_name},
            )
            for name, of_name in own.items()
        }

    def lengths_of(self, name: str) -> list[str]:
        """The features that are a :class:`Length` of ``name``."""
        return [each for each, feature in self.items() if isinstance(feature, Length) and feature.feature == name]

    def expect_as_bytes(self, names: Collection[str]) -> dict[str, Any]:
        """``expect``, with the values of the fields ``names`` as lists of the bytes that a record holds."""
        expect = dict(self.expect)
        assert self.dtype.fields is not None
        for name in expect.keys() & set(names):
            expect[name] = list(_values_of(self.dtype.fields[name][0], expect[name], name, "expect").tobytes())
        return expect

    def contradiction(self, record: bytes) -> str:
        """In words, the first value of ``expect`` that the record does not hold; "" if it holds them all."""
        assert self.dtype.fields is not None
        for name, expected in self.expect.items():
            field = self.dtype.fields[name][0]
            values = np.frombuffer(record, field.base, field.itemsize // field.base.itemsize, self.offset_of(name))
            if (values.reshape(field.shape) != np.asarray(expected, field.base)).any():
                return f"{name} {values.reshape(field.shape).tolist()} where {expected} is expected"
        if self.sizes is not None:
            name, sizes = self.sizes
            value = int(np.frombuffer(record, self.dtype.fields[name][0], 1, self.offset_of(name))[0])
            if value not in sizes:
                return f"{name} {value} where {' or '.join(map(str, sizes))} is expected"
        return ""

    def _checked_sizes(self, sizes: Any) -> tuple[str, dict[int, int]]:
        """``sizes``, as plain integers. Raises SchemaError."""
        must = 'FixedRecords: sizes must be a field and its values\' bytes, such as ("version", {6: 8356, 7: 8396})'
        try:
            name, by_value = sizes
            given = dict(by_value)
        except (TypeError, ValueError):
            raise SchemaError(f"{must}, got {sizes!r:.200}") from None
        if not all(map(is_integer, [*given, *given.values()])):
            raise SchemaError(f"{must}, got {sizes!r:.200}")
        by_value = {int(value): int(size) for value, size in given.items()}
        fields: Mapping[str, Any] = self.dtype.fields or {}
        if not isinstance(name, str) or name not in fields or fields[name][0].kind not in "iu" or not by_value:
            raise SchemaError(f"{must}, the field a whole number, got {sizes!r:.200}")
        if max(by_value.values()) != self.dtype.itemsize or len(set(by_value.values())) < len(by_value):
            raise SchemaError(
                f"FixedRecords: sizes must differ, and the largest must be the {self.dtype.itemsize} bytes of the "
                f"dtype, got {by_value}"
            )
        spans = {
            each: (fields[each][1], fields[each][1] + fields[each][0].itemsize) for each in self.dtype.names or ()
        }
        for size in by_value.values():
            cut = [each for each, (start, stop) in spans.items() if start < size < stop]
            lacks = [each for each in (name, *self.expect) if spans[each][1] > size]
            if cut or lacks:
                why = f"cuts {cut}" if cut else f"lacks {lacks}, by which records are checked"
                raise SchemaError(f"FixedRecords: a record must hold whole fields, but one of {size} bytes {why}")
        for value in by_value:
            _values_of(fields[name][0], value, name, "sizes")
        return name, by_value


def _values_of(field: np.dtype[Any], given: Any, name: str, what: str) -> npt.NDArray[Any]:
    return as_values(given, field.base, field.shape, f"FixedRecords: {what}[{name!r}]")

"""Fields: what comes out of a batch, computed from the stored features of its records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.schema.c_function import CFunction
from loaderd.schema.codes import Codes, PrefixCodes
from loaderd.schema.dense import OneHot, Scatter
from loaderd.schema.exact import is_cast
from loaderd.schema.features import (
    ByValue,
    PackedBits,
    Shape,
    check_integer,
    check_shape,
    is_integer,
    resolve_dtype,
)
from loaderd.schema.field_spec import Features, FieldSpec, check_bit_order, check_name, feature_of, packed_bits_of
from loaderd.schema.functions import same_function
from loaderd.schema.representable import (
    Number,
    as_number,
    as_plain,
    check_holds_numbers,
    check_representable,
    holds_numbers,
    in_dtype,
    integer_limits,
)
from loaderd.schema.sparse import Sparse


@dataclass(frozen=True, eq=False)
class Bits(ByValue):
    """Bits of a :class:`PackedBits` feature, one value a bit: 0 or ``scale``.

    ``shape`` fills from bit ``start`` on, in C order. The last axis holds the channels: channel ``c`` of the
    output is stored channel ``channel_order[c]`` (default: as stored), times ``scale[c]`` (one number, or one for
    each channel of the *output*; default 1). ``dtype``: any real numpy dtype, bool, or "bfloat16".

    ``bit_order``: ``"big"`` where the most significant bit of a byte comes first, or ``"little"``. ``plane_bytes``:
    each entry of the first axis is a plane of so many bytes; the bits that its values leave over are padding. (Go's
    361 points in 46 bytes: ``shape=(22, 19, 19), plane_bytes=46``.)

    ``places``: for values that do not lie one behind the other, the number of each one's bit, counted from ``start``,
    in C order; -1: no bit, always 0. It goes with neither ``channel_order`` nor ``plane_bytes``.
    """

    feature: str
    shape: Shape = ()
    start: int = 0
    channel_order: Sequence[int] | None = None
    scale: float | Sequence[float] | None = None
    dtype: Any = "float32"
    bit_order: str = "big"
    plane_bytes: int | None = None
    places: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_name(self.feature, "Bits: feature")
        check_bit_order(self.bit_order, "Bits")
        object.__setattr__(self, "shape", check_shape(self.shape, "Bits"))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        object.__setattr__(self, "start", check_integer(self.start, "Bits: start", 0))
        if self.dtype.kind not in "biufV" or self.dtype.names or self.dtype.itemsize > 8:
            raise SchemaError(f"Bits: dtype must be a real number of up to 64 bits or bool, got {self.dtype}")
        object.__setattr__(self, "dtype", self.dtype.newbyteorder("="))
        if self.channel_order is not None:
            order = tuple(self.channel_order) if isinstance(self.channel_order, Iterable) else (self.channel_order,)
            is_complete = len(order) == self.num_channels and all(map(is_integer, order))
            if not is_complete or sorted(order) != list(range(self.num_channels)):
                raise SchemaError(
                    f"Bits: channel_order must be a permutation of 0…{self.num_channels - 1} "
                    f"(the last axis of shape {self.shape}), got {order}"
                )
            object.__setattr__(self, "channel_order", tuple(int(c) for c in order))
        if self.scale is not None:
            object.__setattr__(self, "scale", _numbers(self.scale, "Bits: scale"))
        if self.plane_bytes is not None:
            object.__setattr__(self, "plane_bytes", check_integer(self.plane_bytes, "Bits: plane_bytes", 1))
            if len(self.shape) < 2 or self.plane_bits > 8 * self.plane_bytes or self.start % 8:
                raise SchemaError(
                    f"Bits: planes of {self.plane_bytes} bytes must begin at a whole byte and hold the values of all "
                    f"axes but the first, got shape {self.shape} from bit {self.start} on"
                )
        if self.places is not None:
            object.__setattr__(self, "places", self._checked_places(self.places))
        check_representable(self._scales, self.dtype, "Bits: scale")
        if (number := len(self._scales)) not in (1, self.num_channels):
            raise SchemaError(
                f"Bits: scale must be a number or {self.num_channels} numbers "
                f"(the last axis of shape {self.shape}), got {number}"
            )

    def _checked_places(self, given: Any) -> tuple[int, ...]:
        numbers = tuple(given) if isinstance(given, Iterable) else (given,)
        are_places = all(is_integer(number) and int(number) >= -1 for number in numbers)
        if len(numbers) != self.num_bits or not are_places:
            raise SchemaError(
                f"Bits: places must be {self.num_bits} numbers of bits, or -1, for shape {self.shape}, "
                f"got {given!r:.200}"
            )
        if self.channel_order is not None or self.plane_bytes is not None:
            raise SchemaError("Bits: places say all of the order: give no channel_order and no plane_bytes")
        return tuple(int(n) for n in numbers)

    def spec(self, name: str, features: Features) -> FieldSpec:
        feature = packed_bits_of(name, self.feature, features)
        if self.stop > feature.num_bits:
            raise SchemaError(
                f"field {name!r} needs bits {self.start}…{self.stop - 1} of feature {self.feature!r}, "
                f"which has {feature.num_bits}"
            )
        return FieldSpec(self.shape, self.dtype)

    @property
    def num_bits(self) -> int:
        return math.prod(self.shape)

    @property
    def plane_bits(self) -> int:
        """Values of one entry of the first axis."""
        return math.prod(self.shape[1:])

    @property
    def stop(self) -> int:
        """The number of the bit behind the last one that is read."""
        if self.places is not None:
            return self.start + max(self.places, default=-1) + 1
        if self.plane_bytes is None:
            return self.start + self.num_bits
        return self.start + (self.shape[0] - 1) * 8 * self.plane_bytes + self.plane_bits

    @property
    def num_channels(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """intp, (num_channels,): the stored channel of each output channel."""
        return np.arange(self.num_channels) if self.channel_order is None else np.asarray(self.channel_order)

    @property
    def sources(self) -> npt.NDArray[np.intp]:
        """intp, (num_bits,): the number of the bit of each value, in C order; -1: no bit."""
        if self.places is not None:
            places = np.array(self.places, np.intp)
            return np.where(places < 0, -1, self.start + places)
        value = np.arange(self.num_bits)
        channel = value % self.num_channels
        source = value - channel + self.order[channel]
        if self.plane_bytes is not None:
            plane, within = np.divmod(source, max(1, self.plane_bits))
            source = 8 * self.plane_bytes * plane + within
        return self.start + source

    @property
    def _scales(self) -> tuple[Number, ...]:
        if self.scale is None:
            return (1,)
        return tuple(self.scale) if isinstance(self.scale, Iterable) else (self.scale,)

    @property
    def channel_scale(self) -> npt.NDArray[Any]:
        """``dtype``, (num_channels,): what a set bit of each output channel becomes."""
        return np.array(np.broadcast_to(in_dtype(self._scales, self.dtype), (self.num_channels,)))


@dataclass(frozen=True, eq=False)
class Packed(ByValue):
    """The bytes of a :class:`PackedBits` feature as they are stored: uint8, (num_bytes,). Unpack them later."""

    feature: str

    dtype = np.dtype(np.uint8)

    def __post_init__(self) -> None:
        check_name(self.feature, "Packed: feature")

    def spec(self, name: str, features: Features) -> FieldSpec:
        return FieldSpec((packed_bits_of(name, self.feature, features).num_bytes,), self.dtype)


@dataclass(frozen=True, eq=False)
class Array(ByValue):
    """The values of a :class:`Raw`, :class:`Int64` or :class:`Float` feature: ``cast(value) * scale + offset``.

    The cast comes first, so the arithmetic is done in ``dtype`` (default: as stored). Numbers and dates can
    be cast to either, text to text that is as wide. ``shape`` (default: as stored) may lay the same number of values
    out in another way. With ``first``, the field has only the values of ``shape``, from number ``first`` on in C
    order: ``Array("targets", shape=(), first=25)`` is one of them.

    Floats round, and what is too large for them becomes infinite. In a ``dtype`` of integers, a value whose result it
    does not hold (300 in uint8, 0.5 or NaN in int32) is a WorkerError. With ``wrap=True`` it is cast as numpy casts:
    integers wrap round, and fractions are cut off.
    """

    feature: str
    dtype: Any = None
    scale: float | None = None
    offset: float | None = None
    shape: Shape | None = None
    first: int | None = None
    wrap: bool = False

    def __post_init__(self) -> None:
        check_name(self.feature, "Array: feature")
        if not isinstance(self.wrap, bool):
            raise SchemaError(f"Array: wrap must be True or False, got {self.wrap!r:.200}")
        if self.first is not None:
            object.__setattr__(self, "first", check_integer(self.first, "Array: first", 0))
            if self.shape is None:
                raise SchemaError("Array: first needs a shape, which says how many values there are from there on")
        if self.dtype is not None:
            object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        for what in ("scale", "offset"):
            value = getattr(self, what)
            if value is not None:
                object.__setattr__(self, what, as_number(value, f"Array: {what}"))
        if self.shape is not None:
            object.__setattr__(self, "shape", check_shape(self.shape, "Array"))

    def spec(self, name: str, features: Features) -> FieldSpec:
        feature = feature_of(name, self.feature, features)
        if isinstance(feature, PackedBits):
            raise SchemaError(f"field {name!r}: feature {self.feature!r} is PackedBits; read it with Bits or Packed")
        dtype = feature.value_dtype if self.dtype is None else self.dtype
        shape = feature.shape if self.shape is None else self.shape
        first, count = self.first or 0, math.prod(shape)
        if self.first is None and count != feature.num_values:
            raise SchemaError(f"field {name!r}: shape {shape} must hold {feature.num_values} values")
        if first + count > feature.num_values:
            raise SchemaError(
                f"field {name!r} needs values {first}…{first + count - 1} of feature {self.feature!r}, "
                f"which has {feature.num_values}"
            )
        if not is_cast(feature.value_dtype, dtype):
            raise SchemaError(
                f"field {name!r}: feature {self.feature!r} of {feature.value_dtype} cannot be cast to {dtype}",
                hint="Numbers and dates become numbers or dates, and text becomes text that is as wide. A Derived "
                "field can take a part of complex numbers.",
            )
        for what, value in (("scale", self.scale), ("offset", self.offset)):
            if value is not None:
                check_representable((value,), dtype, f"field {name!r}: {what}")
        return FieldSpec(shape, dtype.newbyteorder("="))


@dataclass(frozen=True, eq=False)
class Spread(ByValue):
    """Each value of a feature, repeated over a plane of ``shape``.

    The field has the shape ``(*the feature's shape, *shape)``. With ``first``, only value number ``first``, in C
    order, is repeated, and the field has the shape ``shape``. A :class:`PackedBits` feature needs ``first``, the
    number of a bit, in the ``bit_order`` of :class:`Bits`.

    A plane holds value · ``scale``, computed in float64 and cast to ``dtype`` once: floats are rounded, and in an
    integer ``dtype`` fractions are cut off. Integers times a whole scale are exact. A value that ``dtype`` does not
    hold is a WorkerError.
    """

    feature: str
    shape: Shape
    scale: float = 1.0
    dtype: Any = "float32"
    first: int | None = None
    bit_order: str = "big"

    def __post_init__(self) -> None:
        check_name(self.feature, "Spread: feature")
        check_bit_order(self.bit_order, "Spread")
        if self.first is not None:
            object.__setattr__(self, "first", check_integer(self.first, "Spread: first", 0))
        object.__setattr__(self, "shape", check_shape(self.shape, "Spread"))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        check_holds_numbers(self.dtype, "Spread")
        object.__setattr__(self, "scale", float(as_number(self.scale, "Spread: scale")))
        if not math.isfinite(self.scale) and integer_limits(self.dtype) is not None:
            raise SchemaError(f"Spread: scale must be finite for dtype {self.dtype}, got {self.scale}")

    def spec(self, name: str, features: Features) -> FieldSpec:
        feature = feature_of(name, self.feature, features)
        if isinstance(feature, PackedBits):
            what, count = "bit", feature.num_bits
            if self.first is None:
                raise SchemaError(
                    f"field {name!r}: feature {self.feature!r} is PackedBits, of which Spread repeats one bit",
                    hint="Say which: first=0 is the first one.",
                )
        else:
            what, count = "value", feature.num_values
            if not holds_numbers(feature.value_dtype) or feature.value_dtype.kind == "c":
                raise SchemaError(
                    f"field {name!r} must spread real numbers, got feature {self.feature!r} of {feature}"
                )
            if self.first is None:
                return FieldSpec(check_shape((*feature.shape, *self.shape), f"field {name!r}"), self.dtype)
        if self.first >= count:
            raise SchemaError(
                f"field {name!r} needs {what} {self.first} of feature {self.feature!r}, which has {count}"
            )
        return FieldSpec(self.shape, self.dtype)


@dataclass(frozen=True, eq=False)
class Fill(ByValue):
    """The same ``value`` everywhere: planes that a model wants and no record stores."""

    value: float
    shape: Shape
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", check_shape(self.shape, "Fill"))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        value = as_number(self.value, "Fill: value")
        check_representable((value,), self.dtype, "Fill: value")
        object.__setattr__(self, "value", float(value) if integer_limits(self.dtype) is None else value)

    def spec(self, name: str, features: Features) -> FieldSpec:
        return FieldSpec(self.shape, self.dtype)


@dataclass(frozen=True)
class Derived:
    """A field computed in the worker: ``function(*inputs)``, vectorised over the batch dimension.

    ``inputs`` names other fields or intermediates; each arrives as an array of shape (n, …), n being any number of
    records. ``function`` returns an array of shape ``(n, *shape)``; axes of length 1 more or less don't matter. It
    may be a lambda. It must depend only on its arguments: a batch that has to be made again must come out the same.
    If it raises, it is called again with fewer records, to find the one at fault. It may also be a
    :class:`CFunction`.

    ``shape`` and ``dtype``: of the function's result. If one of them is left out, the function is called when the
    :class:`Schema` is made, with two and then three records of zeros. Text needs a ``dtype``, such as "S16". In a
    float ``dtype``, results are rounded. A result that an integer, date or text ``dtype`` does not hold is a
    WorkerError, and so is a fraction in integers.

    With ``random``, the function gets a :class:`~loaderd.RecordRandom` as its last argument: a generator for each of
    the n records, seeded by (seed, epoch, record) and by the name of a stream. True: the stream has the field's own
    name; a string: it has that name. Fields of one stream draw the same numbers (a board and its policy are turned
    alike). A record is identified by its shard's file name, without folders, and its number there; so the numbers do
    not depend on workers, batches, window, hosts or a resume, nor on which other shards there are. Costs 8 bytes a
    row and 35 ns a record (20 for each further field), before anything is drawn.
    """

    function: Any
    inputs: Sequence[str]
    shape: Shape | None = None
    dtype: Any = None
    random: bool | str = False

    def __post_init__(self) -> None:
        inputs = (
            (self.inputs,) if isinstance(self.inputs, str) or not isinstance(self.inputs, Iterable) else self.inputs
        )
        object.__setattr__(self, "inputs", tuple(check_name(name, "Derived: each of inputs") for name in inputs))
        if self.shape is not None:
            object.__setattr__(self, "shape", check_shape(self.shape, "Derived"))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        if isinstance(self.function, CFunction):
            if self.shape is None or self.dtype is None or self.random:
                raise SchemaError("Derived: a CFunction needs both, shape and dtype, and cannot be random")
        elif not callable(self.function):
            raise SchemaError(f"Derived: function must be callable, or a CFunction, got {self.function!r}")
        if not isinstance(self.random, (bool, str)) or self.random == "":
            raise SchemaError(f"Derived: random must be True, False or the name of a stream, got {self.random!r}")

    def spec(self, name: str, features: Features) -> FieldSpec:
        assert self.shape is not None  # the schema has found it out
        return FieldSpec(self.shape, self.dtype)

    def __eq__(self, other: object) -> bool:
        """Two functions are equal if they are one object, or have the same code and see equal values."""
        if not isinstance(other, Derived):
            return NotImplemented
        names = ("inputs", "shape", "dtype", "random")
        alike = all(getattr(self, name) == getattr(other, name) for name in names)
        one, another = self.function, other.function
        if isinstance(one, CFunction) or isinstance(another, CFunction):
            return alike and one == another
        return alike and same_function(one, another)

    def __hash__(self) -> int:
        return hash((self.inputs, self.shape, self.random))


Part = Bits | Array | Spread | Fill | Derived


@dataclass(frozen=True, eq=False)
class Planes(ByValue):
    """The planes of a board, from several features: fields of one dtype, joined along their first axis.

    Planes within planes are joined like their parts. A random :class:`Derived` part with ``random=True`` has the
    stream of this field's name.
    """

    parts: Sequence[Part | Planes]

    def __post_init__(self) -> None:
        given = tuple(self.parts) if isinstance(self.parts, Iterable) else (self.parts,)
        if not given or not all(isinstance(part, (Part, Planes)) for part in given):
            raise SchemaError(
                f"Planes: parts must be Bits, Array, Spread, Fill, Derived or Planes, got {self.parts!r:.200}"
            )
        parts = [within for part in given for within in (part.parts if isinstance(part, Planes) else (part,))]
        object.__setattr__(self, "parts", tuple(parts))

    def spec(self, name: str, features: Features) -> FieldSpec:
        specs = [part.spec(name, features) for part in self.parts]
        shapes, dtypes = [spec.shape for spec in specs], {spec.dtype for spec in specs}
        if () in shapes or len({shape[1:] for shape in shapes}) > 1 or len(dtypes) > 1:
            shown = ", ".join(f"{spec.dtype} {spec.shape}" for spec in specs)
            raise SchemaError(
                f"field {name!r}: the parts of a Planes must differ in their first axis only, got {shown}"
            )
        return FieldSpec((sum(shape[0] for shape in shapes), *shapes[0][1:]), specs[0].dtype)


MAX_TABLES = 256
"""Of a permutation: a record's is named by one byte."""


@dataclass(frozen=True, eq=False)
class Permuted(ByValue):
    """The values of the field ``of``, as ``dtype``, each taken from another place: see ``schema.permute.permuted``.

    ``number``: the feature that says by which of the tables ``sources``, (tables, places), of each record. ``of`` may
    be permuted itself, once. No schema of a user's has such a field: it is what is left to do of a random permutation
    where a batch is unpacked.
    """

    of: Bits | Array | Spread | Planes | Permuted
    number: str
    sources: Sequence[Sequence[int]]
    inner: int
    dtype: Any

    def __post_init__(self) -> None:
        inner = self.of.of if isinstance(self.of, Permuted) else self.of
        if not isinstance(inner, (Bits, Array, Spread, Planes)) or derived_in(inner):
            must = "Bits, Array, Spread, or Planes of these, permuted once at most"
            raise SchemaError(f"Permuted: of must be {must}, got {self.of!r:.200}")
        check_name(self.number, "Permuted: number")
        object.__setattr__(self, "inner", check_integer(self.inner, "Permuted: inner", 1))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        tables = tuple(tuple(map(int, table)) for table in self.sources)
        places = len(tables[0]) if tables else 0
        are_tables = places > 0 and all(
            len(table) == places and -1 <= min(table) <= max(table) < places for table in tables
        )
        if len(tables) > MAX_TABLES or not are_tables:
            must = f"at most {MAX_TABLES} tables of places below their length, or -1"
            raise SchemaError(f"Permuted: sources must be {must}, got {tables!r:.200}")
        object.__setattr__(self, "sources", tables)

    def spec(self, name: str, features: Features) -> FieldSpec:
        shape = self.of.spec(name, features).shape
        if (number := feature_of(name, self.number, features)).row_dtype != np.uint8:
            raise SchemaError(f"field {name!r}: feature {self.number!r} must be one uint8, got {number}")
        if math.prod(shape) % (len(self.sources[0]) * self.inner):
            raise SchemaError(f"field {name!r}: shape {shape} is not made of {len(self.sources[0])} places")
        return FieldSpec(shape, self.dtype)


Single = Bits | Packed | Array | Spread | Fill | Sparse | Codes | PrefixCodes | Scatter | OneHot | Derived
Field = Single | Planes | Permuted


def parts_of(definition: Field) -> tuple[Single, ...]:
    """The parts of a Planes; of any other field, the field. Of what is permuted, those that it is made of."""
    if isinstance(definition, Permuted):
        return parts_of(definition.of)
    return definition.parts if isinstance(definition, Planes) else (definition,)  # type: ignore[return-value]  # flat


def derived_in(definition: Field) -> tuple[Derived, ...]:
    """The field if it is derived, or its parts that are."""
    return tuple(part for part in parts_of(definition) if isinstance(part, Derived))


def features_of(definition: Field) -> tuple[str, ...]:
    """The features that a field reads by itself."""
    read = [getattr(part, each) for part in parts_of(definition) for each in _reads(part)]
    read += [permuted.number for permuted in permuted_in(definition)]
    names = [each.feature if isinstance(each, PrefixCodes) else each for each in read]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def permuted_in(definition: Field) -> tuple[Permuted, ...]:
    """The permutations that make a field, in the order in which they are applied."""
    return (*permuted_in(definition.of), definition) if isinstance(definition, Permuted) else ()


def renamed(definition: Field, names: Mapping[str, str]) -> Field:
    """The field, reading its features under other names."""
    if isinstance(definition, Permuted):
        of, number = renamed(definition.of, names), names[definition.number]
        return replace(definition, of=of, number=number)  # type: ignore[arg-type]  # of the same kind
    if isinstance(definition, Planes):
        return Planes([renamed(part, names) for part in definition.parts])  # type: ignore[misc]  # parts stay parts
    read = {each: getattr(definition, each) for each in _reads(definition)}
    others: dict[str, Any] = {each: names[name] for each, name in read.items() if isinstance(name, str)}
    others |= {each: renamed(of, names) for each, of in read.items() if isinstance(of, PrefixCodes)}
    return replace(definition, **others)


def _reads(part: Single) -> tuple[str, ...]:
    """The arguments that name features."""
    if isinstance(part, (Fill, Derived)):
        return ()
    return part.reads if isinstance(part, (Sparse, Scatter)) else ("feature",)


def _numbers(value: Any, what: str) -> Number | tuple[Number, ...]:
    """A number, or a tuple of them, from whatever holds them. Raises SchemaError."""
    plain = as_plain(value)
    if isinstance(plain, Real):
        return as_number(plain, what)
    if isinstance(plain, (str, bytes)) or not isinstance(plain, Iterable):
        raise SchemaError(f"{what} must be a number, or as many as there are channels, got {value!r:.200}")
    return tuple(as_number(as_plain(each), what) for each in plain)

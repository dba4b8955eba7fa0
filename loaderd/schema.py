"""What a record stores, and what a batch shall hold: a description, with no decoding in it.

A :class:`Schema` has two sides. **Stored features** say what is in each ``tf.train.Example``:
:class:`PackedBits`, :class:`Raw`, :class:`Int64`, :class:`Float`. **Fields** say what comes out of a batch:
:class:`Bits`, :class:`Packed`, :class:`Array`, :class:`Derived`. Between the two lies the **row**: the stored
features of one record, each at a fixed place in a fixed number of bytes. Records are shuffled and kept as rows,
and become fields last.

::

    Example on disk ──parse──► row (packed, ``row_bytes``) ──shuffle──► row ──decode──► fields of a batch
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError

Shape = tuple[int, ...]

_ROW_ALIGNMENT_BYTES = 8


def resolve_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as a numpy dtype; "bfloat16" (and the other names of ml_dtypes) included."""
    try:
        resolved: np.dtype[Any] = np.dtype(dtype)
        return resolved
    except TypeError:
        import ml_dtypes

        found = getattr(ml_dtypes, str(dtype), None)
        if found is None:
            raise SchemaError(f"dtype must be one that numpy or ml_dtypes knows, got {dtype!r}") from None
        resolved = np.dtype(found)
        return resolved


def _shape(shape: Any, of: str) -> Shape:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(dim, (int, np.integer)) and dim > 0 for dim in dims):
        raise SchemaError(f"{of}: shape must be a tuple of positive integers, got {shape!r}")
    return tuple(int(dim) for dim in dims)


# ---------------------------------------------------------------------------------------- stored features


@dataclass(frozen=True)
class PackedBits:
    """A bytes feature that holds ``num_bits`` bits, the most significant bit of each byte first.

    The stored value must have exactly ``ceil(num_bits / 8)`` bytes. ``default`` (that many bytes) stands in
    where a record lacks the feature; without one, such a record is an error.
    """

    num_bits: int
    default: bytes | None = None

    wire_kind = "bytes"

    def __post_init__(self) -> None:
        if self.num_bits <= 0:
            raise SchemaError(f"PackedBits: num_bits must be positive, got {self.num_bits}")
        if self.default is not None and len(self.default) != self.num_bytes:
            raise SchemaError(f"PackedBits: default must have {self.num_bytes} bytes, got {len(self.default)}")

    @property
    def num_bytes(self) -> int:
        """Bytes of a row that the feature takes."""
        return (self.num_bits + 7) // 8

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return np.dtype((np.uint8, (self.num_bytes,)))

    @property
    def default_bytes(self) -> bytes | None:
        return self.default


class _Values:
    """What :class:`Raw`, :class:`Int64` and :class:`Float` share: values of one dtype in a fixed shape."""

    default: Any

    @property
    def value_dtype(self) -> np.dtype[Any]:
        raise NotImplementedError

    @property
    def value_shape(self) -> Shape:
        raise NotImplementedError

    @property
    def num_values(self) -> int:
        return math.prod(self.value_shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of a row that the feature takes."""
        return self.value_dtype.itemsize * self.num_values

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return np.dtype((self.value_dtype, self.value_shape))

    @property
    def default_bytes(self) -> bytes | None:
        if self.default is None:
            return None
        try:
            full = np.broadcast_to(np.asarray(self.default, dtype=self.value_dtype), self.value_shape)
        except (ValueError, TypeError, OverflowError) as error:
            raise SchemaError(
                f"{type(self).__name__}: default must fit {self.value_dtype} of shape {self.value_shape}: {error}"
            ) from None
        return full.tobytes()


@dataclass(frozen=True)
class Raw(_Values):
    """A bytes feature that holds the values of an array: ``dtype`` in C order, little-endian unless it says so.

    This is what ``tf.io.decode_raw`` reads. The stored value must have exactly the bytes of ``shape``.
    """

    dtype: Any = "uint8"
    shape: Shape = ()
    default: Any = None

    wire_kind = "bytes"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        object.__setattr__(self, "shape", _shape(self.shape, "Raw"))
        if self.dtype.hasobject:
            raise SchemaError(f"Raw: dtype must have a fixed size, got {self.dtype}")
        _ = self.default_bytes

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return self.dtype  # type: ignore[no-any-return]  # resolved in __post_init__

    @property
    def value_shape(self) -> Shape:
        return self.shape


@dataclass(frozen=True)
class Int64(_Values):
    """An int64 feature: a scalar (``shape=()``), or a list with exactly the values of ``shape``."""

    shape: Shape = ()
    default: Any = None

    wire_kind = "int64"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape(self.shape, "Int64"))
        _ = self.default_bytes

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype("<i8")

    @property
    def value_shape(self) -> Shape:
        return self.shape


@dataclass(frozen=True)
class Float(_Values):
    """A float feature (float32 on the wire): a scalar (``shape=()``), or a list with the values of ``shape``."""

    shape: Shape = ()
    default: Any = None

    wire_kind = "float"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape(self.shape, "Float"))
        _ = self.default_bytes

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype("<f4")

    @property
    def value_shape(self) -> Shape:
        return self.shape


Feature = PackedBits | Raw | Int64 | Float


# ------------------------------------------------------------------------------------------------ fields


@dataclass(frozen=True)
class Bits:
    """Bits of a :class:`PackedBits` feature, one value a bit: 0 or ``scale``.

    ``shape`` fills from bit ``start`` on, in C order. The last axis holds the channels: channel ``c`` of the
    output is stored channel ``channel_order[c]`` (default: as stored), times ``scale[c]`` (a number, or one a
    channel of the *output*; default 1). ``dtype``: any real numpy dtype, bool, or "bfloat16".
    """

    feature: str
    shape: Shape = ()
    start: int = 0
    channel_order: Sequence[int] | None = None
    scale: float | Sequence[float] | None = None
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _shape(self.shape, "Bits"))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        if self.start < 0:
            raise SchemaError(f"Bits: start must not be negative, got {self.start}")
        if self.dtype.kind == "c" or self.dtype.hasobject:
            raise SchemaError(f"Bits: dtype must be a real number or bool, got {self.dtype}")
        if self.channel_order is not None:
            order = tuple(int(c) for c in self.channel_order)
            if sorted(order) != list(range(self.num_channels)):
                raise SchemaError(
                    f"Bits: channel_order must be a permutation of 0…{self.num_channels - 1} "
                    f"(the last axis of shape {self.shape}), got {order}"
                )
            object.__setattr__(self, "channel_order", order)
        if self.scale is not None and not isinstance(self.scale, (int, float)):
            object.__setattr__(self, "scale", tuple(float(s) for s in self.scale))
        exact = self.channel_scale
        if not np.array_equal(exact.astype(self.dtype).astype(np.float64), exact) and self.dtype.kind in "iub":
            raise SchemaError(f"Bits: scale must be representable in {self.dtype}, got {self.scale!r}")

    @property
    def num_bits(self) -> int:
        return math.prod(self.shape)

    @property
    def num_channels(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def order(self) -> npt.NDArray[np.intp]:
        """intp, (num_channels,): the stored channel of each output channel."""
        return np.arange(self.num_channels) if self.channel_order is None else np.asarray(self.channel_order)

    @property
    def channel_scale(self) -> npt.NDArray[np.float64]:
        """float64, (num_channels,): what a set bit of each output channel becomes."""
        scale = np.asarray(1.0 if self.scale is None else self.scale, dtype=np.float64)
        if scale.shape not in ((), (1,), (self.num_channels,)):
            raise SchemaError(
                f"Bits: scale must be a number or {self.num_channels} numbers "
                f"(the last axis of shape {self.shape}), got {scale.size}"
            )
        return np.broadcast_to(scale, (self.num_channels,))


@dataclass(frozen=True)
class Packed:
    """The bytes of a :class:`PackedBits` feature as they are stored: uint8, (num_bytes,). Unpack them later."""

    feature: str

    dtype = np.dtype(np.uint8)


@dataclass(frozen=True)
class Array:
    """The values of a :class:`Raw`, :class:`Int64` or :class:`Float` feature: ``cast(value) * scale + offset``.

    The cast comes first, so the arithmetic is done in ``dtype`` (default: as stored). ``shape`` (default: as
    stored) may lay the same number of values out in another way.
    """

    feature: str
    dtype: Any = None
    scale: float | None = None
    offset: float | None = None
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        if self.shape is not None:
            object.__setattr__(self, "shape", _shape(self.shape, "Array"))


@dataclass(frozen=True)
class Derived:
    """A field computed in the worker: ``function(*inputs)``, vectorised over the batch dimension.

    ``inputs`` names other fields or intermediates; each arrives as an array of shape (n, …), n being any number
    of records, and ``function`` returns an array of shape (n, *shape), cast to ``dtype``. It may be a lambda.
    It must depend on its inputs alone: a batch that has to be made again must come out the same.
    """

    function: Callable[..., Any]
    inputs: Sequence[str]
    shape: Shape = ()
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", (self.inputs,) if isinstance(self.inputs, str) else tuple(self.inputs))
        object.__setattr__(self, "shape", _shape(self.shape, "Derived"))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        if not callable(self.function):
            raise SchemaError(f"Derived: function must be callable, got {self.function!r}")


Field = Bits | Packed | Array | Derived


@dataclass(frozen=True)
class FieldSpec:
    """What one field of a batch looks like, without the batch dimension."""

    shape: Shape
    dtype: np.dtype[Any]

    @property
    def record_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Schema:
    """Stored ``features`` by name, and the ``fields`` of a batch by name, in the order of delivery.

    ``intermediates`` are fields that :class:`Derived` ones read and that are not delivered themselves.
    Raises :class:`~loaderd.errors.SchemaError` where the parts don't fit together.
    """

    features: Mapping[str, Feature]
    fields: Mapping[str, Field]
    intermediates: Mapping[str, Field] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("features", "fields", "intermediates"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        if not self.features or not self.fields:
            raise SchemaError("a schema must have at least one stored feature and one field")
        both = sorted(set(self.fields) & set(self.intermediates))
        if both:
            raise SchemaError(f"a name must be a field or an intermediate, not both: {both}")
        for name in self.evaluation_order:
            _ = self.spec_of(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Schema, (dict(self.features), dict(self.fields), dict(self.intermediates))

    def definition_of(self, name: str) -> Field:
        """The field or intermediate of that name."""
        return self.fields[name] if name in self.fields else self.intermediates[name]

    @property
    def specs(self) -> dict[str, FieldSpec]:
        """Shape and dtype of each delivered field, in order."""
        return {name: self.spec_of(name) for name in self.fields}

    def spec_of(self, name: str) -> FieldSpec:
        """Shape and dtype of a field or intermediate; raises SchemaError where it does not fit its feature."""
        definition = self.definition_of(name)
        if isinstance(definition, Derived):
            return FieldSpec(definition.shape, definition.dtype)
        feature = self.features.get(definition.feature)
        if feature is None:
            raise SchemaError(
                f"field {name!r} reads feature {definition.feature!r}, which is none of {sorted(self.features)}"
            )
        if isinstance(definition, Array):
            if isinstance(feature, PackedBits):
                raise SchemaError(
                    f"field {name!r}: feature {definition.feature!r} is PackedBits; read it with Bits or Packed"
                )
            return _array_spec(name, definition, feature)
        if not isinstance(feature, PackedBits):
            raise SchemaError(
                f"field {name!r}: feature {definition.feature!r} must be PackedBits, got {type(feature).__name__}"
            )
        if isinstance(definition, Packed):
            return FieldSpec((feature.num_bytes,), definition.dtype)
        stop = definition.start + definition.num_bits
        if stop > feature.num_bits:
            raise SchemaError(
                f"field {name!r} needs bits {definition.start}…{stop - 1} of feature {definition.feature!r}, "
                f"which has {feature.num_bits}"
            )
        return FieldSpec(definition.shape, definition.dtype)

    @property
    def evaluation_order(self) -> list[str]:
        """Fields and intermediates, each behind the inputs that it is derived from."""
        done: list[str] = []

        def visit(name: str, path: tuple[str, ...]) -> None:
            if name in done:
                return
            if name in path:
                raise SchemaError(f"derived fields go round in a circle: {' → '.join((*path, name))}")
            if name not in self.fields and name not in self.intermediates:
                raise SchemaError(f"field {path[-1]!r} is derived from {name!r}, which is no field or intermediate")
            definition = self.definition_of(name)
            if isinstance(definition, Derived):
                for source in definition.inputs:
                    visit(source, (*path, name))
            done.append(name)

        for name in (*self.fields, *self.intermediates):
            visit(name, ())
        return done

    @property
    def row_dtype(self) -> np.dtype[Any]:
        """The structured dtype of a row: one member a stored feature; its itemsize is a multiple of 8 bytes."""
        offsets = []
        end = 0
        for feature in self.features.values():
            alignment = 1 if isinstance(feature, PackedBits) else feature.value_dtype.alignment
            end = -(-end // alignment) * alignment
            offsets.append(end)
            end += feature.num_bytes
        return np.dtype(
            {
                "names": list(self.features),
                "formats": [feature.row_dtype for feature in self.features.values()],
                "offsets": offsets,
                "itemsize": -(-end // _ROW_ALIGNMENT_BYTES) * _ROW_ALIGNMENT_BYTES,
            }
        )

    @property
    def row_bytes(self) -> int:
        """Bytes that one record takes while it is packed."""
        return self.row_dtype.itemsize

    @property
    def stored_fingerprint(self) -> str:
        """A digest of the stored features (not of the fields): which bytes of a record are read."""
        text = repr([(name, repr(feature)) for name, feature in self.features.items()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _array_spec(name: str, definition: Array, feature: Raw | Int64 | Float) -> FieldSpec:
    dtype = feature.value_dtype if definition.dtype is None else definition.dtype
    shape = feature.value_shape if definition.shape is None else definition.shape
    if math.prod(shape) != feature.num_values:
        raise SchemaError(f"field {name!r}: shape {shape} must hold {feature.num_values} values")
    for what, value in (("scale", definition.scale), ("offset", definition.offset)):
        if value is not None and dtype.kind in "iub" and float(value) != int(value):
            raise SchemaError(f"field {name!r}: {what} must be a whole number for dtype {dtype}, got {value}")
    return FieldSpec(shape, dtype.newbyteorder("="))

"""Stored features: what is in each ``tf.train.Example``, and how many bytes of a row it takes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from loaderd.errors import SchemaError
from loaderd.schema.representable import as_plain, as_values

Shape = tuple[int, ...]
MAX_VALUES = 2**31 - 1
"""The most values of a feature or field: the size of a numpy dtype is a C int."""
MAX_AXES = 32
"""The most axes of a feature or field, also of one that travels. numpy has 64 at most, and a batch has one more."""


def resolve_dtype(dtype: Any) -> np.dtype[Any]:
    """``dtype`` as a numpy dtype: a name, a class, a dtype of TensorFlow or PyTorch, or a name of ml_dtypes.

    Raises SchemaError for anything that is no dtype, has no fixed size, or has a shape of its own.
    """
    resolved: np.dtype[Any] | None = None
    if type(dtype).__module__ == "torch":
        dtype = str(dtype).removeprefix("torch.")
    if dtype is not None:  # numpy takes None for float64
        with contextlib.suppress(TypeError, ValueError):
            resolved = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
    if resolved is None:
        import ml_dtypes

        scalar_type = getattr(ml_dtypes, dtype, None) if isinstance(dtype, str) else None
        if not isinstance(scalar_type, type):
            raise SchemaError(f"dtype must be one that numpy or ml_dtypes knows, got {dtype!r}")
        resolved = np.dtype(scalar_type)
    if resolved.hasobject or resolved.itemsize == 0:
        raise SchemaError(f"dtype must have a fixed size, got {resolved}; a string's is that of its bytes: S16")
    if resolved.subdtype is not None:
        base, shape = resolved.subdtype
        raise SchemaError(f"dtype must be that of one value, got {resolved}; give dtype={base} and shape={shape}")
    return resolved


def is_numpys(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is numpy's own, not one of ml_dtypes: whatever its kind, which is "f" for float8_e5m2."""
    return dtype.type.__module__ == "numpy"


def check_shape(shape: Any, of: str) -> Shape:
    """A shape as a tuple of ints; an integer is a shape of one axis. Raises SchemaError.

    It has at most MAX_AXES axes, and MAX_VALUES values.
    """
    try:
        dims = (shape,) if isinstance(shape, (Integral, str, bytes)) else tuple(shape)
    except TypeError:
        dims = (shape,)
    if not all(is_integer(dim) and int(dim) > 0 for dim in dims):
        raise SchemaError(f"{of}: shape must be a tuple of positive integers, got {shape!r:.200}")
    if len(dims) > MAX_AXES:
        raise SchemaError(f"{of}: shape must have at most {MAX_AXES} axes, got {len(dims)}: {shape!r:.200}")
    made = tuple(int(dim) for dim in dims)
    if (values := math.prod(made)) > MAX_VALUES:
        raise SchemaError(f"{of}: shape must have at most {MAX_VALUES} values, got {values}: {shape!r:.200}")
    return made


def is_integer(value: Any) -> bool:
    """Whether it is a whole number of Python's or numpy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(value: Any, what: str, least: int, most: int = 8 * MAX_VALUES) -> int:
    """``value`` as an int from ``least`` to ``most``. Raises SchemaError."""
    if not is_integer(value) or value < least:
        must = {0: "an integer from 0 on", 1: "a positive integer"}.get(least, f"an integer from {least} on")
        raise SchemaError(f"{what} must be {must}, got {value!r:.200}")
    if int(value) > most:
        raise SchemaError(f"{what} must be at most {most}, got {value!r:.200}")
    return int(value)


@dataclass(frozen=True)
class PackedBits:
    """A bytes feature that holds ``num_bits`` bits, the most significant bit of each byte first.

    The stored value must have exactly ``ceil(num_bits / 8)`` bytes. ``default`` (that many bytes) stands in
    where a record lacks the feature; without one, such a record is an error.
    """

    num_bits: int
    default: bytes | None = None

    wire_kind = "bytes"
    pad = None
    cut = as_list = varies = False
    unit_bytes = length_bytes = 1
    default_length = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bits", check_integer(self.num_bits, "PackedBits: num_bits", 1))
        if self.default is not None and not isinstance(self.default, bytes):
            raise SchemaError(f"PackedBits: default must be bytes or None, got {self.default!r:.200}")
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

    def padded(self, data: bytes) -> bytes | None:
        """``data`` if it has the bytes of the feature; else None."""
        return data if len(data) == self.num_bytes else None


class ByValue:
    """Equal to what is of its class, and has the same arguments; NaN equals NaN."""

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    def _compared(self) -> tuple[Any, ...]:
        return tuple(map(_without_nan, vars(self).values()))


def _without_nan(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_nan, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return "nan" if isinstance(value, float) and math.isnan(value) else value


class _Values(ByValue):
    """What :class:`Raw`, :class:`Int64` and :class:`Float` share: values of one dtype in a fixed shape."""

    shape: Shape
    default: Any
    pad: Any
    cut: bool

    as_list = False

    def __post_init__(self) -> None:
        """Keep default and pad without arrays and tensors; raises SchemaError where one does not fit."""
        name = type(self).__name__
        object.__setattr__(self, "shape", check_shape(self.shape, name))
        for what in ("cut", "as_list"):
            if not isinstance(value := getattr(self, what), bool):
                raise SchemaError(f"{name}: {what} must be True or False, got {value!r:.200}")
        if self.as_list and not self.shape:
            raise SchemaError(f"{name}: as_list needs a shape, whose first axis has a place for each bytes value")
        object.__setattr__(self, "default", as_plain(self.default))
        object.__setattr__(self, "pad", as_plain(self.pad))
        is_text, is_flag = self.is_text, isinstance(self.pad, bool)
        if self.pad is not None and (is_text or is_flag) and self.value_dtype.kind != "b":
            if not (is_text and self.pad is True):
                must = (
                    "True, as text is padded with zeros" if is_text else f"a value of {self.value_dtype}, such as -1"
                )
                raise SchemaError(f"{name}: pad must be {must}, got {self.pad!r:.200}")
        elif self.pad is not None:
            as_values(self.pad, self.value_dtype, (), f"{name}: pad")
        if self.default is not None:
            as_values(self.default, self.value_dtype, self._default_shape, f"{name}: default")

    def __repr__(self) -> str:
        # Without what is not given: fingerprints of schemas are older than pads.
        given = {name: value for name, value in vars(self).items() if not (name in _LATER and value in (None, False))}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _compared(self) -> tuple[Any, ...]:
        """Defaults are equal if they are stored alike: NaN equals NaN."""
        values = self.value_dtype, self.shape, self.default_bytes, self.default_length, self._pad_bytes
        return *values, self.cut, self.as_list

    @property
    def is_text(self) -> bool:
        return self.value_dtype.kind in "SU"

    @property
    def varies(self) -> bool:
        """Whether records may hold it in many lengths, and not in a few ones as short text."""
        return self.cut or self.as_list or (self.pad is not None and not self.is_text)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one value, or of a character of text."""
        return {"S": 1, "U": 4}.get(self.value_dtype.kind, self.value_dtype.itemsize)

    @property
    def length_bytes(self) -> int:
        """Bytes of a row for each of what :class:`Length` counts."""
        return self.num_bytes // self.shape[0] if self.as_list else self.unit_bytes

    @property
    def max_length(self) -> int:
        """The largest :class:`Length` that there is room for."""
        return self.num_bytes // self.length_bytes

    @property
    def _pad_bytes(self) -> bytes | None:
        """What stands behind a value that is too short, again and again; of text, a zero for each character."""
        if self.pad is None:
            return None
        if self.is_text:
            return bytes(self.unit_bytes)
        return np.asarray(self.pad, self.value_dtype).tobytes()

    def padded(self, data: bytes, num_bytes: int | None = None) -> bytes | None:
        """``data``, as a record holds it, with the padding that it lacks; None where it does not fit the feature.

        ``num_bytes``: how many there must be; without it, those of the feature.
        """
        num_bytes = self.num_bytes if num_bytes is None else num_bytes
        missing = num_bytes - len(data)
        if missing == 0:
            return data
        if missing < 0:
            return data[:num_bytes] if self.cut else None
        pad = self._pad_bytes
        return None if pad is None or missing % len(pad) else data + missing // len(pad) * pad

    @property
    def value_dtype(self) -> np.dtype[Any]:
        raise NotImplementedError

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of a row that the feature takes."""
        return self.value_dtype.itemsize * self.num_values

    @property
    def row_dtype(self) -> np.dtype[Any]:
        return np.dtype((self.value_dtype, self.shape))

    @property
    def _default_shape(self) -> Shape:
        """Of the default: with a pad, a list may be shorter than the feature, and is padded as a stored one is."""
        if self.pad is None or not self.shape or not isinstance(self.default, list):
            return self.shape
        return (min(len(self.default), self.shape[0]), *self.shape[1:]) if self.default else (0,)

    @property
    def default_bytes(self) -> bytes | None:
        if self.default is None:
            return None
        values = np.broadcast_to(np.asarray(self.default, self.value_dtype), self._default_shape)
        return self.padded(values.tobytes())

    @property
    def default_length(self) -> int:
        """The :class:`Length` of the default."""
        if self.default is None:
            return 0
        if self.is_text and not self.shape:
            return len(self.default)
        return math.prod(self._default_shape) * self.value_dtype.itemsize // self.length_bytes


_LATER = ("pad", "cut", "as_list")


@dataclass(frozen=True, eq=False, repr=False)
class Raw(_Values):
    """A bytes feature that holds the values of an array: in C order, little-endian unless ``dtype`` says otherwise.

    This is what ``tf.io.decode_raw`` reads. The stored value must have exactly the bytes of ``shape``; with ``pad``,
    it may have fewer values, and ``pad`` fills the missing places. Text is padded with zeros: ``Raw("S16",
    pad=True)`` reads ids of up to 16 bytes. ``cut``: as for :class:`Int64`.

    A record holds one bytes value. With ``as_list``, it holds one for each place of the first axis: a list of up to
    eight words is ``Raw("S16", (8,), pad=True, as_list=True)``. Each of them is padded and cut as it would be alone.
    """

    dtype: Any = "uint8"
    shape: Shape = ()
    default: Any = None
    pad: Any = None
    cut: bool = False
    as_list: bool = False

    wire_kind = "bytes"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype))
        super().__post_init__()

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return self.dtype  # type: ignore[no-any-return]  # resolved in __post_init__


@dataclass(frozen=True, eq=False, repr=False)
class Int64(_Values):
    """An int64 feature: a scalar (``shape=()``), or a list of exactly as many values as ``shape`` has.

    With ``pad``, such as -1, the list may have fewer values, also none, and ``pad`` fills the missing places;
    :class:`Length` says how many there are. With ``cut``, a longer list is no error: its first values are kept, and
    nothing behind them is looked at.

    A record without the feature needs a ``default``: a value for all places, or a list. With ``pad``, that list may
    be shorter, too: ``default=()`` makes an empty list of a feature that is not there.
    """

    shape: Shape = ()
    default: Any = None
    pad: Any = None
    cut: bool = False

    wire_kind = "int64"

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype("<i8")


@dataclass(frozen=True, eq=False, repr=False)
class Float(_Values):
    """A float feature (stored as float32): a scalar (``shape=()``), or a list of as many values as ``shape`` has.

    ``default``, ``pad`` and ``cut``: as for :class:`Int64`; ``pad`` may be NaN.
    """

    shape: Shape = ()
    default: Any = None
    pad: Any = None
    cut: bool = False

    wire_kind = "float"

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype("<f4")


@dataclass(frozen=True, eq=False)
class Length(_Values):
    """The number of values that a record holds of another ``feature``, one with a ``pad``: int32.

    It is not stored: it is counted when a record is read, and fields read it as any other feature. It counts the
    numbers of an :class:`Int64`, a :class:`Float` or a :class:`Raw`, the bytes values of a Raw with ``as_list``, and
    the characters of text. For a list that was cut, it is the number that was kept.
    """

    feature: str

    wire_kind = ""
    shape = ()
    default = pad = None
    cut = False

    def __post_init__(self) -> None:
        if not isinstance(self.feature, str):
            raise SchemaError(f"Length: feature must be a name, got {self.feature!r:.200}")

    def _compared(self) -> tuple[Any, ...]:
        return (self.feature,)

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype("<i4")


Feature = PackedBits | Raw | Int64 | Float | Length


def check_lengths(features: Mapping[str, Feature]) -> None:
    """Raise SchemaError unless each :class:`Length` is of a feature whose values can be counted."""
    for name, feature in features.items():
        if not isinstance(feature, Length):
            continue
        counted = features.get(feature.feature)
        if not isinstance(counted, (Raw, Int64, Float)) or counted.pad is None:
            there = "none of that name" if counted is None else f"{counted!r:.200}"
            raise SchemaError(
                f"feature {name!r} must be the Length of a feature with a pad, got {feature.feature!r}, "
                f"which is {there}",
                hint="Without a pad, all records hold as many values.",
            )

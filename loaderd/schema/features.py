"""Stored features: what is in each ``tf.train.Example``, and how many bytes of a row it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from loaderd.errors import SchemaError

Shape = tuple[int, ...]


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


def check_shape(shape: Any, of: str) -> Shape:
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(dim, (int, np.integer)) and dim > 0 for dim in dims):
        raise SchemaError(f"{of}: shape must be a tuple of positive integers, got {shape!r}")
    return tuple(int(dim) for dim in dims)


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
        object.__setattr__(self, "shape", check_shape(self.shape, "Raw"))
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
        object.__setattr__(self, "shape", check_shape(self.shape, "Int64"))
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
        object.__setattr__(self, "shape", check_shape(self.shape, "Float"))
        _ = self.default_bytes

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return np.dtype("<f4")

    @property
    def value_shape(self) -> Shape:
        return self.shape


Feature = PackedBits | Raw | Int64 | Float

"""What the bytes of a feature could be, judged by a sample of them: text, pictures, tensors, numbers or bits.

Bytes do not say what they hold, so each answer is a guess, and ``loaderd inspect --features`` says so beside it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from loaderd.decode.example import read_fields
from loaderd.formats.kinds import NPY_MAGICS
from loaderd.formats.npy import read_header
from loaderd.schema.fields import Bits

Values = npt.NDArray[np.uint8]
"""(records, bytes): the values of a feature, all of one length."""
Shares = npt.NDArray[np.float64]

_NO_ARRAYS = (
    (b"\xff\xd8\xff", "JPEG pictures"),
    (b"\x89PNG\r\n", "PNG pictures"),
    (b"GIF8", "GIF pictures"),
    (b"RIFF", "RIFF files (WebP or WAV)"),
    (b"\x1f\x8b\x08", "compressed with gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd"),
    (b"\x80\x04\x95", "pickles"),
    (b"\x80\x05\x95", "pickles"),
)
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
# Enough to tell values from chance: a random float32 is between these bounds one time in four.
_LEAST_VALUES = 32
_PLAUSIBLE = {"float64": (1e-12, 1e9), "float32": (1e-12, 1e8), "float16": (6e-5, 3e4)}
_PLAUSIBLE_SHARE = 0.85
_MOST_INTEGER = {"int64": 1 << 32, "int32": 1 << 24, "int16": 1 << 13, "int8": 32}
_LEAST_GAP = 0.15
# dtypes of tensorflow/core/framework/types.proto
_TENSOR_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 19: "<f2"}
_MOST_HEADER_BYTES = 256
_MOST_AXES = 8
# Of a sample of 32 MiB, which as float64 would be ten times as large.
_MOST_COLUMNS = 1 << 16
_MOST_JUDGED_BYTES = 4 << 20
_MOST_UNPACKED_BYTES = 32 << 20


def no_array(values: Sequence[bytes]) -> str:
    """What values are, in words, that no schema can decode; "" if nothing shows that they are."""
    for prefix, what in _NO_ARRAYS if values else ():
        if all(value.startswith(prefix) for value in values):
            return what
    return "compressed with zlib" if values and all(value.startswith(_ZLIB) for value in values) else ""


class Tensor(NamedTuple):
    """An array behind a header of ``offset`` bytes, which says its dtype and shape."""

    made_by: str
    offset: int
    dtype: str
    shape: tuple[int, ...]


def tensor_of(values: Sequence[bytes]) -> Tensor | None:
    """How each value is stored by ``tf.io.serialize_tensor`` or ``numpy.save``; None: some are not, or differ."""
    for read in (_serialized_tensor, _saved_array):
        found = {read(value) for value in values}
        if len(found) == 1 and None not in found:
            return found.pop()
    return None


def _serialized_tensor(value: bytes) -> Tensor | None:
    """A TensorProto: dtype = 1, tensor_shape = 2 (dim = 2 (size = 1)), tensor_content = 4."""
    parts = read_fields(value)
    if parts is None or [number for number, _ in parts] != [1, 2, 4]:
        return None
    (_, dtype), (_, shape), (_, content) = parts
    dims = read_fields(shape) if isinstance(shape, bytes) else None
    if dims is None or dtype not in _TENSOR_DTYPES or not isinstance(content, bytes):
        return None
    sizes = [read_fields(dim) if isinstance(dim, bytes) else None for _, dim in dims]
    if not all(size is not None and len(size) == 1 and isinstance(size[0][1], int) for size in sizes):
        return None
    sides = tuple(int(size[0][1]) for size in sizes)  # type: ignore[index]  # checked above
    return _tensor("tf.io.serialize_tensor", value, len(content), _TENSOR_DTYPES[dtype], sides)


def _saved_array(value: bytes) -> Tensor | None:
    if not value.startswith(NPY_MAGICS):
        return None
    try:
        header = read_header(io.BytesIO(value).read)
    except ValueError:
        return None
    dtype = header.dtype
    if not header.is_in_order or dtype.kind not in "biuf" or dtype.itemsize > 8 or not dtype.isnative:
        return None
    return _tensor("numpy.save", value, len(value) - header.start, dtype.str, header.shape)


def _tensor(made_by: str, value: bytes, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Tensor | None:
    offset = len(value) - num_bytes
    if not shape or len(shape) > _MOST_AXES or min(shape) <= 0 or offset > _MOST_HEADER_BYTES:
        return None
    fits = math.prod(shape) * np.dtype(dtype).itemsize == num_bytes
    return Tensor(made_by, offset, dtype, shape) if fits else None


def dtype_of(values: Values) -> str:
    """The dtype whose values these bytes look like, little-endian; "bits" where none is likelier."""
    values = _judged(values)
    for dtype in ("int64", "float64", "int32", "float32", "int16", "float16", "int8"):
        size = np.dtype(dtype).itemsize
        if values.shape[1] % size:
            continue
        found = np.ascontiguousarray(values).view(np.dtype(dtype).newbyteorder("<"))
        found = found[found != 0]
        if found.size < _LEAST_VALUES:
            continue
        if dtype in _MOST_INTEGER:
            most = _MOST_INTEGER[dtype]
            fits = ((found < most) & (found > -most)).all()
            if fits and (size != 2 or _halves_differ(found)):
                return "uint8" if dtype == "int8" and (found > 0).all() else dtype
            continue
        low, high = _PLAUSIBLE[dtype]
        with np.errstate(invalid="ignore"):  # some NaN are signals
            sizes = np.abs(found.astype(np.float64))
        is_plausible = np.isfinite(sizes).all() and ((sizes > low) & (sizes < high)).mean() >= _PLAUSIBLE_SHARE
        if is_plausible and _halves_differ(found):
            return dtype
    return "uint8" if is_smooth(values) else "bits"


def _judged(values: Values) -> Values:
    """As many values as are looked at, and of very long ones the first bytes."""
    if values.shape[1] > _MOST_COLUMNS:
        values = values[:, :_MOST_COLUMNS]
    return values[: max(1, _MOST_JUDGED_BYTES // values.shape[1])]


def _halves_differ(numbers: npt.NDArray[Any]) -> bool:
    """Whether the highest byte takes other values than that of the low half; those of two numbers are alike."""
    size = numbers.itemsize
    stored = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, size)
    low, high = (np.bincount(stored[:, byte], minlength=256) / len(stored) for byte in (size // 2 - 1, size - 1))
    return bool(np.abs(low - high).sum() / 2 > 0.5)


def is_smooth(values: Values) -> bool:
    """Whether neighbours are of like size, as pixels are: their highest bits agree more often than their lowest."""
    values = _judged(values)
    if values.shape[1] < 2:
        return False
    agreements = []
    for bit in (7, 0):
        bits = (values >> bit & 1).astype(np.float64)
        one, other = bits[:, :-1].ravel(), bits[:, 1:].ravel()
        agreements.append(np.corrcoef(one, other)[0, 1] if one.std() and other.std() else 0.0)
    return bool(agreements[0] - agreements[1] > _LEAST_GAP)


def set_shares(values: Values, bit_order: Any) -> Shares:
    """In how many of the records each bit is set: float64, (bits,), 0 to 1."""
    totals = np.zeros(8 * values.shape[1])
    at_once = max(1, _MOST_UNPACKED_BYTES // totals.size)
    for first in range(0, len(values), at_once):
        totals += np.unpackbits(values[first : first + at_once], axis=1, bitorder=bit_order).sum(axis=0)
    return totals / max(1, len(values))


def contradicts(shares: Shares, layout: Sequence[Bits]) -> bool:
    """Whether a bit is set that a layout takes for padding."""
    padding = shares > 0
    padding[np.concatenate([field.sources for field in layout])] = False
    return bool(padding.any())


def plane_score(shares: Shares, field: Bits) -> float:
    """How much of the differences in how often bits are set lies between planes: up to 1, an adjusted R squared.

    Where boards are read in a wrong shape, bits of many planes mix in each, and it is about 0.
    """
    if len(field.shape) != 3:
        return 0.0
    often = shares[field.sources].reshape(field.shape)
    planes = often.reshape(len(often), -1)
    if field.shape[0] == field.shape[1] != field.shape[2]:
        planes = often.reshape(-1, field.shape[-1]).T
    size = planes.shape[1]
    within = planes.var(axis=1).mean() * size / (size - 1)
    total = often.var() * often.size / (often.size - 1)
    return float(1 - within / total) if total else 0.0

"""Codes of a few bits: of one width (bases, nibbles), or of lengths of their own (Huffman's)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loaderd.errors import SchemaError
from loaderd.schema.features import Shape, check_integer, check_shape, is_integer, resolve_dtype
from loaderd.schema.field_spec import Features, FieldSpec, Tabled, check_bit_order, check_name, packed_bits_of
from loaderd.schema.representable import as_values, check_holds_numbers

if TYPE_CHECKING:
    from loaderd.kernels.prefix import PrefixLayout

Indices = npt.NDArray[np.intp]
_MOST_WIDTH, _MOST_PREFIX_BITS, _MOST_FIXED_BITS, _MOST_SYMBOLS = 4, 8, 16, 255
_MOST_VALUES = 1 << 20


class _Coded(Tabled):
    """What the two share: codes become ``values``, a table whose first axis is the code."""

    shape: Shape
    values: Any
    dtype: Any
    start: int
    feature: str
    bit_order: str

    def _check(self, most: int) -> None:
        """``most``: how many codes there can be."""
        name = type(self).__name__
        check_name(self.feature, f"{name}: feature")
        check_bit_order(self.bit_order, name)
        object.__setattr__(self, "start", check_integer(self.start, f"{name}: start", 0))
        object.__setattr__(self, "shape", check_shape(self.shape, name))
        object.__setattr__(self, "dtype", resolve_dtype(self.dtype).newbyteorder("="))
        check_holds_numbers(self.dtype, name)
        if self.values is None:
            object.__setattr__(self, "values", np.arange(most))
        try:
            values = np.array(self.values)
        except (ValueError, TypeError):
            values = np.empty(0, object)
        is_numbers = values.dtype.kind in "biuf" and values.ndim and 0 < values.size <= _MOST_VALUES
        if not is_numbers or len(values) > most:
            raise SchemaError(
                f"{name}: values must be an array of numbers for {most} codes at most, got {self.values!r:.200}"
            )
        values = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
        as_values(values.tolist(), self.dtype, values.shape, f"{name}: values")
        values.flags.writeable = False
        object.__setattr__(self, "values", values)
        check_shape((*self.shape, *values.shape[1:]), name)

    @property
    def num_places(self) -> int:
        return math.prod(self.shape)

    @property
    def table(self) -> npt.NDArray[Any]:
        """``dtype``, (codes, …): what each code becomes."""
        return self.values.astype(self.dtype)  # type: ignore[no-any-return]

    def _spec(self, name: str, features: Features, num_bits: int) -> FieldSpec:
        has = packed_bits_of(name, self.feature, features).num_bits
        if self.start + num_bits > has:
            raise SchemaError(
                f"field {name!r} needs bits {self.start}…{self.start + num_bits - 1} of feature {self.feature!r}, "
                f"which has {has}"
            )
        return FieldSpec((*self.shape, *self.values.shape[1:]), self.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Codes(_Coded):
    """Codes of ``width`` (1 to 4) bits of a :class:`PackedBits` feature, from bit ``start`` on: ``values[code]``.

    ``shape``: of the field, a code for each value. ``values`` has a number for each code, or an array: with those of
    ``np.eye(4)``, bases of two bits become (length, 4). Default: the codes themselves. A code that it does not have
    is a WorkerError.

    ``bit_order``: with ``"big"``, the first code of a byte is in its most significant bits, and the first bit of a
    code is its most significant one; with ``"little"``, both are the least significant ones.
    """

    feature: str
    width: int
    shape: Shape
    values: Any = None
    start: int = 0
    bit_order: str = "big"
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", check_integer(self.width, "Codes: width", 1, _MOST_WIDTH))
        self._check(1 << self.width)

    def spec(self, name: str, features: Features) -> FieldSpec:
        return self._spec(name, features, self.num_places * self.width)

    def words_of(self, place: Indices, num_bytes: int) -> tuple[Indices, Indices, npt.NDArray[np.uint16], int]:
        """Of codes that begin at the bits ``place`` of so many bytes: high byte, low byte, shift, and mask."""
        byte, bit = np.divmod(place, 8)
        behind = np.minimum(byte + 1, num_bytes - 1)  # of a code in one byte, no bit is taken of the other one
        mask = (1 << self.width) - 1
        if self.bit_order == "little":
            return behind, byte, bit.astype(np.uint16), mask
        return byte, behind, (16 - bit - self.width).astype(np.uint16), mask


@dataclass(frozen=True, eq=False, repr=False)
class PrefixCodes(_Coded):
    """Codes of up to 8 bits that follow each other without gaps, as in Huffman boards: ``values[symbol]`` of each.

    ``codes``: for each symbol its bits, the first one first, such as ``["0", "10", "11"]``; None: a symbol that is
    only ``fixed``. No code may begin another one. ``fixed``: symbols whose places are numbers and that have no code
    there, as kings have: ``(bit, width, symbol)`` for each; the ``width`` bits from ``bit`` of the feature on are the
    place. They are read as the codes are, by ``bit_order``. ``values``: as of :class:`Codes`; default: the numbers of
    the symbols. ``order``: the place of each code, where they are stored in another order than 0, 1, 2 …; such as
    ``[56, 57, …, 63, 48, …]`` for boards whose ranks are stored from the eighth down, and whose square 0 is a1.

    With ``end=True``, the field is the number of the bit behind the last code, of shape (). Bits that are no code,
    codes that run over the end of the feature, and places that do not exist, or are fixed twice, are a WorkerError.
    """

    feature: str
    codes: Sequence[str | None]
    shape: Shape
    values: Any = None
    start: int = 0
    fixed: Sequence[tuple[int, int, int]] = ()
    bit_order: str = "little"
    dtype: Any = "uint8"
    end: bool = False
    order: Sequence[int] | None = None

    def __post_init__(self) -> None:
        is_list = isinstance(self.codes, Iterable) and not isinstance(self.codes, (str, bytes, Mapping))
        codes = tuple(self.codes) if is_list else ()
        texts = [code for code in codes if code is not None]
        known = [code for code in texts if isinstance(code, str) and 0 < len(code) <= _MOST_PREFIX_BITS]
        if not texts or len(known) < len(texts) or set("".join(known)) - set("01") or len(codes) > _MOST_SYMBOLS:
            raise SchemaError(
                f'PrefixCodes: codes must be texts such as "0" and "10", of {_MOST_PREFIX_BITS} bits at most, or '
                f"None, of {_MOST_SYMBOLS} symbols at most, got {self.codes!r:.200}"
            )
        texts = sorted(known)
        for one, other in pairwise(texts):
            if other.startswith(one):
                raise SchemaError(f"PrefixCodes: no code may begin another one, got {one!r} and {other!r}")
        object.__setattr__(self, "codes", codes)
        fixed = self.fixed if isinstance(self.fixed, Iterable) else (self.fixed,)
        object.__setattr__(self, "fixed", tuple(map(self._fixed, fixed)))
        if not isinstance(self.end, bool):
            raise SchemaError(f"PrefixCodes: end must be True or False, got {self.end!r:.200}")
        self._check(len(codes))
        if len(self.values) < len(codes):
            raise SchemaError(f"PrefixCodes: values must be for {len(codes)} symbols, got {len(self.values)}")
        if self.order is not None:
            order = tuple(self.order) if isinstance(self.order, Iterable) else ()
            are_places = len(order) == self.num_places and all(map(is_integer, order))
            if not are_places or sorted(order) != [*range(self.num_places)]:
                raise SchemaError(
                    f"PrefixCodes: order must have each place from 0 to {self.num_places - 1} once, "
                    f"got {self.order!r:.200}"
                )
            object.__setattr__(self, "order", tuple(map(int, order)))

    @property
    def places(self) -> Indices:
        """intp, (places,): ``order``, also where it is left out."""
        return np.arange(self.num_places) if self.order is None else np.asarray(self.order, np.intp)

    def layout(self, what: str, first_byte: int, num_bits: int) -> PrefixLayout:
        """How to read them in rows whose feature of ``num_bits`` begins at ``first_byte``; ``what``: for errors."""
        from loaderd.kernels.prefix import PrefixLayout  # for those who have such codes

        is_little = self.bit_order == "little"
        return PrefixLayout(what, first_byte, num_bits, self.start, self.codes, self.places, self.fixed, is_little)

    @property
    def is_of_symbols(self) -> bool:
        """Whether the values are the numbers of the symbols, as uint8, as they are by default."""
        return self.dtype == np.uint8 and np.array_equal(self.values[: len(self.codes)], np.arange(len(self.codes)))

    def _fixed(self, given: Any) -> tuple[int, int, int]:
        if not isinstance(given, (list, tuple)) or len(given) != 3:
            raise SchemaError(f"PrefixCodes: each of fixed must be (bit, width, symbol), got {given!r:.200}")
        bit, width, symbol = given
        return (
            check_integer(bit, "PrefixCodes: bit of fixed", 0),
            check_integer(width, "PrefixCodes: width of fixed", 1, _MOST_FIXED_BITS),
            check_integer(symbol, "PrefixCodes: symbol of fixed", 0, len(self.codes) - 1),
        )

    def spec(self, name: str, features: Features) -> FieldSpec:
        has = packed_bits_of(name, self.feature, features).num_bits
        if any(bit + width > has for bit, width, _ in self.fixed):
            raise SchemaError(f"field {name!r}: the places of fixed must be in the {has} bits of {self.feature!r}")
        if len(self.fixed) > self.num_places:
            raise SchemaError(f"field {name!r} has {self.num_places} places, of which {len(self.fixed)} are fixed")
        num_codes = self.num_places - len(self.fixed)
        if self.start + num_codes > has:  # each has a bit or more
            raise SchemaError(f"field {name!r}: {num_codes} codes from bit {self.start} on need more than {has} bits")
        spec = self._spec(name, features, 1)
        return FieldSpec((), np.dtype(np.int32)) if self.end else spec

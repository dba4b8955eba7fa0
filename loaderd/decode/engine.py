"""What an engine is, and where the bits that it decodes are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from loaderd.schema import Bits

AnyArray = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]


class Engine(Protocol):
    """Decodes one field from rows. Not thread-safe: it owns scratch memory."""

    @property
    def scratch_record_bytes(self) -> int:
        """Bytes of scratch memory for each record of a chunk."""

    def reserve(self, max_records: int) -> None:
        """Allocate the scratch memory: from then on ``decode`` takes up to ``max_records`` records a call."""

    def decode(self, rows: Bytes, out: AnyArray) -> None:
        """Write the field of ``rows``, uint8 (n, row_bytes), to ``out`` (n, *shape). Both must be C-contiguous.

        The row must have a byte behind a feature of packed bits, as ``Schema.row_dtype`` has it.
        """


@dataclass(frozen=True, eq=False)
class BitLayout:
    """Where the bits of a field are in a row, and what they become.

    The bits start ``lead`` bits (0…7) into byte ``first_byte``. ``order`` gives the stored channel of each channel of
    the output, and ``scale`` what a set bit of it becomes: intp and the field's dtype, (num_channels,).

    ``is_little``: the least significant bit of a byte comes first. Where ``plane_bytes`` is not 0, each
    ``plane_bytes`` bytes hold ``plane_bits`` values, and padding behind them.
    """

    first_byte: int
    lead: int
    num_bits: int
    order: Indices
    scale: AnyArray
    is_little: bool = False
    plane_bits: int = 0
    plane_bytes: int = 0

    @classmethod
    def of(cls, field: Bits, feature_offset: int) -> BitLayout:
        return cls(
            first_byte=feature_offset + field.start // 8,
            lead=field.start % 8,
            num_bits=field.num_bits,
            order=field.order,
            scale=field.channel_scale,
            is_little=field.bit_order == "little",
            plane_bits=0 if field.plane_bytes is None else field.plane_bits,
            plane_bytes=field.plane_bytes or 0,
        )

    @property
    def num_bytes(self) -> int:
        """How many bytes the bits touch."""
        if not self.plane_bytes:
            return (self.lead + self.num_bits + 7) // 8
        num_planes = self.num_bits // self.plane_bits
        return (num_planes - 1) * self.plane_bytes + (self.plane_bits + 7) // 8

    @property
    def columns(self) -> slice:
        """The bytes that the bits touch, as columns of the rows."""
        return slice(self.first_byte, self.first_byte + self.num_bytes)

    @property
    def values(self) -> slice:
        """The bits of the field among all bits of ``columns``."""
        return slice(self.lead, self.lead + self.num_bits)

    @property
    def group_bytes(self) -> int:
        """The fewest whole bytes that hold all channels a whole number of times."""
        return math.lcm(len(self.order), 8) // 8

    @property
    def source(self) -> Indices:
        """intp, (num_bits,): from which bit of ``columns`` each value comes; 0 is a byte's most significant bit."""
        value = np.arange(self.num_bits)
        channel = value % len(self.order)
        source: Indices = self.lead + value - channel + self.order[channel]
        if self.plane_bytes:
            source += value // self.plane_bits * (8 * self.plane_bytes - self.plane_bits)
        if self.is_little:
            source += 7 - 2 * (source % 8)
        return source

    @property
    def is_plain(self) -> bool:
        """Whether bits follow each other, the most significant of a byte first."""
        return not self.is_little and not self.plane_bytes

    @property
    def keeps_to_bytes(self) -> bool:
        """Whether each value comes from the very byte that holds its place."""
        place = self.lead + np.arange(self.num_bits)
        return np.array_equal(self.source // 8, place // 8)

    def in_stored_order(self, first_byte: int, num_bits: int) -> BitLayout:
        """The layout of the first ``num_bits`` bits once they are in order, from ``first_byte`` on."""
        order = np.arange(len(self.order))
        return BitLayout(first_byte, 0, num_bits, order, self.scale)

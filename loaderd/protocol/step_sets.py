"""A set of steps as text, in a message: a bit for each step, in hexadecimal digits, eight steps in two of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_SPAN = 1 << 20
"""Steps that the text can reach over; it is as long then as a text may be that comes from a consumer."""


def text_of(steps: Iterable[int], first: int) -> str:
    """Those of ``steps`` that are ``first`` or behind it; without those that are ``MAX_SPAN`` or more behind it."""
    places = np.array([step - first for step in steps], np.int64)
    places = places[(places >= 0) & (places < MAX_SPAN)]
    bits = np.zeros(places.max(initial=-1) + 1, bool)
    bits[places] = True
    return np.packbits(bits).tobytes().hex()


def steps_in(text: str, first: int) -> list[int]:
    """The way back, in rising order. Raises ValueError where there are no such steps."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))
    return [first + place for place in np.flatnonzero(bits).tolist()]

"""A set of steps as text, for messages: a bit for each step, in hexadecimal digits, two for eight steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

MAX_SPAN = 1 << 20
"""How many steps the text can cover: it is then as long as a consumer's text may be."""


def text_of(steps: Iterable[int], first: int) -> str:
    """The text for those of ``steps`` that are in ``first`` .. ``first + MAX_SPAN - 1``; others are left out."""
    places = np.array([step - first for step in steps], np.int64)
    places = places[(places >= 0) & (places < MAX_SPAN)]
    bits = np.zeros(places.max(initial=-1) + 1, bool)
    bits[places] = True
    return np.packbits(bits).tobytes().hex()


def steps_in(text: str, first: int) -> list[int]:
    """The steps that :func:`text_of` wrote, in rising order. Raises ValueError for any other text."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8))
    return [first + place for place in np.flatnonzero(bits).tolist()]

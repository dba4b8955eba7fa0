"""Permutations that are a pure function of a key, the same on every machine and with every numpy.

Each of the n numbers gets 32 pseudo-random bits (splitmix64: Steele, Lea, Flood 2014, "Fast splittable pseudorandom
number generators"); sorting the numbers by them, stably, permutes them. A stable sort has one answer, so there is no
room for the version of a library to matter, as there is in a library's own shuffle. Two equal draws
(a hundred pairs in a million numbers) leave two numbers in their order, which no batch will notice.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def key_of(*parts: int | str) -> int:
    """A 64-bit key of any integers and strings: equal parts give equal keys, on every machine."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def random_words(key: int, count: int) -> npt.NDArray[np.uint64]:
    """uint64, (count,): the first numbers of the splitmix64 generator that starts at ``key``."""
    words = np.arange(1, count + 1, dtype=np.uint64)
    words *= _GOLDEN
    words += np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    words ^= words >> np.uint64(30)
    words *= _MIX_1
    words ^= words >> np.uint64(27)
    words *= _MIX_2
    words ^= words >> np.uint64(31)
    return words


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """int64, (count,): the numbers 0 to count - 1 in the order that ``key`` gives. About 12 ns a number.

    numpy sorts 16-bit keys stably by radix, five times faster than it sorts longer ones; so two such sorts, the lower
    half of the draws first, make one.
    """
    draws = random_words(key, count)
    by_low = np.argsort(draws.astype(np.uint16), kind="stable")
    high = (draws >> np.uint64(16)).astype(np.uint16)
    return by_low[np.argsort(high[by_low], kind="stable")]

"""Permutations that are a pure function of a key, the same on every machine and with every numpy.

**By sorting**, for few numbers: each of them gets 32 pseudo-random bits (splitmix64: Steele, Lea, Flood 2014, "Fast
splittable pseudorandom number generators"); sorting the numbers by them, stably, permutes them. A stable sort has one
answer, so the version of a library cannot matter, as it could with a library's own shuffle. Two equal draws
(a hundred pairs in a million numbers) leave two numbers in their order, which no batch will notice.

**By mixing**, for many: where number i goes is computed from i alone, so whoever needs the places of some numbers
computes those and no others. In words of b bits, the fewest that hold all numbers, each of these steps can be undone,
so together they permute the words: multiply by an odd number, add a number, exclusive-or with the upper half. Factors
and summands are drawn from the key, anew for each of five rounds; after four, neither neighbours nor low bits show a
trace of where they were. A word that is none of the numbers is mixed again until it is one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loaderd.randomness import splitmix64


def random_words(key: int, count: int, first: int = 0) -> npt.NDArray[np.uint64]:
    """uint64, (count,): numbers of the splitmix64 generator that starts at ``key``, from number ``first`` on."""
    return splitmix64(np.uint64(key), np.arange(first, first + count, dtype=np.uint64))


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """int64, (count,): the numbers 0 to count - 1 in the order that ``key`` gives. About 12 ns a number.

    numpy sorts 16-bit keys stably by radix, five times faster than it sorts longer ones; so two such sorts, the lower
    half of the draws first, make one.
    """
    draws = random_words(key, count)
    by_low = np.argsort(draws.astype(np.uint16), kind="stable")
    high = (draws >> np.uint64(16)).astype(np.uint16)
    return by_low[np.argsort(high[by_low], kind="stable")]


_ROUNDS = 5
# Up to this count, the mixed words have too few bits to be mixed well, and sorting costs nothing.
_SORTED_COUNT = 4096


def places(key: int, count: int, start: int, stop: int) -> npt.NDArray[np.int64]:
    """int64, (stop - start,): where a permutation of 0 to count - 1 puts the numbers ``start`` to ``stop - 1``.

    2 ns a number where it is compiled, else 12 to 25. Where ``count`` is at most 4,096, all numbers are sorted, for
    12 ns each, whatever part is asked for. Raises ValueError if ``count`` is above 2**32.
    """
    if count <= _SORTED_COUNT:
        return permutation(key, count)[start:stop]
    if count > 1 << 32:
        raise ValueError(f"count must be at most 2**32, got {count}")
    from loaderd.kernels.mixing import mixed  # for workers: a consumer plans, and needs no kernels

    draws = random_words(key, 2 * _ROUNDS).astype(np.uint32).reshape(_ROUNDS, 2)
    draws[:, 0] |= 1
    return mixed(start, stop, count, draws)

"""Permutations: of every number once, the same for ever, and none more likely than another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.permutation import permutation, places, random_words
from loaderd.randomness import key_of

pytestmark = pytest.mark.usefixtures("kernels")


@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 5000) | st.just(70_000))
def test_numbers_come_by_their_draws_and_equal_draws_in_order(key: int, count: int):
    draws = random_words(key, count).astype(np.uint32)
    assert np.array_equal(permutation(key, count), np.argsort(draws, kind="stable"))


def test_the_order_never_changes():
    """A position that was saved by one version must mean the same batch in the next."""
    assert key_of("rows", 0, 1, 2) == 0x861C29189A3AE701
    assert permutation(7, 12).tolist() == [10, 11, 6, 7, 0, 3, 4, 9, 8, 2, 5, 1]
    assert places(7, 12, 3, 7).tolist() == [7, 0, 3, 4]
    assert places(7, 5000, 3, 7).tolist() == [4952, 1069, 160, 460]
    assert random_words(0, 2).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4], "splitmix64's own test vector"
    assert random_words(5, 4, first=3).tolist() == random_words(5, 7)[3:].tolist()


def test_keys_tell_their_parts_apart():
    keys = [
        key_of("a", 1, 2),
        key_of("a", 12),
        key_of("a1", 2),
        key_of("a", "1", 2),
        key_of("b", 1, 2),
        key_of("a", 2, 1),
    ]
    assert len(set(keys)) == len(keys)


def test_each_order_of_four_is_as_likely_as_another():
    counts = Counter(tuple(permutation(key_of("t", number), 4).tolist()) for number in range(24_000))
    assert len(counts) == 24
    chi_square = sum((count - 1000) ** 2 / 1000 for count in counts.values())
    assert chi_square < 49.7, "one chance in a thousand, with 23 degrees of freedom"


@given(key=st.integers(0, 2**64 - 1), count=st.integers(1, 20_000), data=st.data())
def test_a_part_of_the_places_is_a_part_of_all_of_them(key: int, count: int, data: st.DataObject):
    whole = places(key, count, 0, count)
    assert whole.dtype == np.int64 and np.array_equal(np.sort(whole), np.arange(count))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert np.array_equal(places(key, count, start, stop), whole[start:stop])


@pytest.mark.parametrize("count", [4_097, 65_536, 250_000, 1 << 18])
def test_mixed_places_are_as_even_as_chance(count: int):
    """Where a number goes says nothing of where its neighbours go; the worst of 160 tables is what chance gives."""
    side = 16
    for seed in range(10):
        found = places(key_of("even", seed), count, 0, count)
        buckets = found * side // count
        pairs = {
            "start and place": (np.arange(count) * side // count, buckets),
            "place and next place": (buckets[:-1], buckets[1:]),
            "place and place after 8": (buckets[:-8], buckets[8:]),
            "low bits": (np.arange(count) % side, found % side),
        }
        for name, (one, other) in pairs.items():
            table = np.bincount(one * side + other, minlength=side * side)
            expected = len(one) / side**2
            chi_square = float(((table - expected) ** 2 / expected).sum())
            assert chi_square < 360, f"{name}: 160 tables of 225 degrees of freedom; one in a million is above"


def test_more_numbers_than_words_are_refused():
    with pytest.raises(ValueError, match=r"at most 2\*\*32, got 4294967297"):
        places(0, (1 << 32) + 1, 0, 1)
    assert places(0, 1 << 32, 5, 6).tolist() != [5]


_LARGE = st.integers(4_097, 20_000) | st.sampled_from([1 << 18, (1 << 31) + 1, (1 << 32) - 1, 1 << 32])


@given(key=st.integers(0, 2**64 - 1), count=_LARGE, data=st.data())
def test_a_number_is_mixed_as_a_plain_loop_does_it(key: int, count: int, data: st.DataObject):
    start = data.draw(st.integers(0, count) | st.integers(count - 40, count))
    stop = min(count, start + data.draw(st.integers(0, 40)))
    draws = random_words(key, 10).astype(np.uint32).tolist()
    bits = (count - 1).bit_length()

    def place(number: int) -> int:
        for factor, summand in zip(draws[::2], draws[1::2], strict=True):
            number = (number * (factor | 1) + summand) % (1 << bits)
            number ^= number >> (bits + 1) // 2
        return number if number < count else place(number)

    assert places(key, count, start, stop).tolist() == [place(number) for number in range(start, stop)]

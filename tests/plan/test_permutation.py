"""Permutations: of every number once, the same for ever, and none more likely than another."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loaderd.plan.permutation import key_of, permutation, random_words


@given(key=st.integers(0, 2**64 - 1), count=st.integers(0, 5000))
def test_every_number_comes_once(key: int, count: int):
    order = permutation(key, count)
    assert order.dtype == np.int64 and np.array_equal(np.sort(order), np.arange(count))
    assert np.array_equal(order, permutation(key, count))


@given(key=st.integers(0, 2**64 - 1), count=st.sampled_from([0, 1, 100, 70_000]))
def test_numbers_come_by_their_draws_and_equal_draws_in_order(key: int, count: int):
    draws = random_words(key, count).astype(np.uint32)
    assert np.array_equal(permutation(key, count), np.argsort(draws, kind="stable"))


def test_the_order_never_changes():
    """A position that was saved by one version must mean the same batch in the next."""
    assert key_of("rows", 0, 1, 2) == 0x861C29189A3AE701
    assert permutation(7, 12).tolist() == [10, 11, 6, 7, 0, 3, 4, 9, 8, 2, 5, 1]
    assert random_words(0, 2).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4], "splitmix64's own test vector"


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


def test_places_of_a_large_permutation_are_even():
    order = permutation(key_of("large"), 1 << 17)
    assert abs(np.corrcoef(order, np.arange(len(order)))[0, 1]) < 0.01
    quarter = order[: len(order) // 4]
    assert abs(float(quarter.mean()) / len(order) - 0.5) < 0.005
    assert np.mean(np.abs(np.diff(order)) == 1) < 1e-4

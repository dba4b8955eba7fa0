"""Random numbers of records: the same for ever, and as random in every direction as numbers should be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import loaderd
from loaderd.errors import OptionError
from loaderd.randomness import key_of, splitmix64

STREAMS = ("board", "symmetry", "noise")
NUM_EPOCHS, NUM_RECORDS, NUM_DRAWS = 4, 6000, 3


def record_keys(epoch: int, seed: int = 0, shard: str = "games.tfrecord") -> npt.NDArray[np.uint64]:
    """As the workers make them."""
    return splitmix64(np.uint64(key_of("record", seed, epoch, shard)), np.arange(NUM_RECORDS, dtype=np.uint64))


def test_the_numbers_never_change():
    """A record must be augmented in the next version as it is in this one: a position may be saved in between."""
    random = loaderd.RecordRandom([0, 1, 2**64 - 1], "board")
    assert random.integers(0, 1000, 3).tolist() == [[737, 321, 864], [435, 243, 984], [551, 310, 332]]
    assert random.random().tolist() == [0.6900568120232863, 0.22407791841630498, 0.59595341526594]
    np.testing.assert_allclose(
        random.normal(), [1.1451072186415994, -0.43312330384482434, 0.8297401292863401], rtol=1e-12
    )
    assert random.integers(-5, 2**32 - 5).tolist() == [697991990, 3905358526, 1885654713]
    assert record_keys(epoch=3, seed=1)[[0, 5999]].tolist() == [15837858414595373218, 3929087044308267650]


def plain_splitmix64(state: int) -> Iterator[int]:
    """The generator as its authors wrote it, in integers of any size."""
    mask = (1 << 64) - 1
    while True:
        state = state + 0x9E3779B97F4A7C15 & mask
        word = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        word = (word ^ word >> 27) * 0x94D049BB133111EB & mask
        yield word ^ word >> 31


@given(key=st.integers(0, 2**64 - 1), low=st.integers(-(2**40), 2**40), size=st.integers(1, 2**32))
def test_integers_are_those_of_a_plain_generator(key: int, low: int, size: int):
    plain = plain_splitmix64(next(plain_splitmix64(key ^ key_of("stream", "s"))))
    found = loaderd.RecordRandom([key], "s").integers(low, low + size, 5)
    assert found.tolist() == [[low + (next(plain) * size >> 64) for _ in range(5)]]


def drawn(how: str, **arguments: Any) -> npt.NDArray[Any]:
    """(epochs, streams, records, draws)."""
    return np.stack(
        [
            [getattr(loaderd.RecordRandom(record_keys(epoch), stream), how)(**arguments) for stream in STREAMS]
            for epoch in range(NUM_EPOCHS)
        ]
    )


def chi_square(counts: npt.NDArray[np.int64]) -> float:
    """In standard deviations from what equal chances lead to expect, of ``counts``, of any shape."""
    expected = counts.sum() / counts.size
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


@pytest.mark.parametrize("sides", [2, 3, 8, 100])
def test_integers_are_equally_likely_and_independent(sides: int):
    rolls = drawn("integers", low=0, high=sides, shape=NUM_DRAWS)
    assert abs(chi_square(np.bincount(rolls.ravel(), minlength=sides))) < 4
    for axis in range(rolls.ndim):  # over epochs, streams, records and draws
        left, right = (np.delete(rolls, end, axis).ravel() for end in (-1, 0))
        assert abs(chi_square(np.bincount(left * sides + right, minlength=sides**2))) < 4, axis


def test_each_of_a_large_range_is_as_likely():
    size = 3 << 30  # with 32 bits of chance, one number of three would come twice as often as the others
    rolls = drawn("integers", low=-7, high=size - 7, shape=NUM_DRAWS).ravel()
    assert rolls.min() >= -7 and rolls.max() < size - 7
    assert abs(chi_square(np.bincount((rolls + 7) % 3))) < 4
    assert abs(chi_square(np.bincount((rolls + 7) // (size // 16)))) < 4


def test_floats_are_uniform_and_uncorrelated():
    values = drawn("random", shape=NUM_DRAWS)
    assert values.min() >= 0 and values.max() < 1
    assert abs(chi_square(np.bincount((values * 64).astype(int).ravel()))) < 4
    check_uncorrelated(values)


def test_normal_numbers_have_the_moments_of_their_distribution():
    values = drawn("normal", shape=NUM_DRAWS)
    for power, moment in enumerate((0, 1, 0, 3, 0, 15), 1):
        error = np.sqrt((values ** (2 * power)).mean() / values.size)
        assert abs((values**power).mean() - moment) < 4 * error, power
    assert abs((values < -1).mean() - 0.158655) < 0.003
    check_uncorrelated(values)


def check_uncorrelated(values: npt.NDArray[np.float64]) -> None:
    for axis in range(values.ndim):
        left, right = (np.delete(values, end, axis).ravel() for end in (-1, 0))
        assert abs(np.corrcoef(left, right)[0, 1]) < 4 / np.sqrt(left.size), axis


@given(shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=4))
def test_calls_draw_on_from_each_other(shapes: list[list[int]]):
    by_one, by_shape = (loaderd.RecordRandom(np.arange(3), "s") for _ in range(2))
    for shape in shapes:
        found = by_shape.random(shape)
        assert found.shape == (3, *shape)
        each = [by_one.random() for _ in range(int(np.prod(shape)))]
        assert found.reshape(3, -1).T.tolist() == [values.tolist() for values in each]
    assert np.array_equal(by_one.normal(), by_shape.normal())
    assert np.array_equal(by_one.integers(0, 9, 2), by_shape.integers(0, 9, (2,)))


def test_a_record_draws_the_same_in_any_company():
    keys = record_keys(0)
    together = loaderd.RecordRandom(keys, "s").random()
    assert np.array_equal(loaderd.RecordRandom(keys[[70, 3]], "s").random(), together[[70, 3]])
    others = [record_keys(1), record_keys(0, seed=1), record_keys(0, shard="other.tfrecord")]
    every = np.concatenate([together, *(loaderd.RecordRandom(other, "s").random() for other in others)])
    assert len(np.unique(every)) == 4 * NUM_RECORDS


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int64, np.uint64])
def test_integers_of_numpy_are_as_pythons(kind: Any):
    found, expected = (loaderd.RecordRandom(np.arange(4), "s") for _ in range(2))
    for low, high in (0, 5), (np.iinfo(kind).min, np.iinfo(kind).min + 100):
        numbers = found.integers(kind(low), kind(high), kind(100))
        assert numbers.dtype == np.int64 and np.array_equal(numbers, expected.integers(low, high, 100))
    assert np.array_equal(found.random((kind(100), kind(2))), expected.random((100, 2)))
    assert np.array_equal(found.normal(kind(3)), expected.normal(3))


@pytest.mark.parametrize(
    ("low", "high"),
    [
        *((0, 0), (3, 2), (0, 2**32 + 1), (np.uint8(5), np.uint8(3)), (0.5, 3.5), (0, 2.0), (0, None)),
        *((2**63, 2**63 + 5), (2**63 - 1, 2**63 + 1), (-(2**63) - 1, 0), (0, np.array([2, 3]))),
    ],
)
def test_a_range_that_cannot_be_drawn_from_is_refused(low: Any, high: Any):
    said = f"integers of int64, low < high <= low + 2**32, got {low!r} and {high!r}"
    with pytest.raises(OptionError, match=re.escape(said)):
        loaderd.RecordRandom(np.arange(3), "s").integers(low, high)


@pytest.mark.parametrize("shape", [-1, (2, -1)])
def test_a_negative_shape_is_refused_and_draws_nothing(shape: Any):
    draws, others = (loaderd.RecordRandom(np.arange(3), "s") for _ in range(2))
    with pytest.raises(OptionError, match="no negative numbers"):
        draws.random(shape)
    assert np.array_equal(draws.random(), others.random())

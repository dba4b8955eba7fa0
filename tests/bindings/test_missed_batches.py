"""Errors after which the same batch would come next: an iterator of TensorFlow's cannot ask for it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import loaderd_tf
import pytest
import tensorflow as tf

import loaderd
from loaderd.errors import CorruptRecordError, StorageError
from loaderd.kernels.crc import framed
from tests.helpers.numbered import Numbered

AWAY, DAMAGED, CLOSED = "storage does not answer", "the record is damaged", "the loader is closed"
MISSED, LAST_MISSED = (f"batch {step} of this pass was not delivered" for step in (3, 9))


class Failing:
    """A data set of 10 batches, whose first records are 0, 10, …; storage is ``away`` at some of them, once."""

    def __init__(self, loader: loaderd.Loader, patch: pytest.MonkeyPatch, broken: Sequence[int] = ()) -> None:
        self.loader = loader
        self.ds = loaderd_tf.from_loader(self.loader, "id")
        self.away: set[int] = set()
        fetch = self.loader._stream.fetch

        def fetch_from_storage(pass_: Any, step: int) -> Any:
            if step in self.away:
                self.away.remove(step)
                raise StorageError(AWAY)
            if step in broken:
                return CorruptRecordError(DAMAGED)
            return fetch(pass_, step)

        patch.setattr(self.loader._stream, "fetch", fetch_from_storage)


@pytest.fixture
def make_failing(numbered: Numbered, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Failing]:
    def make(broken: Sequence[int] = ()) -> Failing:
        return Failing(numbered.loader([100], shuffle=False), monkeypatch, broken)

    return make


@pytest.fixture
def failing(make_failing: Callable[..., Failing]) -> Failing:
    return make_failing()


def taken(iterator: Any, by: Callable[[Any], Any] = next) -> list[Any]:
    """Of each batch the first record, or what its error says."""
    found: list[Any] = []
    while True:
        try:
            found.append(int(by(iterator)[0]))
        except (StopIteration, tf.errors.OutOfRangeError):
            return found
        except tf.errors.UnknownError as error:
            found.append(next(words for words in (AWAY, DAMAGED, CLOSED, MISSED, LAST_MISSED) if words in str(error)))


@pytest.mark.parametrize("in_graph", [False, True])
def test_no_batch_is_missing_without_a_word(failing: Failing, in_graph: bool):
    begin = failing.loader.next_position()
    failing.away = {3}
    by = tf.function(lambda iterator: next(iterator)) if in_graph else next
    assert taken(iter(failing.ds), by) == [0, 10, 20, AWAY, *7 * [MISSED]]
    failing.loader.load_state_dict(failing.loader.after(begin, 3))  # as the error says
    assert taken(iter(failing.ds)) == list(range(30, 100, 10))
    assert taken(iter(failing.ds)) == list(range(0, 100, 10))


@pytest.mark.parametrize(("errors", "step"), [(1, 4), (3, 6)])
def test_who_seeks_behind_a_missed_batch_leaves_it_out(failing: Failing, errors: int, step: int):
    """After some errors of the iterator that missed it, in the same pass."""
    begin = failing.loader.next_position()
    failing.away = {3}
    iterator = iter(failing.ds)
    for _ in range(3):
        next(iterator)
    for _ in range(errors):
        with pytest.raises(tf.errors.UnknownError, match=f"{AWAY}|{MISSED}"):
            next(iterator)
    failing.loader.load_state_dict(failing.loader.after(begin, step))
    assert taken(iter(failing.ds)) == list(range(step * 10, 100, 10))


@pytest.mark.parametrize("repeated", [False, True])
def test_the_last_batch_of_a_pass_is_missed_as_any_other(failing: Failing, repeated: bool):
    failing.away = {9}
    found = taken(iter(failing.ds.repeat(2) if repeated else failing.ds))
    again = list(range(0, 100, 10)) if repeated else []
    assert found == [*range(0, 90, 10), AWAY, LAST_MISSED, *again]


def test_an_iterator_goes_on_behind_a_broken_batch(make_failing: Callable[..., Failing]):
    assert taken(iter(make_failing([3, 4]).ds)) == [0, 10, 20, DAMAGED, DAMAGED, *range(50, 100, 10)]


def test_only_the_iterator_that_missed_a_batch_is_refused(failing: Failing, tmp_path: Path):
    iterator, other = iter(failing.ds), iter(failing.ds)
    assert [int(next(each)[0]) for each in (iterator, other, other)] == [0, 0, 10]
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "checkpoint"))
    failing.away = {3}
    assert [int(next(iterator)[0]) for _ in range(2)] == [10, 20]
    for words in (AWAY, MISSED, MISSED):
        with pytest.raises(tf.errors.UnknownError, match=words):
            next(iterator)
    assert taken(other) == list(range(20, 100, 10))
    for restored in (iter(failing.ds), iterator):
        tf.train.Checkpoint(iterator=restored).read(path).assert_consumed()
        assert taken(restored) == list(range(10, 100, 10))


def test_a_loader_that_has_ended_says_so_itself(failing: Failing):
    failing.away = {3}
    iterator = iter(failing.ds)
    for _ in range(3):
        next(iterator)
    with pytest.raises(tf.errors.UnknownError, match=AWAY):
        next(iterator)
    failing.loader.close()
    assert taken(iterator)[:6] == 6 * [CLOSED]


def test_a_batch_without_records_does_not_come(numbered: Numbered):
    shards = numbered.write([20, 20, 25])
    shards[1].write_bytes(20 * framed(b""))
    dataset = loaderd_tf.make_dataset(
        shards, numbered.schema, structure="id", batch_size=10, workers=1, shuffle=False, on_corrupt="skip_any"
    )
    for _ in range(2):
        assert [ids.numpy().tolist() for ids in dataset] == [
            list(range(first, min(first + 10, 65))) for first in (0, 10, 40, 50, 60)
        ]
    assert dataset.statistics().records_skipped == 40
    dataset.close()

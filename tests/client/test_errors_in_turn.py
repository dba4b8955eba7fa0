"""An error takes the place of its batch, and iterating goes on behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

import loaderd
from loaderd.errors import CorruptRecordError, LoaderdError, WorkerError
from tests.client.damage import damage_unseen
from tests.helpers.numbered import Numbered


def odd(numbers: Any) -> Any:
    """Refuses records 25 and 77."""
    if 25 in numbers or 77 in numbers:
        raise ValueError("no")
    return numbers


def test_an_iterator_goes_on_behind_a_broken_batch(numbered: Numbered):
    fields = {**numbered.schema.fields, "x": loaderd.Derived(odd, "id", (), "int64")}
    schema = loaderd.Schema(numbered.schema.features, fields)
    with loaderd.Loader(numbered.write([100]), schema, batch_size=10, shuffle=False, workers=2) as loader:
        found = going_on(iter(loader), lambda batch: batch["id"].tolist())
        assert [type(one) for one in found].count(WorkerError) == 2
        assert [isinstance(one, WorkerError) for one in found].index(True) == 2
        good = [one for one in found if not isinstance(one, WorkerError)]
        assert list(chain(*good)) == [n for n in range(100) if n // 10 not in (2, 7)]
        assert loader.position.epoch == 1 and loader.statistics().starts == 1


def going_on(batches: Iterator[loaderd.Batch], check: Callable[[loaderd.Batch], Any]) -> list[Any]:
    """What each batch is, or the error in its place."""
    found: list[Any] = []
    while True:
        try:
            found.append(check(next(batches)))
        except StopIteration:
            with pytest.raises(StopIteration):  # and stays at its end
                next(batches)
            return found
        except LoaderdError as error:
            found.append(error)


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_iterator_of_growing_data_goes_on(numbered: Numbered, ahead: int):
    """Behind a shard that could not be indexed when an epoch began, which is when all of the one before was taken."""
    shards = numbered.write([40, 40, 20])
    whole = shards[2].read_bytes()
    dataset = loaderd.Dataset(str(shards[0].parent / "*"), numbered.schema, refresh="epoch")
    shards[2].unlink()
    with loaderd.Loader(dataset, batch_size=10, epochs=3, workers=1) as loader:
        batches = loader._iterate(lambda batch: lambda: batch, ahead)
        first = [numbered.check(next(batches)) for _ in range(8)]
        shards[2].write_bytes(whole[:-5])
        with pytest.raises(CorruptRecordError):
            next(batches)
        shards[2].write_bytes(whole)
        rest = going_on(batches, numbered.check)
    assert sorted(chain(*first)) == list(range(80))
    assert sorted(chain(*rest[:10])) == sorted(chain(*rest[10:])) == list(range(100))


def test_what_is_skipped_is_counted_when_its_batch_is_taken(numbered: Numbered):
    shards = numbered.write([100])
    with numbered.loader(shards, shuffle=False, on_corrupt="skip_record") as loader:
        damage_unseen(shards[0], 77)
        batches, counts = [], []
        for batch in loader:
            batches.append(numbered.check(batch))
            counts.append(loader.statistics().records_skipped)
        assert list(chain(*batches)) == [n for n in range(100) if n != 77] and counts == [0] * 7 + [1] * 3
        assert [len(numbers) for numbers in batches] == [10] * 7 + [9, 10, 10], "no other record moves"
        for step, count in ((5, 1), (6, 1), (7, 2), (8, 2)):  # what was on its way is void
            loader.load_state_dict(loaderd.Position(0, step))
            next(iter(loader))
            assert loader.statistics().records_skipped == count
        assert {damage.record for damage in loader.statistics().damages} == {77}

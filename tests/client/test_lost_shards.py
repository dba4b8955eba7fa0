"""Shards that cannot be read, from the beginning or from some time on: what is missing, and what is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

import loaderd
from loaderd.errors import NoShardsError, ShardReadError
from loaderd.plan.passes import Pass
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import kill, newest_daemon


def make_unreadable(path: Path) -> None:
    """Root may read any file but this one: it is listed, and can't be read at byte 0, however often that is tried."""
    path.unlink()
    # Two shards of a test must not be the same file.
    path.symlink_to("/proc/self/clear_refs" if path.name < "002" else "/proc/thread-self/clear_refs")


@pytest.mark.one_variant
@pytest.mark.parametrize("policy", ["skip_record", "skip_shard"])
def test_a_shard_that_cannot_be_indexed_is_left_out(numbered: Numbered, tmp_path: Path, policy: str):
    shards, report = numbered.write([100, 100, 100, 100]), tmp_path / "report.jsonl"
    for number in (1, 3):
        make_unreadable(shards[number])
    with (
        pytest.warns(loaderd.errors.SkippedDataWarning) as warned,
        numbered.loader(shards, workers=2, on_corrupt=policy, report=report) as loader,
    ):
        order = numbered.batches(loader)
        assert sorted(chain.from_iterable(order)) == [*range(100), *range(200, 300)]
        assert all(len(batch) == 10 for batch in order)
        statistics = loader.statistics()
        assert statistics.num_shards == 4 and statistics.num_records == 200 and statistics.records_skipped == 0
        assert [(one.shard, one.record, one.offset, one.lost_bytes) for one in statistics.damages] == [
            (str(shards[number]), 0, 0, -1) for number in (1, 3)
        ]
    assert len(report.read_text().splitlines()) == 2
    (warning,) = warned
    assert "2 of 4 shards cannot be indexed and are left out: " in str(warning.message)
    with numbered.loader(shards, on_corrupt="skip_record") as again:
        assert again.statistics().index_cached == 2, "no index is kept of a shard that could not be read"


def test_with_raise_all_shards_that_cannot_be_indexed_are_named(numbered: Numbered):
    shards = numbered.write([100, 100, 100])
    for number in (0, 2):
        make_unreadable(shards[number])
    with pytest.raises(ShardReadError) as caught:
        numbered.loader(shards)
    text = str(caught.value)
    assert "2 of 3 shards cannot be indexed" in text and "skip_shard" in text
    assert all((str(shards[number]) in text) == (number != 1) for number in range(3))
    assert [damage.shard for damage in caught.value.damages] == [str(shards[0]), str(shards[2])]


def test_nothing_but_shards_that_cannot_be_read(numbered: Numbered):
    shards = numbered.write([100])
    make_unreadable(shards[0])
    with pytest.raises(NoShardsError, match=r"no record can be read from 1 shard: .*000.tfrecord"):
        numbered.loader(shards, on_corrupt="skip_record")


# ------------------------------------------------------------------------------------------- lost while in use


def delete(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    """By another of the same size: only its time tells."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.replace(other, path)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(path.read_bytes()[:50])


# One that became longer is another file, as one that was replaced is; one that cannot be read is as if it were gone.
NEARLY_THE_SAME = [pytest.param(lose, marks=pytest.mark.slow) for lose in (append, make_unreadable)]


@pytest.mark.one_variant
@pytest.mark.parametrize("lose", [delete, replace, shorten, *NEARLY_THE_SAME])
def test_a_shard_that_is_lost_while_it_is_in_use(numbered: Numbered, tmp_path: Path, lose: Callable[[Path], None]):
    """Each of its records is missing, and named; the others come in the batches in which they would have come."""
    shards = numbered.write([200, 100, 200])

    def loader(policy: str) -> loaderd.Loader:
        return numbered.loader(
            shards,
            batch_size=25,
            workers=2,
            shuffle=loaderd.Shuffle(window_records=250, block_records=10),
            on_corrupt=policy,
        )

    with loader("raise") as healthy:
        expected = numbered.batches(healthy)
    lost = set(range(200, 300))
    with loader("skip_record") as skipping, loader("raise") as raising:
        lose(shards[1])
        found = numbered.batches(skipping)
        assert found == [[number for number in batch if number not in lost] for batch in expected]
        statistics = skipping.statistics()
        assert statistics.records_skipped == 100
        assert {damage.shard for damage in statistics.damages} == {str(shards[1])}
        assert sorted(damage.record for damage in statistics.damages) == list(range(100))
        assert all(damage.expected and damage.found for damage in statistics.damages)
        for step, batch in enumerate(expected):
            if lost.isdisjoint(batch):
                delivered = raising._fetch(Pass(0, 1), step)
                assert delivered is not None and numbered.check(delivered) == batch
            else:
                with pytest.raises(ShardReadError, match=r"001\.tfrecord"):
                    raising._fetch(Pass(0, 1), step)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["000-and-a-half.tfrecord", "999.tfrecord"])
def test_a_shard_that_comes_later_is_not_taken_in_by_another_daemon(numbered: Numbered, name: str):
    """Nor is it an error: the pattern is looked at once."""
    folder = numbered.write([40, 60])[0].parent
    (later,) = numbered.write([30], "later")
    with numbered.loader(folder / "*.tfrecord", epochs=2) as loader:
        batches = iter(loader)
        numbers = numbered.check(next(batches))
        later.rename(folder / name)
        kill(newest_daemon())
        numbers += numbered.records(batches)
        assert sorted(numbers) == sorted([*range(100)] * 2)
        assert loader.statistics().daemon_restarts == 1

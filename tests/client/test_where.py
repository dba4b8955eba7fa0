"""``where=``: what does not pass is no record of the data set, whatever is done with it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loaderd
from loaderd import Concat, Dataset, Derived, Mix
from loaderd.errors import NoShardsError, OptionError, SchemaError
from tests.helpers.numbered import SCHEMA, Numbered
from tests.helpers.own_processes import kill, newest_daemon, workers_of
from tests.helpers.serving import Server
from tests.remote.network_server import MODULE, NetworkServer

SMALL = loaderd.Shuffle(window_records=60, block_records=16)
BRIEFLY = settings.default.max_examples // 100  # each starts daemons
TENTH = Derived(lambda id: id % 10 == 3, "id")


def one_of(divisor: int, rest: int = 0) -> Derived:
    return Derived(lambda id: id % divisor == rest, "id")


TENTHS = list(range(3, 300, 10))


@settings(max_examples=BRIEFLY)
@given(data=st.data(), sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4))
def test_restored_at_every_step_on_every_host(numbered: Numbered, sizes: list[int], data: st.DataObject):
    divisor = data.draw(st.integers(1, 12))
    passing = [number for number in range(sum(sizes)) if number % divisor == 0]
    if not passing:
        return
    hosts = data.draw(st.integers(1, min(3, len(passing))))
    options: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, 20)),
        "shuffle": data.draw(st.just(False) | st.builds(loaderd.Shuffle, st.integers(1, 50), st.integers(1, 40))),
        "epochs": 2,
        "where": Derived(lambda id: id % divisor == 0, "id"),
    }
    shards = numbered.write(sizes)
    found: list[int] = []
    for host in range(hosts):
        with numbered.loader(shards, shard=(host, hosts), **options) as loader:
            batches, positions = [], []
            for batch in loader:
                batches.append(numbered.check(batch))
                positions.append(loader.position)
            found += chain.from_iterable(batches)
            for step, position in enumerate(positions[:-1], 1):
                loader.load_state_dict(position)
                assert numbered.batches(loader) == batches[step:]
    assert sorted(found) == sorted(2 * passing)


def test_a_worker_and_then_the_daemon_are_killed(numbered: Numbered):
    shards = numbered.write([3000, 3000])
    with numbered.loader(shards, where=TENTH, workers=2, shuffle=SMALL) as loader:
        found = []
        for number, batch in enumerate(loader):
            found += numbered.check(batch)
            if number == 3:
                kill(workers_of(newest_daemon())[0])
            if number == 20:
                kill(newest_daemon())
        assert sorted(found) == list(range(3, 6000, 10))
        assert loader.statistics().num_records == 600


def test_a_worker_dies_while_it_indexes(numbered: Numbered, tmp_path: Path):
    shards = numbered.write([3000, 3000])
    died = tmp_path / "died"

    def function(id: Any) -> Any:
        if 1000 in id and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return id % 10 == 3

    with numbered.loader(shards, where=Derived(function, "id"), workers=2, shuffle=SMALL) as loader:
        assert died.exists() and sorted(numbered.records(loader)) == list(range(3, 6000, 10))


def test_the_index_is_kept_for_each_function_and_without_any(numbered: Numbered, tmp_path: Path):
    shards = numbered.write([100, 200])

    def cached(where: Derived | None, cache: str = "kept") -> int:
        with numbered.loader(shards, where=where, index_cache=str(tmp_path / cache)) as loader:
            return loader.statistics().index_cached

    thing = object()
    assert [cached(where) for where in (TENTH, TENTH, None)] == [0, 2, 2]
    assert [cached(one_of(10, rest)) for rest in (3, 4, 4)] == [0, 0, 2]
    assert [cached(Derived(lambda id: (id > 5) | (thing is None), "id")) for _ in range(2)] == [0, 0], (
        "nobody can tell"
    )
    assert [cached(TENTH, "beside") for _ in range(2)] == [0, 2]


def test_parts_mixes_and_rows_of_data_sets(numbered: Numbered):
    shards = numbered.write([100, 200])
    every = Dataset(shards, SCHEMA, shuffle=SMALL)
    tenth = replace(every, where=TENTH)

    def records(dataset: Any, **options: Any) -> list[int]:
        with loaderd.Loader(dataset, batch_size=7, workers=1, **options) as loader:
            return [int(number) for batch in loader for number in batch["id"]]

    assert sorted(records(tenth.take(12))) == TENTHS[:12]
    assert sorted(records(tenth.skip(12).newest(5))) == TENTHS[-5:]
    sides = [sorted(records(side)) for side in tenth.split(0.5, 0.5)]
    assert sorted(sides[0] + sides[1]) == TENTHS and all(sides)
    odd = replace(every, where=Derived(lambda id: id % 2 == 1, "id"))
    assert sorted(records(Concat([tenth, odd, every.take(4)]))) == sorted([*TENTHS, *range(1, 300, 2), 0, 1, 2, 3])
    mixed = records(Mix({"a": 0.5, "b": 0.5}, {"a": tenth, "b": odd}, epoch_records=60))
    assert sorted(n for n in mixed if n % 2 == 0) == [] and len(mixed) == 60
    assert set(mixed) >= set(TENTHS) and len({n for n in mixed if n % 10 != 3}) >= 24
    assert sorted(records(tenth, unpack="worker")) == TENTHS


def test_packed_batches_hold_what_passes(numbered: Numbered):
    """The function reads a field that is not delivered as such, and a stored feature."""
    where = Derived(lambda bits, id: (bits[:, 31] == 1) & (id % 10 == 3), ["bits", "id"])
    shards = numbered.write([100, 200])
    with loaderd.Loader(shards, SCHEMA, batch_size=9, workers=1, where=where, unpack="device") as loader:
        assert sorted(int(number) for batch in loader for number in batch["id"]) == TENTHS


def test_data_that_grow(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([100, 100, 100])
    folder = tmp_path / "growing"
    folder.mkdir()

    def come(path: Path) -> None:
        path.rename(folder / path.name)

    come(paths[0])
    grows = Dataset(str(folder / "*.tfrecord"), SCHEMA, shuffle=SMALL, refresh="epoch", where=TENTH).newest(15)
    with loaderd.Loader(grows, batch_size=5, epochs=None, workers=1, remainder="drop") as loader:
        batches = iter(loader)
        assert sorted([*numbered.check(next(batches)), *numbered.check(next(batches))]) == TENTHS[:10]
        come(paths[1])
        assert loader.position.epoch == 1 and numbered.check(next(batches))
    with loaderd.Loader(grows, batch_size=5, workers=1, remainder="drop") as loader:
        assert sorted(numbered.records(loader)) == TENTHS[5:20]


def test_a_position_of_another_function_is_refused(numbered: Numbered):
    shards = numbered.write([100, 200])
    with numbered.loader(shards, where=TENTH) as loader:
        next(iter(loader))
        position = loader.position
    with numbered.loader(shards, where=Derived(lambda id: id // 1 % 10 == 3, "id"), start=position) as loader:
        assert loader.position == position, "the same records pass"
    with pytest.raises(OptionError, match="the position belongs to other data"):
        numbered.loader(shards, where=Derived(lambda id: id % 10 == 4, "id"), start=position)


def test_errors_say_what_is_wrong(numbered: Numbered):
    shards = numbered.write([100, 200])

    def refuse(where: Any, error: type[Exception], *texts: str) -> None:
        with pytest.raises(error) as caught:
            numbered.loader(shards, where=where, index_cache="none", on_corrupt="skip_any")
        assert all(text in str(caught.value) for text in texts), str(caught.value)

    def never_seen(id: Any) -> Any:
        if 123 in id:
            raise KeyError("never seen")
        return id > 0

    refuse(lambda id: id, OptionError, "where must be a loaderd.Derived of a function and its inputs")
    refuse(Derived(lambda id: id, "score"), SchemaError, "'score' is no field, intermediate or stored feature")
    names = (
        "001.tfrecord: record 23: expected",
        "never_seen",
        "KeyError: 'never seen'",
        "Called with this record alone",
    )
    refuse(Derived(never_seen, "id"), OptionError, *names)
    refuse(Derived(lambda id: id, "id"), OptionError, "000.tfrecord: record 0:", "int64", "for 1 record")
    refuse(Derived(lambda id: id < 0, "id"), NoShardsError, "no record passes where=", "of 300 records in 2 shards")


FILTERED = """
import dataclasses, loaderd
train = dataclasses.replace(train, where=loaderd.Derived(lambda id: id % 10 == 3, "id"))
"""


def test_consumers_of_servers(tmp_path: Path, numbered: Numbered):
    """Over HTTP, where rows come by their numbers among those that pass, and in shared memory."""
    numbered.write([100, 200])
    network = NetworkServer(tmp_path, module=MODULE + FILTERED)
    unix = Server(tmp_path, "datasets_of_test:train", "--workers", "1")
    try:
        with loaderd.Loader(network.dataset(), batch_size=7, workers=1) as loader:
            expected = numbered.batches(loader)
        assert sorted(chain.from_iterable(expected)) == TENTHS
        for address in (network.address, unix.address):
            with loaderd.connect(address, "train", batch_size=7) as loader:
                batches = iter(loader)
                assert [numbered.check(next(batches)) for _ in range(2)] == expected[:2]
                position = loader.position
            with loaderd.connect(address, "train", batch_size=7, start=position) as loader:
                assert numbered.batches(loader) == expected[2:]
        network.kill_processes()
        halves = []
        for host in range(2):
            with loaderd.connect(network.address, "train", batch_size=7, shard=(host, 2)) as loader:
                halves += numbered.records(loader)
        assert sorted(halves) == TENTHS
    finally:
        network.close()
        unix.close()


class LargeFunction:
    """Notes where it is unpickled."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __call__(self, id: Any) -> Any:
        return id % 10 == 3

    def __reduce__(self) -> Any:
        return unpickled, (self.log,)


def unpickled(log: str) -> LargeFunction:
    with open(log, "a") as out:
        out.write(f"{os.getpid()}\n")
    return LargeFunction(log)


def test_a_worker_gets_the_function_once(numbered: Numbered, tmp_path: Path):
    """Not with each of its tasks: a function may refer to megabytes."""
    shards = []
    for number, path in enumerate(numbered.write([30] * 10)):
        (tmp_path / f"{number:02}").mkdir()  # shards in several folders are not indexed by one task
        shards.append(path.rename(tmp_path / f"{number:02}" / path.name))
    log = tmp_path / "log"
    where = Derived(LargeFunction(str(log)), "id")
    with numbered.loader(shards, batch_size=10, shuffle=SMALL, where=where, workers=2, index_cache="none") as loader:
        assert sorted(numbered.records(loader)) == TENTHS
    of_process = Counter(log.read_text().split())
    assert max(of_process.values()) <= 2, "for the index, and for the stream"

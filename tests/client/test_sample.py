"""``sample=``: each epoch draws records anew, equally many, wherever it is read, and however often it is resumed."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import loaderd
from loaderd import Concat, Dataset, Derived, Mix, Sample
from loaderd.errors import NoShardsError, OptionError, SchemaError
from loaderd.formats.shard_index import decode_indexes, encode_indexes
from tests.helpers.numbered import SCHEMA, Numbered
from tests.helpers.own_processes import kill, newest_daemon, workers_of
from tests.helpers.serving import Server
from tests.remote.network_server import MODULE, NetworkServer

SMALL = loaderd.Shuffle(window_records=60, block_records=16)
BRIEFLY = settings.default.max_examples // 100  # each starts daemons
EVEN = Derived(lambda id: id % 2 == 0, "id")
# Numbers below 100 are never drawn, those above 200 always.
STEP = Sample(weight=Derived(lambda id: np.select([id < 100, id < 200], [0, 0.25], 1.5), "id"))


@settings(max_examples=BRIEFLY)
@given(data=st.data(), sizes=st.lists(st.integers(0, 90), min_size=1, max_size=4))
def test_restored_at_every_step_and_by_other_hosts(numbered: Numbered, sizes: list[int], data: st.DataObject):
    share = data.draw(st.fractions(Fraction(1, 20), 1))
    weight = data.draw(st.sampled_from([None, Derived(lambda id: 0.5 + (id % 3) / 4, "id")]))
    expected = int(sum(Fraction(2 + number % 3, 4) if weight else 1 for number in range(sum(sizes))) * share)
    assume(expected)
    hosts, later = (data.draw(st.integers(1, min(3, expected))) for _ in range(2))
    options: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, 20)),
        "shuffle": data.draw(st.just(False) | st.builds(loaderd.Shuffle, st.integers(1, 50), st.integers(1, 40))),
        "sample": Sample(share, weight),
    }
    shards = numbered.write(sizes)
    taken: list[int] = []
    for host in range(hosts):
        with numbered.loader(shards, shard=(host, hosts), **options) as loader:
            assert loader.statistics().num_records == expected
            batches, positions = [], []
            for batch in loader:
                batches.append(numbered.check(batch))
                positions.append(loader.position)
            for step, position in enumerate(positions[:-1], 1):
                loader.load_state_dict(position)
                assert numbered.batches(loader) == batches[step:]
            middle = len(batches) // 2
            taken += chain.from_iterable(batches[:middle])
            start = positions[middle - 1] if middle else loaderd.Position()
    for host in range(later):
        with numbered.loader(shards, shard=(host, later), start=start, **options) as loader:
            taken += numbered.records(loader)
    assert len(taken) == len(set(taken)) == expected
    with numbered.loader(shards, **options) as loader:
        assert sorted(numbered.records(loader)) == sorted(taken), "whoever reads the epoch"
        again = numbered.records(loader)
        assert len(again) == len(set(again)) == expected


def test_an_index_of_other_weights_is_made_anew(numbered: Numbered, tmp_path: Path):
    """Whoever may write to the folder of indexes can give them right CRCs."""
    shards = numbered.write([100])
    sample = Sample(0.5, Derived(lambda id: 1 + id % 2, "id"))

    def read(cache: Path) -> tuple[int, list[int]]:
        with numbered.loader(shards, sample=sample, where=EVEN, index_cache=str(cache)) as loader:
            return loader.statistics().index_cached, numbered.records(loader)

    assert (expected := read(tmp_path))[0] == 0 and read(tmp_path) == (1, expected[1])
    for path in tmp_path.rglob("*.loaderd-index"):
        (index,) = decode_indexes(whole := path.read_bytes())
        if index.value_arrays:
            break
    codes = index.weights.astype(np.uint16)
    weights = [np.float16(value).view(np.uint16) | 0 * codes for value in (np.nan, np.inf, -1)]
    forged = [{"weights": each} for each in (*weights, codes[:50], codes[:0])]
    for change in (*forged, {"passing": index.passing[:3]}, {"passing": index.passing[:0]}):
        path.write_bytes(encode_indexes([replace(index, **change)]))
        assert read(tmp_path) == (0, expected[1])
        assert path.read_bytes() == whole
    path.write_bytes(whole[:100])
    assert read(tmp_path) == (0, expected[1])


def test_weights_say_how_often_a_record_comes(numbered: Numbered):
    shards = numbered.write([150, 150])
    with numbered.loader(shards, sample=STEP, shuffle=SMALL, epochs=60) as loader:
        assert loader.statistics().num_records == 125
        counts = Counter(numbered.records(loader))
    assert not any(counts[number] for number in range(100))
    assert all(counts[number] == 60 for number in range(200, 300))
    others = [counts[number] for number in range(100, 200)]
    assert sum(others) == 15 * 100 and min(others) > 3 and max(others) < 30


def test_a_worker_and_then_the_daemon_are_killed(numbered: Numbered):
    shards = numbered.write([3000, 3000])
    sample = Sample(Fraction(1, 4), Derived(lambda id: 0.5 + id % 2, "id"))
    with numbered.loader(shards, sample=sample, workers=2, shuffle=SMALL) as loader:
        expected = numbered.batches(loader)
    with numbered.loader(shards, sample=sample, workers=2, shuffle=SMALL) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(numbered.check(batch))
            if number == 3:
                kill(workers_of(newest_daemon())[0])
            if number == 20:
                kill(newest_daemon())
    assert found == expected and len({*chain.from_iterable(found)}) == 1500


def test_games_give_at_most_so_many_positions(tmp_path: Path):
    """A tar of games, and games that are shards of their own: at most the sum of their records' probabilities."""
    sizes = [30, 4, 100, 7, 1]
    records = loaderd.FixedRecords(np.dtype([("id", "<i8")]))
    schema = loaderd.Schema(records, {"id": loaderd.Array("id")})
    games = [np.arange(1000 * game, 1000 * game + size, dtype="<i8").tobytes() for game, size in enumerate(sizes)]
    with tarfile.open(tmp_path / "games.tar", "w") as tar:
        for number, game in enumerate(games):
            entry = tarfile.TarInfo(f"{number}.gz")
            content = gzip.compress(game)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
            (tmp_path / f"{number}.game").write_bytes(game)

    def per_game(shards: str, sample: Sample) -> list[list[int]]:
        options: dict[str, Any] = {"epochs": 20, "shuffle": loaderd.Shuffle(50, 9), "sample": sample}
        with loaderd.Loader(str(tmp_path / shards), schema, batch_size=9, workers=1, **options) as loader:
            found = np.concatenate([batch["id"] for batch in loader]).reshape(20, -1)
        assert all(len({*epoch}) == len(epoch) for epoch in found.tolist())
        assert len({(*sorted(epoch),) for epoch in found.tolist()}) == 20, "each draws others"
        return [np.bincount(epoch // 1000, minlength=5).tolist() for epoch in found]

    for shards in ("games.tar", "*.game"):
        assert per_game(shards, Sample(per_member=4)) == [[4, 4, 4, 4, 1]] * 20
        halves = np.array(per_game(shards, Sample(Fraction(1, 2), per_member=3)))
        assert (halves.sum(axis=1) == 11).all(), "3 + 2 + 3 + 3 + 0.5"
        possible = [{2, 3}, {1, 2}, {2, 3}, {2, 3}, {0, 1}]
        assert all({*of_game} <= each for of_game, each in zip(halves.T.tolist(), possible, strict=True))


def test_the_index_is_kept_for_each_weight_and_any_share(numbered: Numbered, tmp_path: Path):
    shards = numbered.write([100, 200])

    def cached(sample: Sample | float | None, where: Derived | None = None) -> int:
        options: dict[str, Any] = {"sample": sample, "where": where, "index_cache": str(tmp_path / "kept")}
        with numbered.loader(shards, **options) as loader:
            return loader.statistics().index_cached

    samples = [0.1, Sample(0.1, "id"), Sample(0.2, "id", 5), STEP, None]
    assert [cached(sample) for sample in samples] == [0, 0, 2, 0, 2]
    assert [cached(STEP, EVEN), cached(STEP, EVEN), cached(STEP), cached(None, EVEN)] == [0, 2, 2, 0]


def test_with_where_parts_mixes_and_packed_rows(numbered: Numbered):
    shards = numbered.write([100, 200])
    every = Dataset(shards, SCHEMA, shuffle=SMALL)

    def records(dataset: Any, **options: Any) -> list[int]:
        with loaderd.Loader(dataset, batch_size=7, workers=1, **options) as loader:
            return [int(number) for batch in loader for number in batch["id"]]

    tenth = replace(every, sample=0.1)
    assert len({*records(tenth)}) == 30 and len(records(tenth, epochs=3)) == 90
    assert set(records(replace(tenth, where=EVEN))) < set(range(0, 300, 2))
    assert len(records(replace(tenth, where=EVEN))) == 15
    taken = records(replace(tenth, sample=0.5).take(40))
    assert len(taken) == 20 and set(taken) < set(range(40))
    sides = [records(replace(side, sample=0.5)) for side in every.split(0.5, 0.5)]
    assert not set(sides[0]) & set(sides[1])
    weighed = replace(every, sample=STEP, where=EVEN)
    found = records(weighed)
    assert len(found) == 50 + 50 // 4 and set(range(200, 300, 2)) <= set(found) and min(found) >= 100
    assert len(records(Concat([tenth, weighed, every.take(3)]))) == 30 + 62 + 3
    mixed = records(Mix({"a": 0.5, "b": 0.5}, {"a": tenth, "b": every}, epoch_records=120))
    assert len(mixed) == 120
    assert sorted(records(weighed, unpack="device")) == sorted(found)
    twice = [records(replace(every, sample=0.5, seed=seed)) for seed in (1, 1, 2)]
    assert twice[0] == twice[1] != twice[2]


def test_positions_and_errors(numbered: Numbered):
    shards = numbered.write([100, 200])
    with numbered.loader(shards, sample=0.1) as loader:
        next(iter(loader))
        position = loader.position
    for other in (None, 0.101, Sample(0.1, Derived(lambda id: 1 + 0 * id, "id"))):
        with pytest.raises(OptionError, match="the position belongs to other data"):
            numbered.loader(shards, sample=other, start=position)

    def refuse(function: Callable[..., Any], *texts: str, error: type[Exception] = OptionError) -> None:
        with pytest.raises(error) as caught:
            numbered.loader(shards, sample=Sample(1, Derived(function, "id")), index_cache="none")
        assert all(text in str(caught.value) for text in texts), str(caught.value)

    refuse(lambda id: np.where(id == 123, -1.0, 1), "001.tfrecord: record 23", "a weight of sample=", "found -1.0")
    refuse(lambda id: np.where(id == 7, np.nan, 1), "000.tfrecord: record 7", "0 or 0.0000610 to 65,504", "nan")
    refuse(lambda id: np.where(id == 7, 6.1e-5, 1), "000.tfrecord: record 7", "6.1e-05", "which the share multiplies")
    refuse(lambda id: id[:, None], "000.tfrecord: record 0", "shape (1, 1)")
    nothing = "weight=tests.client.test_sample.", "draws no record of 300: their probabilities sum to 0\nGive some of"
    refuse(lambda id: id * 0, *nothing, error=NoShardsError)
    with pytest.raises(SchemaError, match="the weight of sample: 'w' is no field"):
        numbered.loader(shards, sample=Sample(0.5, "w"))
    with pytest.raises(NoShardsError, match=r"draws no record of 300: their probabilities sum to 0\.3"):
        numbered.loader(shards, sample=0.001)
    with pytest.raises(OptionError, match="batch_size must be at most 3, for there are 3 records"):
        numbered.loader(shards, sample=0.01, remainder="drop")


SAMPLED = """
import dataclasses, loaderd
weight = loaderd.Derived(lambda id: (id % 3) / 2.0, "id")
sample = loaderd.Sample(0.4, weight, per_member=30)
train = loaderd.Concat([dataclasses.replace(each, sample=sample) for each in (train.take(100), train.skip(100))])
"""


def test_consumers_of_servers(tmp_path: Path, numbered: Numbered):
    """Over HTTP, where rows come by their numbers among those that the epoch draws, and in shared memory."""
    numbered.write([100, 200])
    network = NetworkServer(tmp_path, module=MODULE + SAMPLED)
    unix = Server(tmp_path, "datasets_of_test:train", "--workers", "1")
    try:
        with loaderd.Loader(network.dataset(), batch_size=7, workers=1, epochs=2) as loader:
            expected = numbered.batches(loader)
        epochs = np.array([*chain.from_iterable(expected)]).reshape(2, 49)  # 19.8 and 30, of 40
        assert all(len({*epoch.tolist()}) == 49 and (epoch % 3 > 0).all() for epoch in epochs)
        for address in (network.address, unix.address):
            with loaderd.connect(address, "train", batch_size=7, epochs=2) as loader:
                batches = iter(loader)
                assert [numbered.check(next(batches)) for _ in range(2)] == expected[:2]
                position = loader.position
            with loaderd.connect(address, "train", batch_size=7, epochs=2, start=position) as loader:
                assert numbered.batches(loader) == expected[2:]
        network.kill_processes()
        halves = []
        for host in range(2):
            with loaderd.connect(network.address, "train", batch_size=7, shard=(host, 2), epochs=2) as loader:
                halves += numbered.records(loader)
        assert sorted(halves) == sorted(chain.from_iterable(expected))
    finally:
        network.close()
        unix.close()

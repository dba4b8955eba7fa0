"""Parts of a data set, as they are delivered: real shards, plain and compressed, some of them damaged."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.errors import NoShardsError, OptionError, RecordMismatchError
from loaderd.kernels.crc import framed
from loaderd.options import StreamOptions
from loaderd.plan.selection import HASHES
from tests.client.damage import damage_data
from tests.helpers.numbered import Numbered

Deliver = Callable[..., list[int]]


@pytest.fixture
def deliver(numbered: Numbered) -> Deliver:
    """The numbers of the records of an epoch, in the order of delivery."""

    def run(dataset: loaderd.Dataset, **options: Any) -> list[int]:
        with loaderd.Loader(dataset, **{"batch_size": 20, "workers": 1, **options}) as loader:
            numbers = numbered.records(loader)
            assert loader.statistics().num_records == len(numbers)
        return numbers

    return run


def test_a_split_by_records(numbered: Numbered, deliver: Deliver):
    """Each record on one side, the same with and without shuffling, and when shards are added or compressed."""
    shards = numbered.write([300, 1, 400, 250, 500])
    shuffle = loaderd.Shuffle(window_records=200, block_records=64)
    whole = loaderd.Dataset(shards, numbered.schema, shuffle=shuffle, seed=3)
    sides = [deliver(side) for side in whole.split(0.7, 0.3)]
    assert sorted(sides[0] + sides[1]) == list(range(1451))
    assert len(sides[0]) == pytest.approx(0.7 * 1451, abs=5 * (1451 * 0.21) ** 0.5)
    assert sides[0] != sorted(sides[0]), "shuffled"
    train, test = replace(whole, shuffle=False).split(0.7, 0.3)
    assert deliver(test) == sorted(sides[1])
    assert deliver(replace(train, shards=[shards[1], shards[3]])) == [
        number for number in sorted(sides[0]) if number == 300 or 701 <= number < 951
    ]
    for number in (0, 3):
        shards[number].write_bytes(gzip.compress(shards[number].read_bytes()))
    assert deliver(test) == sorted(sides[1])
    assert sorted(deliver(whole.split(0.7, 0.3)[1])) == sorted(sides[1])
    other = deliver(replace(whole, shuffle=False).split(0.7, 0.3, seed=1)[1])
    assert other != sorted(sides[1])


@pytest.mark.one_variant
@pytest.mark.parametrize("remainder", ["drop", "carry"])
def test_the_order_of_a_part_depends_on_the_seed_alone(numbered: Numbered, remainder: Any):
    shards = numbered.write([500, 377, 123])
    whole = loaderd.Dataset(shards, numbered.schema, loaderd.Shuffle(window_records=90, block_records=16), seed=5)
    _, part = whole.skip(20).split(0.4, 0.6)
    orders = []
    for workers in (1, 3):
        with loaderd.Loader(part, batch_size=48, epochs=2, workers=workers, remainder=remainder) as loader:
            orders.append(numbered.batches(loader))
    assert orders[0] == orders[1]


def test_take_and_skip_are_slices(numbered: Numbered, deliver: Deliver):
    shards = numbered.write([300, 400, 250])
    shards[1].write_bytes(gzip.compress(shards[1].read_bytes()))
    whole = loaderd.Dataset(shards, numbered.schema, shuffle=False)
    numbers = list(range(950))
    assert deliver(whole.skip(130).take(700).skip(5)) == numbers[130:830][5:]
    assert deliver(whole.take(5000)) == numbers
    assert sorted(deliver(replace(whole, shuffle=True).skip(290).take(30))) == numbers[290:320]
    side = deliver(whole.split(0.5, 0.5)[1])
    assert deliver(whole.split(0.5, 0.5)[1].skip(100).take(200)) == side[100:300]
    assert deliver(whole.take(600).split(0.5, 0.5)[1]) == [number for number in side if number < 600]


@pytest.mark.slow
def test_damage_moves_no_record(numbered: Numbered, deliver: Deliver):
    """Those behind a damaged one keep their numbers, and so their sides; damaged ones are not counted."""
    shards = numbered.write([200, 300])
    whole = loaderd.Dataset(shards, numbered.schema, shuffle=False, on_corrupt="skip_record")
    before = [deliver(side) for side in whole.split(0.5, 0.5)]
    victims = [before[0][10], before[1][20], 250]
    for victim in victims:
        damage_data(shards[victim // 200], victim - victim // 200 * 200)
    after = [deliver(side) for side in whole.split(0.5, 0.5)]
    assert after == [[number for number in side if number not in victims] for side in before]
    left = [number for number in range(500) if number not in victims]
    assert deliver(whole.skip(150).take(200)) == left[150:350]
    whole = replace(whole, shards=[*shards, *numbered.write([40], "more")], on_corrupt="skip_shard")
    assert deliver(whole.take(25)) == list(range(25))


@pytest.mark.slow
def test_a_split_by_shards(numbered: Numbered, deliver: Deliver):
    shards = numbered.write([60] * 8)
    whole = loaderd.Dataset(shards, numbered.schema, shuffle=False)
    sides = [deliver(side) for side in whole.split(0.5, 0.5, by="shard", seed=1)]
    assert sorted(sides[0] + sides[1]) == list(range(480))
    of_shards = [{number // 60 for number in side} for side in sides]
    assert not set.intersection(*of_shards) and all(len(of_side) >= 2 for of_side in of_shards)
    assert [len(side) for side in sides] == [60 * len(of_side) for of_side in of_shards]
    few = replace(whole, shards=shards[min(of_shards[0])])
    with pytest.raises(NoShardsError) as caught:
        deliver(few.split(0.5, 0.5, by="shard", seed=1)[1])
    message = 'the part from 0.5 to 1 of split(by="shard", seed=1) holds no shard, of 60 records in 1 shards'
    assert message in str(caught.value) and 'by="record"' in str(caught.value)


def test_a_part_without_a_record(numbered: Numbered, deliver: Deliver):
    whole = loaderd.Dataset(numbered.write([20]), numbered.schema)
    with pytest.raises(NoShardsError, match=r"skip\(20\) holds no record, of 20 records in 1 shard"):
        deliver(whole.skip(20))
    with pytest.raises(NoShardsError, match=r'from 0 to 1e-06 of split\(by="record", seed=0\) holds no record'):
        deliver(whole.split(0.000001, 0.999999)[0])


def test_the_record_that_is_tried_first_is_one_of_the_part(numbered: Numbered, deliver: Deliver):
    """A record that is skipped need not fit the schema."""
    (shard,) = numbered.write([50])
    shard.write_bytes(framed(b"") + shard.read_bytes())
    whole = loaderd.Dataset(shard, numbered.schema, shuffle=False)
    with pytest.raises(RecordMismatchError, match="record 0 at byte 0"):
        deliver(whole)
    assert deliver(whole.skip(1)) == list(range(50))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5, 0.6), "the sum of the fractions of split must be 1, got 1.1"),
        ((), "the sum of the fractions of split must be 1, got 0"),
        ((1.5, -0.5), "each fraction of split must be at most 1, got 1.5"),
        ((1.0, 0.0), "each fraction of split must be above 0, got 0.0"),
        ((float("nan"), 1.0), "each fraction of split must be above 0, got nan"),
        (("0.5", 0.5), "each fraction of split must be above 0, got '0.5'"),
    ],
)
def test_fractions(numbered: Numbered, arguments: Any, message: str):
    with pytest.raises(OptionError, match=re.escape(message)):
        loaderd.Dataset("a", numbered.schema).split(*arguments)


def test_fractions_that_sum_to_one_but_for_rounding(numbered: Numbered):
    parts = loaderd.Dataset("a", numbered.schema).split(0.7, 0.1, 0.1, 0.1)
    edges = [part.selection[0] for part in parts]
    assert [edge.start for edge in edges[1:]] == [edge.stop for edge in edges[:-1]]
    assert (edges[0].start, edges[-1].stop) == (0, HASHES)


def test_what_a_path_means(numbered: Numbered, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert loaderd.Storage(cache_dir="~/parts").cache_dir == f"{tmp_path}/parts"
    assert StreamOptions(batch_size=1, report="~/damage.jsonl").report == f"{tmp_path}/damage.jsonl"
    assert loaderd.TLS(ca=Path("~/ca.pem")).ca == f"{tmp_path}/ca.pem"
    for cache, folder in ((Path("none"), "./none"), (Path("user"), "./user"), (Path("new"), "new"), ("none", "none")):
        assert loaderd.Dataset("a", numbered.schema, index_cache=cache).index_cache == folder  # type: ignore[arg-type]


def test_what_belongs_to_a_data_set_is_refused_beside_it_by_name(numbered: Numbered):
    dataset = loaderd.Dataset("*.tfrecord", numbered.schema)
    with pytest.raises(OptionError, match=r"^seed must be left out beside a Dataset, .* got seed=3\n") as caught:
        loaderd.Loader(dataset, batch_size=30, seed=3)
    assert caught.value.hint == "Give the data set what is wanted: Dataset(…, seed=3)."
    with pytest.raises(OptionError, match=r"^schema and shuffle must .* got schema=…, shuffle=False\n") as caught:
        numbered.loader(loaderd.Concat([dataset]), batch_size=30, shuffle=False)
    assert "each data set of the Concat" in caught.value.hint

"""Mixes, data sets in a row, and data sets that grow: real loaders."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd import Concat, Dataset, Mix, Position
from loaderd.errors import CorruptRecordError, NoShardsError, OptionError
from tests.helpers.numbered import Numbered

Write = Callable[..., list[Path]]
Check = Callable[[loaderd.Batch], list[int]]

SMALL = loaderd.Shuffle(window_records=100, block_records=8)


@pytest.fixture
def sets(numbered: Numbered) -> dict[str, Dataset]:
    """300 records of "a", numbered from 0, and 100 of "b", numbered from 300."""
    shards = numbered.write([120, 180, 40, 60])
    parts = {"a": shards[:2], "b": shards[2:]}
    return {name: Dataset(part, numbered.schema, shuffle=SMALL) for name, part in parts.items()}


def epochs(dataset: Any, check: Check, number: int, **options: Any) -> list[list[list[int]]]:
    with loaderd.Loader(dataset, **{"batch_size": 20, "workers": 2, **options}) as loader:
        return [[check(batch) for batch in loader] for _ in range(number)]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_a_mix_is_in_proportion_and_uses_each_set_up_evenly(sets: dict[str, Dataset], numbered: Numbered):
    mix = Mix({"a": 0.75, "b": 0.25}, sets, epoch_records=200)
    found = [flat(epoch) for epoch in epochs(mix, numbered.check, 6)]
    for numbers in found:
        assert sum(number >= 300 for number in numbers) == 50
        for window in (numbers[:100], numbers[100:]):
            assert sum(number >= 300 for number in window) == 25, "in every window"
    of_a = [number for numbers in found for number in numbers if number < 300]
    of_b = [number for numbers in found for number in numbers if number >= 300]
    assert Counter(of_a) == dict.fromkeys(range(300), 3), "900 of 300: three epochs of its own"
    assert Counter(of_b) == dict.fromkeys(range(300, 400), 3), "300 of 100"
    assert sorted(of_a[:300]) == sorted(of_a[300:600]) == list(range(300)) and of_a[:300] != of_a[300:600]
    first_batches = [sum(number >= 300 for number in numbers[:20]) for numbers in found]
    assert len(set(first_batches)) > 1, "and mixed at random within it"


def test_a_mix_has_an_order_and_positions(sets: dict[str, Dataset], numbered: Numbered):
    mix = Mix({"a": 0.6, "b": 0.4}, sets)
    expected = epochs(mix, numbered.check, 3)
    assert epochs(mix, numbered.check, 3, workers=1, held_batches=1) == expected
    assert sum(map(len, expected[0])) == 400, "as many as there are in all"
    with loaderd.Loader(mix, batch_size=20, workers=1, start=Position(1, 7)) as loader:
        assert numbered.batches(loader) == expected[1][7:]
        position = loader.state_dict()
    other = Mix({"a": 0.5, "b": 0.5}, sets)
    with pytest.raises(OptionError, match=r"weights: .*3/5.*2/5.* when the position was taken, .*1/2.*1/2.* now"):
        loaderd.Loader(other, batch_size=20, start=position)
    changed = {"a": sets["a"], "b": sets["b"].take(90)}
    with pytest.raises(OptionError, match=r"b shards: 100 records in 2 .*, 90 records in 2"):
        loaderd.Loader(Mix({"a": 0.6, "b": 0.4}, changed, epoch_records=400), batch_size=20, start=position)


@pytest.mark.slow
def test_weights_that_change(sets: dict[str, Dataset], numbered: Numbered):
    weights = {0: {"a": 1.0, "b": 0.0}, 2: {"a": 0.5, "b": 0.5}, 3: {"b": 1.0, "a": 0.0}}
    mix = Mix(weights, sets, epoch_records=100)
    found = [flat(epoch) for epoch in epochs(mix, numbered.check, 5)]
    assert [sum(number >= 300 for number in numbers) for numbers in found] == [0, 0, 50, 100, 100]
    of_a = [number for numbers in found for number in numbers if number < 300]
    assert len(set(of_a)) == len(of_a) == 250, "no record twice before all have come"
    assert Counter(flat(found[2:])).most_common(1)[0][1] <= 3
    assert epochs(pickle.loads(pickle.dumps(mix)), numbered.check, 1)[0] == epochs(mix, numbered.check, 1)[0]


def test_the_order_in_which_sets_are_given_is_of_no_account(sets: dict[str, Dataset], numbered: Numbered):
    """It may be that of the names in a folder, which is another one on each host."""
    weights, backwards = {"a": 0.5, "b": 0.5}, dict(reversed(sets.items()))
    one, other = Mix(weights, sets), Mix(dict(reversed(weights.items())), backwards)
    expected = epochs(one, numbered.check, 2)
    assert epochs(other, numbered.check, 2) == expected
    with loaderd.Loader(one, batch_size=20, workers=1) as loader:
        next(iter(loader))
        position = loader.position
    with loaderd.Loader(other, batch_size=20, workers=1, start=position) as loader:
        assert numbered.batches(loader) == expected[0][1:]


def test_a_mix_keeps_the_weights_that_it_was_made_of(sets: dict[str, Dataset]):
    """What becomes of the caller's dicts is not for it, nor for what is made of it by replace()."""
    both: tuple[dict[Any, Any], ...] = {"a": 0.75, "b": 0.25}, {0: {"a": 0.75, "b": 0.25}}
    for changing in both:
        mix = Mix(changing, sets)
        before = mix.weights == changing, mix.schedule
        changing.get(0, changing).update({"a": 0.25, "b": 0.75})
        assert before == (True, replace(mix).schedule) and mix.weights != changing
        assert pickle.loads(pickle.dumps(mix)) == mix


def test_sets_in_a_row(sets: dict[str, Dataset], numbered: Numbered):
    row = Concat([sets["b"], sets["a"]])
    (numbers,) = map(flat, epochs(row, numbered.check, 1))
    assert sorted(numbers) == list(range(400)) and set(numbers[:100]) == set(range(300, 400))


def test_sets_in_a_row_in_the_files_order(numbered: Numbered):
    paths = numbered.write([30, 50, 40])
    sets = [Dataset(path, numbered.schema, shuffle=False) for path in paths]
    assert flat(epochs(Concat([sets[2], sets[0]]), numbered.check, 1)[0]) == [*range(80, 120), *range(30)]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 0.8, "b": 0.3}, r"the weights of a Mix must sum to 1, got 1\.1"),
        ({"a": 1.5, "b": -0.5}, "the weight of 'b' must be a number of at least 0, got -0.5"),
        ({"a": 1.0}, r"weights must name the sets \['a', 'b'\], got \['a'\]"),
        ({3: {"a": 0.5, "b": 0.5}}, r"weights must begin at epoch 0, got the epochs \[3\]"),
        ({0: {"a": 0.5, "b": 0.5}, "10": {"a": 0.5}}, r"weights must name the sets \['a', 'b'\], got \[0, '10'\]"),
    ],
)
def test_weights_that_make_no_mix(sets: dict[str, Dataset], weights: Any, message: str):
    with pytest.raises(OptionError, match=message):
        Mix(weights, sets)


@pytest.mark.parametrize("name", ["", "a.", ".a", "a.0", 3])
def test_names_of_sets_that_a_position_could_take_for_others(sets: dict[str, Dataset], name: Any):
    said = rf'the names of the sets must be text that is not empty, without a "\.", got \[{name!r}, '
    with pytest.raises(OptionError, match=said):
        Mix({name: 0.5, "b": 0.5}, {name: sets["a"], "b": sets["b"]})


def test_of_schemas_that_differ_the_difference_is_said():
    def of(features: Any = (), fields: Any = (), intermediates: Any = ()) -> Dataset:
        stored = {"a": loaderd.Int64(), "b": loaderd.Int64(), **dict(features)}
        made = {"x": loaderd.Array("a"), **dict(fields)}
        return Dataset("*.tfrecord", loaderd.Schema(stored, made, dict(intermediates)))

    turned = loaderd.Schema({"b": loaderd.Int64(), "a": loaderd.Int64()}, {"x": loaderd.Array("a")})
    for other, said in [
        (of({"a": loaderd.Int64((2,))}), r"features\['a'\] Int64\(shape=\(\), .*\) and Int64\(shape=\(2,\), .*\)"),
        (of({}, {"y": loaderd.Array("b")}), r"fields\['y'\] none and Array\(.*\)"),
        (of({}, {}, {"y": loaderd.Array("b")}), r"intermediates\['y'\] none and Array\(.*\)"),
        (Dataset("*.tfrecord", turned), "features of the same names in another order, or at other places"),
    ]:
        with pytest.raises(OptionError, match=f"must agree in schema, got {said}\n") as caught:
            Concat([of(), of(), other])
        assert len(caught.value.message) < 300


def test_sets_that_cannot_be_joined(sets: dict[str, Dataset], numbered: Numbered):
    a, b = sets.values()
    with pytest.raises(OptionError, match=r"the sets of a Concat must agree in seed, got \[0, 3\]"):
        Concat([a, Dataset(b.shards, numbered.schema, shuffle=SMALL, seed=3)])
    unshuffled = Dataset(a.shards, numbered.schema, shuffle=False)
    with pytest.raises(OptionError, match="the sets of a Mix must be shuffled"):
        Mix({"a": 1.0}, {"a": unshuffled})
    with pytest.raises(OptionError, match="a set of a Concat must be a Dataset, Concat or Mix, got 'x'"):
        Concat(["x"])  # type: ignore[list-item]
    growing = Dataset(b.shards, numbered.schema, shuffle=SMALL, refresh="epoch")
    with pytest.raises(OptionError, match="a Mix of a data set that grows needs epoch_records"):
        Mix({"a": 0.5, "b": 0.5}, {"a": a, "b": growing})
    with pytest.raises(OptionError, match="the sets of a Concat must not grow"):
        Concat([a, growing])


# -------------------------------------------------------------------------------------- data that grow


def test_a_shard_of_several_sets_is_indexed_once_and_its_damage_is_named_once(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([100, 100])
    data = bytearray(paths[0].read_bytes())
    data[len(data) // 2] ^= 0xFF
    paths[0].write_bytes(data)
    halves = Concat(Dataset(paths, numbered.schema, shuffle=SMALL, index_cache="none").split(0.5, 0.5))
    with pytest.raises(CorruptRecordError, match="1 damaged record in 1 of 2 shards") as caught:
        loaderd.Loader(halves, batch_size=20, workers=1)
    assert len(caught.value.damages) == 1
    skipping = halves.with_leaves(lambda leaf: replace(leaf, on_corrupt="skip_record"))
    skipping = skipping.with_leaves(lambda leaf: replace(leaf, index_cache=tmp_path / "cache"))
    for cached in (0, 2):
        with loaderd.Loader(skipping, batch_size=20, workers=1) as loader:
            statistics = loader.statistics()
            assert (statistics.num_records, statistics.index_cached) == (199, cached)


@pytest.mark.parametrize("kind", ["Mix", "Concat"])
def test_the_set_that_is_empty_or_cannot_be_chosen_from_is_named(numbered: Numbered, tmp_path: Path, kind: str):
    (tmp_path / "nothing.tfrecord").touch()
    full = Dataset(numbered.write([40]), numbered.schema)
    empty = Dataset(tmp_path / "nothing.tfrecord", numbered.schema)
    for bad, why in (
        (empty, f"no record can be read from 1 shard, such as {tmp_path}/nothing.tfrecord"),
        (full.skip(40), r"skip\(40\) holds no record, of 40 records in 1 shards"),
        (full.newest(lambda total: -total), "the number of records of newest must be .* got -40"),
    ):
        joined = Concat([full, bad]) if kind == "Concat" else Mix({"a": 0.5, "b": 0.5}, {"a": full, "b": bad})
        name = "1" if kind == "Concat" else "b"
        with pytest.raises((NoShardsError, OptionError), match=f"^the set '{name}' of a {kind}: {why}"):
            loaderd.Loader(joined, batch_size=5, workers=1)

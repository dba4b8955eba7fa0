"""Data that grow while they are read: shards come and go, epochs and positions stay what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd import Dataset, Mix, Position
from loaderd.errors import CorruptRecordError, NoShardsError, OptionError
from tests.helpers.numbered import Numbered
from tests.helpers.own_processes import kill, newest_daemon

SMALL = loaderd.Shuffle(window_records=100, block_records=8)


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def grow(paths: list[Path], folder: Path, number: int) -> None:
    """Put the next shards into the folder, as a writer would: whole, under their last name."""
    for path in paths[:number]:
        temporary = folder / f".{path.name}.tmp"
        temporary.write_bytes(path.read_bytes())
        temporary.rename(folder / path.name)
    del paths[:number]


def test_shards_are_picked_up_between_epochs(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([50, 50, 60, 70, 80])
    folder = tmp_path / "growing"
    folder.mkdir()
    grow(paths, folder, 2)
    expected: list[list[list[int]]] = []
    tail = Dataset(str(folder / "*.tfrecord"), numbered.schema, shuffle=SMALL, refresh="epoch").newest(100)
    with loaderd.Loader(tail, batch_size=20, epochs=None, workers=2, remainder="drop") as loader:
        assert loader._num_passes is None
        batches = iter(loader)
        texts: list[list[str]] = []
        for newest in (range(100), range(60, 160), range(130, 230)):
            expected.append([])
            texts.append([])
            for step in range(5):
                texts[-1].append(loader.position.to_json())
                expected[-1].append(numbered.check(next(batches)))
                if step == 2:
                    grow(paths, folder, 1)  # in the middle of an epoch, which does not change by it
            assert sorted(flat(expected[-1])) == list(newest)
        assert loader.statistics().num_records == 100 and loader.statistics().num_shards == 4
    for epoch, of_epoch in enumerate(texts):
        for step in (1, 4):
            position = Position.from_json(of_epoch[step])
            with loaderd.Loader(tail, batch_size=20, epochs=1, workers=1, remainder="drop", start=position) as loader:
                assert numbered.batches(loader) == expected[epoch][step:], "of the shards of then"
                assert repr(loader.position) == f"Position(epoch={epoch + 1}, batch=0)"
                numbers = numbered.records(loader)
                assert sorted(numbers) == list(range(210, 310)), "and then of those of now"
    assert [entry[:3] for entry in json.loads(texts[2][1])["listing"]] == [["002.tfrecord", "003.tfrecord", 2]]
    (folder / "000.tfrecord").unlink()  # old ones may go
    with loaderd.Loader(
        tail, batch_size=20, workers=1, remainder="drop", start=Position.from_json(texts[2][1])
    ) as loader:
        loader.load_state_dict(Position.from_json(texts[2][3]))
        assert numbered.batches(loader) == expected[2][3:]
        with pytest.raises(
            OptionError, match=r"belongs to 2 shards, 000.tfrecord to 001.tfrecord: .* 000.tfrecord missing"
        ):
            loader.load_state_dict(Position.from_json(texts[0][1]))
        assert len(numbered.batches(loader)) == 5, "a position that is refused costs nothing"


@pytest.mark.slow
def test_growing_data_as_an_option_and_in_a_mix(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([100, 100, 100])
    folder = tmp_path / "growing"
    folder.mkdir()
    grow(paths, folder, 1)
    pattern = str(folder / "*.tfrecord")
    options: dict[str, Any] = {"shuffle": SMALL, "refresh": "epoch"}
    with numbered.loader(pattern, batch_size=20, epochs=2, **options) as loader:
        batches = iter(loader)
        first = [numbered.check(next(batches)) for _ in range(5)]
        grow(paths, folder, 1)
        second = numbered.batches(batches)
        assert sorted(flat(first)) == list(range(100)) and sorted(flat(second)) == list(range(200))
        with pytest.raises(TypeError, match="has no length"):
            len(loader)
    games = Dataset(paths[0], numbered.schema, shuffle=SMALL)  # the third shard, which is not in the folder
    growing = Dataset(pattern, numbered.schema, **options)
    mix = Mix({"selfplay": 0.8, "games": 0.2}, {"selfplay": growing, "games": games}, epoch_records=100)
    with loaderd.Loader(mix, batch_size=20, epochs=3, workers=1) as loader:
        numbers = numbered.records(loader)
    assert [sum(n >= 200 for n in numbers[e : e + 100]) for e in (0, 100, 200)] == [20, 20, 20]
    of_games = [number for number in numbers if number >= 200]
    assert len(set(of_games)) == 60, "a set that does not grow goes on where it was"


def test_the_newest_shards_of_each_epoch(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([50, 50, 60])
    folder = tmp_path / "growing"
    folder.mkdir()
    grow(paths, folder, 2)
    tail = Dataset(str(folder / "*.tfrecord"), numbered.schema, shuffle=SMALL, refresh="epoch").newest(shards=2)
    with loaderd.Loader(tail, batch_size=10, epochs=2, workers=1) as loader:
        batches = iter(loader)
        assert sorted(flat([numbered.check(next(batches)) for _ in range(9)])) != list(range(100))
        grow(paths, folder, 1)
        numbered.check(next(batches))
        position = loader.position
        second = [numbered.check(batch) for batch in batches]
    assert sorted(flat(second)) == list(range(50, 160)) and position.epoch == 1
    (folder / sorted(path.name for path in folder.iterdir())[0]).unlink()
    with loaderd.Loader(tail, batch_size=10, epochs=1, workers=1, start=position) as loader:
        assert numbered.batches(loader) == second, "older shards may be deleted"


@pytest.mark.slow
@pytest.mark.parametrize("newest", [1000, 130])
def test_growing_data_of_several_writers(numbered: Numbered, tmp_path: Path, newest: int):
    """Shards that come later lie between those of then, in front of them and behind them."""
    paths = numbered.write([50] * 6)
    folder = tmp_path / "written"
    folder.mkdir()

    def write(*names: str) -> None:
        for name in names:
            (folder / f"{name}.tfrecord").write_bytes(paths.pop(0).read_bytes())

    write("b-0", "c-0", "d-0")
    data = Dataset(str(folder / "*.tfrecord"), numbered.schema, shuffle=SMALL, refresh="epoch").newest(newest)
    with loaderd.Loader(data, batch_size=10, epochs=None, workers=1) as loader:
        batches = iter(loader)
        taken = [numbered.check(next(batches)) for _ in range(3)]
        position = Position.from_json(loader.position.to_json())
        write("a-0", "b-1", "d-1")
        kill(newest_daemon())
        rest = [numbered.check(next(batches)) for _ in range(len(range(0, min(newest, 150), 10)) - 3)]
        assert loader.statistics().daemon_restarts == 1
    assert len(set(flat(taken + rest))) == len(flat(taken + rest)) == min(newest, 150)
    with loaderd.Loader(data, batch_size=10, epochs=1, workers=1, start=position) as loader:
        assert numbered.batches(loader) == rest
    (folder / "c-0.tfrecord").unlink()  # and another one is taken in its place
    with pytest.raises(OptionError, match="belongs to other data"):
        loaderd.Loader(data, batch_size=10, epochs=1, workers=1, start=position)


def test_hosts_share_out_the_shards_that_one_of_them_has_listed(numbered: Numbered, tmp_path: Path):
    paths = numbered.write([50, 50, 60, 70, 80])
    folder = tmp_path / "growing"
    folder.mkdir()
    grow(paths, folder, 2)
    data = Dataset(str(folder / "*.tfrecord"), numbered.schema, shuffle=SMALL, refresh="epoch").newest(100)
    with (
        loaderd.Loader(data, batch_size=10, workers=1, shard=(0, 2)) as first,
        loaderd.Loader(data, batch_size=10, workers=1, shard=(1, 2)) as second,
    ):
        place = Position()
        for epoch, newest in enumerate((range(100), range(60, 160), range(130, 230))):
            with pytest.raises(OptionError, match=r"shard=\(1, 2\) of data that grow: no host has listed"):
                next(iter(second))
            place = Position.from_json(first.next_position().to_json())
            assert first.next_position() == place and (place.epoch, place.batch) == (epoch, 0)
            grow(paths, folder, 1)  # before the other host looks
            second.load_state_dict(place)
            of_hosts = [numbered.batches(loader) for loader in (first, second)]
            assert sorted(flat([*of_hosts[0], *of_hosts[1]])) == list(newest)
            assert len(of_hosts[0]) == len(of_hosts[1]) == 5
        first.load_state_dict(place)
        assert numbered.batches(first) == of_hosts[0]
    with pytest.raises(OptionError, match=r"epochs=None with shard=\(1, 2\) is not for data that grow") as caught:
        loaderd.Loader(data, batch_size=10, epochs=None, shard=(1, 2))
    assert "next_position()" in caught.value.hint


def test_a_mix_that_grows_is_no_set_of_another(numbered: Numbered):
    growing = Dataset(numbered.write([50]), numbered.schema, refresh="epoch")
    mix = Mix({"growing": 1.0}, {"growing": growing}, epoch_records=100)
    with pytest.raises(OptionError, match="must not be a Mix that grows"):
        Mix({"mix": 1.0}, {"mix": mix}, epoch_records=100)


def test_growing_data_that_end_or_cannot_be_carried(numbered: Numbered):
    shards = numbered.write([50, 50])
    pattern = str(shards[0].parent / "*.tfrecord")
    with pytest.raises(OptionError, match="cannot complete a batch from an epoch that has not been listed"):
        numbered.loader(pattern, batch_size=20, refresh="epoch", remainder="carry")
    with numbered.loader(pattern, batch_size=20, refresh="epoch", epochs=None) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        content = [shard.read_bytes() for shard in shards]
        shards[1].write_bytes(content[1][:-3])
        with pytest.raises(CorruptRecordError, match="1 damaged record in 1 of 2 shards"):
            next(batches)
        for shard in shards:
            shard.unlink()
        with pytest.raises(NoShardsError, match="matches no file"):
            next(iter(loader))
        shards[0].write_bytes(content[0])
        numbers = [number for batch, _ in zip(loader, range(3), strict=False) for number in numbered.check(batch)]
        assert sorted(numbers) == list(range(50)), "the loader is none the worse"

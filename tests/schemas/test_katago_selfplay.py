"""KataGo's self-play as it goes on: files of any size and name, of which each epoch has the newest rows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd import PowerLaw, katago_selfplay
from loaderd.errors import OptionError
from loaderd.schemas import kata
from tests.helpers.device_program import unpacked
from tests.helpers.own_processes import kill, newest_daemon, workers_of
from tests.helpers.serving import Server

SCHEMA = loaderd.schemas.katago(
    5, symmetries=range(8), mask_history=0.02, q_values=True, metadata=True, absent="zeros"
)
LAW = PowerLaw(0.65, 0.4, 100)
SMALL = loaderd.Shuffle(window_records=90, block_records=16)


class Selfplay:
    """Writes files of rows, numbered through, under names that say nothing of their age."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num_rows = 0
        self.sizes: list[int] = []
        self.paths: list[Path] = []
        self._rng = np.random.default_rng(5)

    def write(self, *sizes: int) -> None:
        for size in sizes:
            number = len(self.paths)
            rows = np.zeros(size, kata.rows(5, 64 if number % 3 else 80, number % 2 == 0, number % 5 == 0))
            rows["globalInputNC"][:, 18] = np.arange(self.num_rows, self.num_rows + size)
            rows["globalTargetsNC"][:, 25] = 1 + number % 3
            name = f"{self._rng.integers(1 << 63):016X}.npz"
            path = self.folder / f"net-s{number // 4 * 7919 % 1000}" / "tdata" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".npz.tmp").open("wb") as file:
                np.savez_compressed(file, **{each: rows[each] for each in rows.dtype.names or ()})
            os.utime(path.with_suffix(".npz.tmp"), ns=(0, 10**18 + number * 10**9))
            path.with_suffix(".npz.tmp").rename(path)
            self.paths.append(path)
            self.sizes.append(size)
            self.num_rows += size

    def newest(self) -> list[int]:
        return list(range(self.num_rows - min(LAW(self.num_rows), self.num_rows), self.num_rows))


def numbers(batches: Iterable[loaderd.Batch]) -> list[int]:
    found = []
    for batch in batches:
        of_batch = batch["global"][:, 18].astype(int).tolist()
        assert batch["targets"].shape == (len(of_batch), 80) and (batch["weight"] > 0).all()
        found += of_batch
    return found


@pytest.fixture
def selfplay(tmp_path: Path) -> Selfplay:
    played = Selfplay(tmp_path / "selfplay")
    played.write(40, 1, 33, 60, 7, 50, 19)
    return played


def dataset(selfplay: Selfplay, **options: Any) -> loaderd.Dataset:
    return katago_selfplay(selfplay.folder, SCHEMA, window=LAW, shuffle=SMALL, index_cache="none", **options)


@pytest.mark.parametrize(("unpack", "kept"), [("worker", None), ("device", None), ("worker", 64)])
def test_each_epoch_has_the_newest_rows_once(selfplay: Selfplay, unpack: Any, kept: int | None):
    """``kept``: all of them, or so many, as shuffle.py's -keep-target-rows."""
    data = dataset(selfplay, sample=None if kept is None else loaderd.Sample(records=kept))
    with loaderd.Loader(data, batch_size=16, epochs=None, workers=2, unpack=unpack) as loader:
        batches = iter(loader) if unpack == "worker" else unpacked(loader, loader)
        for more in ((12, 80), (1,), (30, 30, 30), ()):
            newest, found = selfplay.newest(), list[int]()
            num_rows = kept or len(newest)
            assert len(newest) < selfplay.num_rows
            while len(found) < num_rows:
                found += numbers([next(batches)])
                if len(found) == 32:
                    selfplay.write(*more)
            assert len({*found}) == num_rows and {*found} <= {*newest} and found != sorted(found)


def test_a_resume_and_kills_while_the_window_grows(selfplay: Selfplay):
    data = dataset(selfplay)
    expected, taken = selfplay.newest(), list[int]()
    with loaderd.Loader(data, batch_size=16, epochs=2, workers=2) as loader:
        batches = iter(loader)
        taken += numbers(next(batches) for _ in range(3))
        position = loaderd.Position.from_json(loader.position.to_json())
        selfplay.write(70, 20)
        kill(*workers_of(newest_daemon()))
        taken += numbers([next(batches)])
        kill(newest_daemon())
        while len(taken) < len(expected):
            taken += numbers([next(batches)])
        assert sorted(taken) == expected
        after = numbers(batches)
        assert loader.statistics().daemon_restarts == 1
    assert sorted(after) == selfplay.newest(), "and then those of now"
    with loaderd.Loader(data, batch_size=16, epochs=2, workers=1, start=position) as loader:
        assert numbers(loader) == taken[48:] + after, "the same rows in the same order"
    selfplay.paths[0].unlink()
    with pytest.raises(OptionError, match="belongs to"):  # a function asks how many rows there are
        loaderd.Loader(data, batch_size=16, workers=1, start=position)


def test_rows_are_drawn_by_their_weights(selfplay: Selfplay):
    """Of the newest rows, 1, 2 or 3 times a quarter: their share, and column 25."""
    data = dataset(selfplay, sample=loaderd.Sample(0.25, weight="weight"))
    newest = selfplay.newest()
    weights = np.concatenate([np.full(size, 1 + number % 3) for number, size in enumerate(selfplay.sizes)])
    drawn = np.zeros(selfplay.num_rows)
    with loaderd.Loader(data, batch_size=16, epochs=40, workers=1) as loader:
        for batch in loader:
            drawn[batch["global"][:, 18].astype(int)] += 1
    assert drawn.sum() == 40 * int(weights[newest].sum() / 4) and not drawn[: newest[0]].any()
    assert np.abs(drawn[newest] / 40 - weights[newest] / 4).max() < 0.35
    for weight in (1, 2, 3):
        assert drawn[newest][weights[newest] == weight].mean() / 40 == pytest.approx(weight / 4, abs=0.05)


MODULE = """
import loaderd
schema = loaderd.schemas.katago(
    5, symmetries=range(8), mask_history=0.02, q_values=True, metadata=True, absent="zeros"
)
train = loaderd.katago_selfplay(
    "selfplay", schema, window=loaderd.PowerLaw(0.65, 0.4, 100), shuffle=loaderd.Shuffle(90, 16), index_cache="none"
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", [False, True])
def test_a_server_gives_the_same_rows(selfplay: Selfplay, network: bool, tmp_path: Path):
    (tmp_path / "selfplay_datasets.py").write_text(MODULE)
    options: dict[str, Any] = {"batch_size": 16, "epochs": 1}
    with loaderd.Loader(dataset(selfplay), workers=1, **options) as loader:
        own = [{name: values.copy() for name, values in batch.items()} for batch in loader]
    server = Server(tmp_path, "selfplay_datasets:train", network=network)
    try:
        address = server.address  # waits until it listens
        address = address if network else f"unix://{server.path}"
        with loaderd.connect(address, "train", **options) as loader:
            served = [{name: values.copy() for name, values in batch.items()} for batch in loader]
    finally:
        server.close()
    assert [*map(len, served)] == [*map(len, own)]
    for here, there in zip(own, served, strict=True):
        for name, values in here.items():
            assert there[name].tobytes() == values.tobytes(), name

"""The order of batches is the same as in earlier versions: a position that one of them saved goes on in this one.

``recorded_orders.json`` has a digest of each case's batches. A change of the order is a break that users must be told
of: then ``python -m tests.client.test_recorded_orders`` writes the digests anew.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from tests.helpers import fixed_files

RECORDED = Path(__file__).with_name("recorded_orders.json")
SMALL = loaderd.Shuffle(window_records=64, block_records=16)
LARGE = loaderd.Shuffle(window_records=4000)
WRAPPED = {how: (f"fixed/*-{how}", fixed_files.SCHEMA) for how in fixed_files.WRAPPINGS}
FEATURES = loaderd.testing.schema_of({"number": np.zeros(1, np.int64)}).features


def random_numbers(_: Any, rng: Any) -> Any:
    return rng.integers(0, 1 << 30)


FRAMED = loaderd.Schema(FEATURES, {"number": loaderd.Array("number")})
RANDOM = loaderd.Schema(
    FEATURES,
    {"id": loaderd.Array("number"), "number": loaderd.Derived(random_numbers, "id", random=True, dtype="int64")},
)


def write(folder: Path) -> None:
    """All shards of the cases; numbers of records are their own."""
    for name, compression, sizes in (
        ("plain", "none", (150, 1, 83)),
        ("gzip", "gzip", (40, 60)),
        ("zlib", "zlib", (70,)),
    ):
        for shard, size in enumerate(sizes):
            numbers = np.arange(size) + 10_000 * shard
            loaderd.testing.write_shards(folder / name / str(shard), {"number": numbers}, compression=compression)
    # Some 8 MB inflated, so that there are restart points, and blocks between them.
    numbers = {"number": np.arange(24_000), "bits": np.random.default_rng(0).random((24_000, 2400)) < 0.1}
    for compression in ("gzip", "zlib"):
        loaderd.testing.write_shards(folder / f"large-{compression}" / "0", numbers, compression=compression)
    (folder / "fixed").mkdir()
    fixed_files.write_all(folder / "fixed")


def framed(name: str, **options: Any) -> tuple[str, loaderd.Schema, dict[str, Any]]:
    return f"{name}/*/*.tfrecord", FRAMED, options


def digest(batches: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(batches).encode()).hexdigest()[:16]


def read(loader: loaderd.Loader, most: int | None = None) -> tuple[list[list[int]], loaderd.Position]:
    """The numbers of its batches, and the position behind them."""
    batches: list[list[int]] = []
    with loader:
        for batch in loader:
            batches.append(batch["number"].tolist())
            if len(batches) == most:
                break
        return batches, loader.position


# ------------------------------------------------------------------------------------------ the cases


def of_shards(shards: str, schema: loaderd.Schema, hosts: int = 1, **options: Any) -> Callable[[Path], str]:
    """Two epochs on each host."""

    def run(folder: Path) -> str:
        every = {"batch_size": 7, "epochs": 2, "workers": 1, **options}
        loaders = (
            loaderd.Loader(str(folder / shards), schema, shard=(host, hosts), **every) for host in range(hosts)
        )
        return digest([batch for loader in loaders for batch in read(loader)[0]])

    return run


def of_set(make: Callable[[Path], Any], **options: Any) -> Callable[[Path], str]:
    def run(folder: Path) -> str:
        return digest(read(loaderd.Loader(make(folder), batch_size=7, epochs=3, workers=1, **options))[0])

    return run


def resumed(before: tuple[int, int], after: tuple[int, int], remainder: str, batches: int) -> Callable[[Path], str]:
    """The rest of two epochs, which other hosts take with another batch size (each: hosts, batch size)."""

    def run(folder: Path) -> str:
        common: dict[str, Any] = {"epochs": 2, "shuffle": SMALL, "remainder": remainder, "workers": 1}
        shards, (hosts, size) = str(folder / "plain/*/*.tfrecord"), before
        first = loaderd.Loader(shards, FRAMED, batch_size=size, shard=(0, hosts), **common)
        _, position = read(first, batches)
        hosts, size = after
        position = loaderd.Position.from_json(position.to_json())
        loaders = (
            loaderd.Loader(shards, FRAMED, batch_size=size, shard=(host, hosts), start=position, **common)
            for host in range(hosts)
        )
        return digest([batch for loader in loaders for batch in read(loader)[0]])

    return run


def plain(folder: Path, **options: Any) -> loaderd.Dataset:
    return loaderd.Dataset(str(folder / "plain/*/*.tfrecord"), FRAMED, shuffle=SMALL, **options)


def gzipped(folder: Path) -> loaderd.Dataset:
    return loaderd.Dataset(str(folder / "gzip/*/*.tfrecord"), FRAMED, shuffle=SMALL)


def cases() -> Iterator[tuple[str, Callable[[Path], str]]]:
    for name in ("plain", "gzip", "zlib"):
        yield f"{name}, default shuffle", of_shards(*framed(name)[:2])
        yield f"{name}, small windows", of_shards(*framed(name)[:2], shuffle=SMALL, seed=7)
    for name in ("large-gzip", "large-zlib"):
        yield f"{name}, with restart points", of_shards(*framed(name)[:2], shuffle=LARGE, seed=7, batch_size=500)
    yield "large-gzip on 2 hosts", of_shards(*framed("large-gzip")[:2], shuffle=LARGE, batch_size=500, hosts=2)
    for how, (shards, schema) in WRAPPED.items():
        yield f"fixed {how}", of_shards(shards, schema, shuffle=SMALL)
    yield "all kinds of fixed", of_shards("fixed/[0-4]-*", fixed_files.SCHEMA, shuffle=SMALL, hosts=2)
    yield "unshuffled", of_shards(*framed("plain")[:2], shuffle=False)
    yield "random field", of_shards("plain/*/*.tfrecord", RANDOM, seed=3)
    for remainder, hosts in product(("short", "drop", "carry"), (1, 3)):
        options = {"shuffle": SMALL, "remainder": remainder, "seed": 2**63 - 1}
        yield f"{remainder} on {hosts} hosts", of_shards(*framed("plain")[:2], hosts=hosts, **options)
    for before, after, remainder, batches in (
        ((2, 7), (3, 7), "short", 5),
        ((2, 7), (1, 10), "drop", 3),
        ((1, 7), (2, 5), "carry", 40),
        ((3, 4), (2, 9), "short", 30),
    ):
        yield f"resume {before} as {after}, {remainder}", resumed(before, after, remainder, batches)
    yield "concat", of_set(lambda folder: loaderd.Concat([plain(folder), gzipped(folder)]))
    weights = {0: {"a": 0.5, "b": 0.5}, 2: {"a": 0.1, "b": 0.9}}
    yield "mix", of_set(lambda folder: loaderd.Mix(weights, {"a": plain(folder), "b": gzipped(folder)}, 70))
    yield "take and skip", of_set(lambda folder: plain(folder).skip(20).take(150))
    yield "newest", of_set(lambda folder: plain(folder).newest(77))
    yield "split", of_set(lambda folder: plain(folder).split(0.7, 0.3)[1])
    third = loaderd.Derived(lambda number: number % 3 == 1, "number")
    yield "where", of_set(lambda folder: plain(folder, where=third).skip(5))
    yield "split by shard", of_set(lambda folder: plain(folder, seed=5).split(0.5, 0.5, by="shard", seed=1)[0])


CASES = dict(cases())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_order_is_the_recorded_one(folder: Path, case: str):
    assert CASES[case](folder) == json.loads(RECORDED.read_text())[case]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        found = {case: run(Path(name)) for case, run in CASES.items()}
    RECORDED.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

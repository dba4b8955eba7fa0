"""Loading slices of blocks: which rows come, and how much of the shard is read for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.formats.indexer import make_indexes
from loaderd.options import Shuffle, StreamOptions
from loaderd.plan.epoch import Slice
from loaderd.storage.files import list_shards
from loaderd.storage.local_file import LocalFile
from loaderd.worker.file_rows import FileRows
from tests.helpers.fixed_files import SCHEMA, records_from

RECORDS, BLOCK = 300, 130
SLICES = [(0, 0, 130), (0, 0, 1), (0, 31, 33), (0, 32, 64), (1, 40, 130), (1, 129, 130), (2, 0, 40), (2, 33, 40)]


class Read:
    """A data set of one shard, and what is read of it."""

    def __init__(self, dataset: loaderd.Dataset, patch: pytest.MonkeyPatch) -> None:
        options = StreamOptions(8, shuffle=Shuffle(block_records=BLOCK))
        files = list_shards(dataset.shards)
        records = dataset.schema.records
        (index,) = make_indexes(files, records, BLOCK)
        self.data = LocalData(dataset, options, [files], {None: {files[0]: index}})
        self.schema = dataset.schema
        self.num_bytes = 0
        self._rows = FileRows(dataset.schema, self.data.files, self.data.compressions)
        read_at = LocalFile.read_at

        def counted(file: LocalFile, offset: int, view: memoryview) -> int:
            self.num_bytes += len(view)
            return read_at(file, offset, view)

        patch.setattr(LocalFile, "read_at", counted)

    def load(self, slices: list[tuple[int, int, int]]) -> Any:
        """The rows, as the schema has them."""
        wanted, row = [], 0
        for block, first, stop in slices:
            wanted.append(Slice(block, first, stop, row, 0))
            row += stop - first
        window = np.full((row, self.schema.row_bytes), 0xEE, np.uint8)
        assert self._rows.read(wanted, [*self.data.places(wanted, 0)], np.arange(row), window) == []
        return window.view(self.schema.row_dtype)[:, 0]


@pytest.fixture(params=["tfrecord", "fixed"])
def dataset(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    write_numbered: Callable[..., list[Path]],
    numbered_schema: loaderd.Schema,
) -> loaderd.Dataset:
    if request.param == "tfrecord":
        return loaderd.Dataset(write_numbered([RECORDS]), numbered_schema)
    path = tmp_path / "records.bin"
    path.write_bytes(records_from(0, RECORDS).tobytes())
    return loaderd.Dataset(path, SCHEMA)


def numbers(rows: Any) -> list[int]:
    return rows["id" if "id" in rows.dtype.names else "number"].reshape(-1).tolist()


@pytest.mark.parametrize("selection", ["all", "skip", "split"])
def test_a_slice_has_its_records(dataset: loaderd.Dataset, selection: str, monkeypatch: pytest.MonkeyPatch):
    if selection == "skip":
        dataset = dataset.skip(50)
    if selection == "split":
        dataset = dataset.split(0.7, 0.3)[0]
    read = Read(dataset, monkeypatch)
    (counts,) = read.data.counts
    whole = [numbers(read.load([(block, 0, int(count))])) for block, count in enumerate(counts)]
    assert sum(map(len, whole)) == len(set(itertools.chain(*whole)))
    fitting = [(block, first, min(stop, len(whole[block]))) for block, first, stop in SLICES if block < len(whole)]
    fitting = [(block, first, stop) for block, first, stop in fitting if first < stop]
    assert len(fitting) > 4
    assert numbers(read.load(fitting)) == [
        number for block, first, stop in fitting for number in whole[block][first:stop]
    ]


def test_what_is_not_wanted_is_not_read(dataset: loaderd.Dataset, monkeypatch: pytest.MonkeyPatch):
    read = Read(dataset, monkeypatch)
    read.load([(0, 0, BLOCK)])
    of_block, read.num_bytes = read.num_bytes, 0
    assert numbers(read.load([(0, 64, 70)])) == list(range(64, 70))
    assert 0 < read.num_bytes < of_block / 3

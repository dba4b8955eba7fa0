"""Records of fixed size in a loader: as many wrappings as there are in one data set; resumed at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loaderd
from loaderd.errors import RecordMismatchError
from tests.helpers.fixed_files import SCHEMA, records_from, wrapped, write_all

OPTIONS: dict[str, Any] = {
    "batch_size": 16,
    "shuffle": loaderd.Shuffle(window_records=90, block_records=7),
    "seed": 5,
    "workers": 2,
}


@pytest.fixture
def loader_of(tmp_path: Path) -> Any:
    records = write_all(tmp_path)

    def make(**options: Any) -> loaderd.Loader:
        # Of its own folder: the cache is shared by loaders of one test.
        return loaderd.Loader(tmp_path / "*-*", SCHEMA, **{**OPTIONS, "index_cache": f"{tmp_path}.index", **options})

    make.records = records  # type: ignore[attr-defined]
    return make


def numbers_of(batches: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in batches]


def test_each_record_comes_once_and_as_it_was_written(loader_of: Any):
    records = loader_of.records
    seen: list[int] = []
    with loader_of() as loader:
        for batch in loader:
            chosen = records[batch["number"]]
            assert (batch["values"] == chosen["values"]).all()
            assert (batch["bits"] == np.unpackbits(chosen["planes"], axis=1)).all()
            seen += batch["number"].tolist()
    assert sorted(seen) == list(range(len(records))) != seen


def test_features_that_nobody_reads_need_not_be_kept(loader_of: Any, tmp_path: Path):
    few = loaderd.FixedRecords(SCHEMA.records.dtype[["number"]])
    schema = loaderd.Schema(few, {"number": loaderd.Array("number")})
    assert schema.row_bytes == 8 < SCHEMA.row_bytes
    shards = [str(path) for path in sorted(tmp_path.glob("*-*"))]
    with loaderd.Loader(shards, schema, batch_size=50, shuffle=False, index_cache=f"{tmp_path}.index") as loader:
        assert [number for batch in numbers_of(loader) for number in batch] == list(range(60 * len(shards)))


@pytest.mark.one_variant
@pytest.mark.parametrize("how", ["none", "gzip", "zstd"])
def test_the_byte_of_a_record_that_does_not_fit_is_that_of_the_file(how: str, tmp_path: Path):
    """Or that of the decompressed stream: not of the block in which it is read."""
    records = records_from(0, 60)
    records["version"][45] = 4
    (tmp_path / "shard").write_bytes(wrapped(records, how))
    with (
        loaderd.Loader(tmp_path / "shard", SCHEMA, **{**OPTIONS, "index_cache": "none"}) as loader,
        pytest.raises(RecordMismatchError) as raised,
    ):
        numbers_of(loader)
    assert (raised.value.damage.record, raised.value.damage.offset) == (45, 45 * records.itemsize)

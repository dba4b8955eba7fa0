"""Small files that hold a great deal: what they take of a worker's memory, and what is said of them."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.formats import compression, fixed, fixed_index
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.inflate import inflate_whole
from loaderd.ipc.worker_messages import BlockSelection, CheckTask, FilePlace
from loaderd.plan.epoch import Slice
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import Block
from loaderd.worker.file_rows import FileRows
from tests.formats.shard_bytes import make_shard, overwrite
from tests.helpers.fixed_files import RECORDS, records_from, tar_of, zstd

ZEROS = loaderd.FixedRecords(np.dtype([("x", "u1", (1 << 10,))]))
COMPRESS = {"gzip": gzip.compress, "zstd": zstd}
# Index a shard, then read some of its first block, and print what that took: in MiB, and the records found.
MEASURE = """
import json, re, sys
from pathlib import Path
import numpy as np
import loaderd, pyarrow
from loaderd.formats import npz
from loaderd.storage.files import list_shards
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.ipc.worker_messages import BlockSelection, CheckTask, FilePlace
from loaderd.plan.epoch import Slice
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import Block
from loaderd.worker.file_rows import FileRows
records = loaderd.FixedRecords(np.dtype([("x", "u1", (1 << 10,))]))
(file,) = list_shards(sys.argv[1])

def peak_mib():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

before = peak_mib()
index = build_fixed_index(file, records, 1024)
reader = FixedBlockReader(records, [file], [index.compression])
for number in range(min(1, len(index.counts))):
    block = Block(0, *index.block(number))
    if reader.can_read_together(block):
        reader.read_together([block])
    for piece in reader.read(block, block.num_records - 10, block.num_records):
        pass
print(json.dumps([peak_mib() - before, index.num_records, [damage.found for damage in index.damages]]))
"""


def measured(path: Path) -> tuple[int, int, list[str]]:
    """(MiB of memory, records, what the damages found) of a shard of ``ZEROS``, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], stdout=subprocess.PIPE, check=True, text=True)
    return tuple(json.loads(done.stdout))  # type: ignore[return-value]


def compressed_zeros(how: str, mib: int) -> bytes:
    """What so many MiB of zeros are, compressed."""
    if how == "zstd":
        return zstd(bytes(mib << 20))
    deflater = zlib.compressobj(9, wbits=31)
    return b"".join([*(deflater.compress(bytes(1 << 20)) for _ in range(mib)), deflater.flush()])


def npz_of_zeros(mib: int) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros((mib << 10, 1 << 10), np.uint8))
    return out.getvalue()


@pytest.mark.parametrize("how", ["gzip", "zstd", "npz", "tar"])
def test_what_is_inflated_takes_no_memory_in_proportion(how: str, tmp_path: Path):
    """A worker has 32 MiB of records in memory, and what it makes them of. All of it would be 120 MiB."""
    data = {"npz": npz_of_zeros, "tar": lambda mib: tar_of([("a.zst", compressed_zeros("zstd", mib))])}.get(
        how, lambda mib: compressed_zeros(how, mib)
    )(120)
    (tmp_path / "a").write_bytes(data)
    assert len(data) < 1 << 20, "so small that it might be inflated at once"
    mib, num_records, found = measured(tmp_path / "a")
    assert (num_records, found) == (120 << 10, [])
    assert mib < 80


@pytest.mark.parametrize("some", ["all", "a tenth"])
def test_a_few_rows_of_a_large_npz_take_little_memory(some: str, tmp_path: Path):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(4_000_000) // 40_000 % 256)
    schema = loaderd.Schema(loaderd.FixedRecords([("x", "<i8")]), fields={"x": loaderd.Array("x")})
    files = list_shards(str(tmp_path / "a.npz"))
    block = Block(0, *build_fixed_index(files[0], schema.records, 1024).block(0))
    left = None if some == "all" else BlockSelection(1_000_000, 1_004_000, [])
    rows, window = FileRows(schema, files, ["npz"]), np.zeros((1000, schema.row_bytes), np.uint8)
    tracemalloc.start()
    try:
        rows.check_fits(CheckTask(0, 0, 1, FilePlace(block, left, 0), any_fits=False), 1)
        faults = rows.read([Slice(0, 2900, 3900, 0, 0)], [FilePlace(block, left, 0)], np.arange(1000), window)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    first = 2900 if some == "all" else 1_002_900
    assert not faults and window.view("<i8")[:, 0].tolist() == [n // 40_000 for n in range(first, first + 1000)]
    assert peak_bytes < 20 << 20, "the npz's own buffers; a number for each row would be 32 MiB"


def test_a_bomb_names_itself(tmp_path: Path):
    (tmp_path / "a").write_bytes(compressed_zeros("zstd", 600))
    mib, num_records, (found,) = measured(tmp_path / "a")
    assert num_records == 0 and mib < 100
    assert found.startswith("a bomb, 537") and found.endswith(f" bytes of {(tmp_path / 'a').stat().st_size}")


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_of_a_bomb_no_record_is_used_and_what_is_beside_it_stays(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(compression, "_SMALL_BYTES", 5 << 20)
    monkeypatch.setattr(fixed_index, "MAX_WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(compression, "_BOMB_RATIO", 900)
    game = gzip.compress(bytes(10 << 10))
    data = tar_of([("0.gz", game), ("1.gz", compressed_zeros(how, 8)), ("2.gz", game)])
    index = build_fixed_index(make_shard(tmp_path / "a.tar", data), ZEROS, 7)
    (damage,) = index.damages
    assert damage.expected == "at most 900 bytes of each that is compressed" and damage.record == 10
    assert damage.found.startswith("a bomb, ") and "in '1.gz', the member at byte" in damage.found
    assert index.counts.tolist() == [10, 10]


def test_what_is_compressed_well_is_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compression, "_SMALL_BYTES", 1 << 20)
    monkeypatch.setattr(fixed_index, "MAX_WHOLE_BYTES", 1 << 10)
    records = np.tile(np.random.default_rng(0).integers(0, 256, 1 << 10, np.uint8), 4096)
    records[:: 1 << 10] = np.arange(4096) % 256  # each is another one
    for how, compress in COMPRESS.items():
        data = compress(records.tobytes())
        assert len(records) > 100 * len(data), how
        index = build_fixed_index(make_shard(tmp_path / "a", data), ZEROS, 7)
        assert index.num_records == 4096 and not index.damages


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_a_block_that_holds_more_than_it_did_is_not_inflated_further(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The file was replaced behind the index pass, and its size and time say nothing of it."""
    rng = np.random.default_rng(0)
    file = make_shard(tmp_path / "a", COMPRESS[how](rng.integers(0, 256, 100 << 10, np.uint8).tobytes()))
    index = build_fixed_index(file, ZEROS, 7)
    made: list[int] = []

    def noted(data: memoryview, most_bytes: int) -> bytes | None:
        whole = inflate_records(data, most_bytes)
        made.append(most_bytes if whole is None else len(whole))
        return whole

    inflate_records = fixed.inflate_records
    monkeypatch.setattr("loaderd.formats.fixed_blocks.inflate_records", noted)
    bomb = compressed_zeros(how, 40)
    overwrite(file, bomb + bytes(file.size_bytes - len(bomb)))
    reader = FixedBlockReader(ZEROS, [file], [index.compression])
    block = Block(0, *index.block(0))
    assert reader.read_together([block]) is None
    assert made == [block.num_records * ZEROS.record_bytes + ZEROS.record_bytes - 1]


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_no_more_is_inflated_at_once_than_is_asked_for(how: str):
    data = records_from(0, 60_000).tobytes()
    stored = memoryview(COMPRESS[how](data))
    assert inflate_whole(stored, how, len(data)) == inflate_whole(stored, how, 1 << 40) == data
    for most in (0, 1, 1000, 1 << 18, len(data) - 1):
        assert inflate_whole(stored, how, most) is None


@pytest.mark.parametrize("padding", [b"", b"\0", bytes(100_000)], ids=len)
def test_a_gzip_of_very_many_members(tmp_path: Path, padding: bytes):
    """Behind each one, what the inflater has not used is copied: of all of 1 MiB, that would take minutes."""
    records = records_from(0, 5000).tobytes()
    step = 5 * RECORDS.record_bytes if len(padding) < 2 else len(records)
    games = [records[begin : begin + step] for begin in range(0, len(records), step)]
    many = b"".join(gzip.compress(game) + padding for game in games)
    assert inflate_whole(memoryview(many), "gzip", len(records)) == records
    for wrong in (many[: -len(padding) - 1 or None], many + b"\x1f", many[: -len(padding) or None] + b"more"):
        assert inflate_whole(memoryview(wrong), "gzip", len(records)) is None
    index = build_fixed_index(make_shard(tmp_path / "a", many), RECORDS, 7)
    assert index.num_records == 5000 and not index.damages

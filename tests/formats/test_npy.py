"""An array of numpy's as a shard: any header that numpy writes, damaged files, and those that mean ill."""

from __future__ import annotations

import contextlib
import io
import tracemalloc
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import loaderd
from loaderd.errors import ShardReadError
from loaderd.formats.detect import columns_of
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.shard_index import ShardIndex
from loaderd.storage.shard_file import Block, ShardFile
from tests.formats.shard_bytes import make_shard
from tests.helpers.evil_npz import npy
from tests.reliability.mutate import BYTES

RECORDS = loaderd.FixedRecords(np.dtype([("x", "<i2"), ("y", "u1", (3,))]))


def read(file: ShardFile, index: ShardIndex, records: loaderd.FixedRecords) -> bytes:
    """The records of all blocks, each of which is read in two ways."""
    reader, data = FixedBlockReader(records, [file], [index.compression]), b""
    for number in range(len(index.counts)):
        block = Block(0, *index.block(number))
        pieces = list(reader.read(block, 0, block.num_records))
        one = b"".join(piece.buffer[: piece.num_records * records.record_bytes].tobytes() for piece in pieces)
        run = reader.read_together([block])
        assert run is not None and run[0][: len(one)].tobytes() == one
        data += one
    reader.close()
    return data


VALUES = arrays.integer_dtypes() | arrays.floating_dtypes() | arrays.boolean_dtypes() | arrays.byte_string_dtypes()
NAMES = st.text("abé'\"\\ [](),:é", min_size=1, max_size=5)
STRUCTURED = st.builds(
    lambda fields, align: np.dtype([(name, *of) for name, of in fields.items()], align=align),
    st.dictionaries(NAMES, st.tuples(VALUES, st.sampled_from([(), (3,), (2, 2)])), min_size=1, max_size=4),
    st.booleans(),
)


@given(
    dtype=VALUES | STRUCTURED,
    shape=st.lists(st.integers(1, 5), max_size=2),
    rows=st.integers(0, 40),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    order=st.sampled_from("CF"),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_is_read_as_numpy_reads_it(tmp_path, dtype, shape, rows, version, order, seed):
    dims = (rows,) if dtype.names else (rows, *shape)
    data = np.random.default_rng(seed).bytes(int(np.prod(dims)) * dtype.itemsize)
    array = np.asarray(np.frombuffer(data, dtype).reshape(dims), order=order)
    out = io.BytesIO()
    try:
        np.lib.format.write_array(out, array, version)
    except UnicodeEncodeError:  # a name that this version cannot hold
        return
    file = make_shard(tmp_path / "a.npy", out.getvalue())
    if not (array.flags.c_contiguous or not array.size):
        with pytest.raises(ShardReadError, match=r"C order.*in Fortran order"):
            columns_of(file)
        return
    records, _ = columns_of(file) or (None, {})
    found = np.dtype("V1") if records is None else records.dtype
    if dtype.names:
        loaded = np.load(file.uri).dtype
        assert (found.fields, found.itemsize) == (loaded.fields, loaded.itemsize)
    index = build_fixed_index(file, records := loaderd.FixedRecords(found), 7)
    assert not index.damages and index.num_records == rows
    assert read(file, index, records) == np.load(file.uri).tobytes()


@pytest.mark.parametrize("cut", [1, 5, 7, -3])
def test_one_that_is_cut_or_goes_on(cut: int, tmp_path: Path):
    out = io.BytesIO()
    np.save(out, array := np.frombuffer(bytes(range(100)), RECORDS.dtype))
    data = out.getvalue()[:-cut] if cut > 0 else out.getvalue() + bytes(-cut)
    index = build_fixed_index(file := make_shard(tmp_path / "a.npy", data), RECORDS, 7)
    (damage,) = index.damages
    whole = 20 - max(0, -(-cut // 5))
    assert index.num_records == whole == damage.record and damage.expected == "20 rows, as the array's header says"
    assert read(file, index, RECORDS) == array[:whole].tobytes()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (npy(f"({10**17},)", bytes(50), "<i2"), "100000000000000000 rows, as the array's header says, found 25 rows"),
        (npy("(2,)", bytes(50), "|O"), "objects of Python's .*, which are pickles"),
        (npy("()", bytes(2), "<i2"), "a single value, without rows"),
        (npy("(5, 5)", bytes(50), "<i2"), r"expected rows of .*\('x', '<i2'\).*, found rows of \('<i2', \(5,\)\)"),
        (npy("(2,)", bytes(50), "<i2", length=1 << 31, version=2), "an array of numpy's"),
        (npy("(" * 60_000, b"", version=2), "an array of numpy's"),
        (npy("(2,)", b"").replace(b"'|u1'", b"[" * 5), "no dtype of named fields"),
    ],
)
def test_a_header_that_means_ill(data: bytes, said: str, tmp_path: Path):
    file, one = make_shard(tmp_path / "a.npy", data), loaderd.FixedRecords(np.dtype([("x", "<i2")]))
    tracemalloc.start()
    with pytest.raises(ShardReadError, match=said):
        index = build_fixed_index(file, one, 7)
        raise ShardReadError(str(index.damages[0]))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_mutated_files_give_an_error_or_the_rows_that_numpy_reads(tmp_path: Path):
    out, rng = io.BytesIO(), Random("npy")
    np.save(out, np.frombuffer(rng.randbytes(300), RECORDS.dtype))
    refused = 0
    for number in range(300):
        change = rng.choice(list(BYTES.values()))
        data = change(out.getvalue(), rng, out.getvalue())
        file = make_shard(tmp_path / str(number), data)
        try:
            index = build_fixed_index(file, RECORDS, 7)
        except ShardReadError:
            refused += 1
            continue
        found = read(file, index, RECORDS)
        assert found in data
        with contextlib.suppress(ValueError):  # numpy takes no header with another space at its end
            if index.compression == "npy" and not index.damages:
                assert np.load(file.uri).tobytes() == found
    assert 30 < refused < 290

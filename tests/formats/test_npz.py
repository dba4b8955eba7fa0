"""What an npz states of itself, and does not hold: headers of arrays, entries and the directory of the zip."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.cli.stored_records import stored_in
from loaderd.errors import ShardReadError
from loaderd.formats.detect import detect_schema
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.npz import arrays_of
from loaderd.storage.files import open_shard
from tests.formats.shard_bytes import make_shard
from tests.helpers.evil_npz import npy, npz, stating

RECORDS = loaderd.FixedRecords(np.dtype([("x", "u1", (100,)), ("y", "<i4")]))
Y = npy("(5,)", bytes(20), "<i4")
SOUND = npz({"x": npy("(5, 100)", bytes(500)), "y": Y})
STORED = npz({"x": npy("(5, 100)", bytes(500)), "y": npy("(5,)", bytes(20), "<i4")}, zipfile.ZIP_STORED)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        pytest.param(npz({"x": npy("(-5, 100)", bytes(500)), "y": Y}), "a numpy array in x.npy, found", id="below 0"),
        pytest.param(npz({"x": npy("(5, -100)", bytes(500)), "y": Y}), "a numpy array in x.npy, found", id="-100"),
        pytest.param(
            npz({"x": npy("(5000, 100)", bytes(500)), "y": Y}),
            r"the values of x.npy, \(5000, 100\) of uint8, found 500 bytes",
            id="more rows than there are",
        ),
        pytest.param(npz({"x": npy(f"({10**17}, 100)", b""), "y": Y}), f"{10**17}, 100", id="very many rows"),
        pytest.param(npz({"x": npy(f"({'9' * 900}, 100)", b""), "y": Y}), "9999", id="many digits"),
        pytest.param(npz({"x": npy(f"({'9' * 9000}, 100)", b""), "y": Y}), "a numpy array in", id="too many digits"),
        pytest.param(npz({"x": npy(f"({'-' * 9000}5, 100)", b""), "y": Y}), "a numpy array in", id="Python's stack"),
        pytest.param(npz({"x": npy("(" * 9000, b""), "y": Y}), "a numpy array in", id="parentheses"),
        pytest.param(npz({"x": npy("(5, 100)", b"", "O"), "y": Y}), "object", id="objects"),
        pytest.param(npz({"x": npy("(5, 100)", b"", "<f3"), "y": Y}), "a numpy array in", id="no dtype"),
        pytest.param(
            npz({"x": npy("(5, 100)", b"", length=65535), "y": Y}), "with its CRC|values of", id="long header"
        ),
        pytest.param(
            npz({"x": npy("(5, 100)", b"", length=1 << 31, version=2), "y": Y}), "values of", id="2 GiB header"
        ),
        pytest.param(npz({"x": b"\x93NUMPY\x01", "y": Y}), "a numpy array in x.npy", id="cut"),
        pytest.param(
            stating(SOUND, "offset", -1), "y.npy, .* bytes from byte 4294967295 on, found a file of", id="at"
        ),
        pytest.param(stating(SOUND, "offset", 4), r"an entry of a zip, found b", id="in the middle"),
        pytest.param(stating(SOUND, "stored", 1 << 31), "y.npy, 2147483648 bytes from byte", id="stored"),
        pytest.param(
            stating(SOUND, "inflated", 1 << 31), "y.npy of at most [0-9]+ bytes, found 2147483648", id="bomb"
        ),
        pytest.param(stating(SOUND, "inflated", 30), "the values of y.npy", id="few bytes"),
        pytest.param(
            stating(STORED, "inflated", 1 << 31), "y.npy of at most 148 bytes, found 2147", id="not deflated"
        ),
        pytest.param(stating(SOUND, "method", 99), "compression method 99", id="method"),
        pytest.param(stating(SOUND, "bytes", 1 << 31, of_end=True), "a whole npz", id="directory"),
        pytest.param(stating(SOUND, "offset", 1 << 31, of_end=True), "x.npy, 77 bytes from byte -2", id="its place"),
    ],
)
def test_a_number_that_cannot_be_is_named(data: bytes, said: str, tmp_path: Path):
    with pytest.raises(ShardReadError, match=said) as caught:
        build_fixed_index(make_shard(tmp_path / "a.npz", data), RECORDS, 7)
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (5, 100), }",
        '{"shape":(5,100),"fortran_order":False,"descr":"|u1"}',
        "{'fortran_order': False,\n 'descr': 'u1',\n 'shape': (5L, 100L)}",
    ],
)
def test_headers_as_others_write_them(header: str, version: int, tmp_path: Path):
    """Programs in C++, and Python 2."""
    data = np.arange(500, dtype=np.uint8).tobytes()
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    array = b"\x93NUMPY" + bytes([version, 0]) + length + header.encode() + data
    index = build_fixed_index(make_shard(tmp_path / "a.npz", npz({"x": array, "y": Y})), RECORDS, 7)
    out = io.BytesIO()
    np.savez(out, x=np.arange(500, dtype=np.uint8).reshape(5, 100), y=np.zeros(5, "<i4"))
    same = build_fixed_index(make_shard(tmp_path / "b.npz", out.getvalue()), RECORDS, 7)
    assert (index.num_records, index.digest) == (5, same.digest)


def test_a_directory_of_very_many_entries_is_not_read(tmp_path: Path):
    """zipfile takes ten times its bytes for it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(20_000):
            archive.writestr(f"{number:05}.npy", b"")
    file = make_shard(tmp_path / "a.npz", out.getvalue())
    tracemalloc.start()
    try:
        with pytest.raises(ShardReadError, match=r"a whole npz, found a directory of \d+ bytes"):
            build_fixed_index(file, RECORDS, 7)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_what_an_entry_has_behind_its_data_is_not_kept(tmp_path: Path):
    """An inflater keeps what it is given behind the end."""
    data = npz({"x": npy("(5, 100)", bytes(500)), "y": Y})
    at = data.index(b"PK\x03\x04", 4)
    stored = int.from_bytes(data[data.index(b"PK\x01\x02") + 20 :][:4], "little")
    more = bytearray(data[:at] + bytes(20 << 20) + data[at:])
    first = more.index(b"PK\x01\x02")
    more[first + 20 : first + 24] = (stored + (20 << 20)).to_bytes(4, "little")
    second = more.index(b"PK\x01\x02", first + 4)
    more[second + 42 : second + 46] = (at + (20 << 20)).to_bytes(4, "little")
    end = more.rindex(b"PK\x05\x06")
    more[end + 16 : end + 20] = first.to_bytes(4, "little")
    file = make_shard(tmp_path / "a.npz", bytes(more))
    tracemalloc.start()
    try:
        index = build_fixed_index(file, RECORDS, 7)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.num_records == 5 and peak_bytes < 4 << 20


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": npy(f"(0, {1 << 40})", b"")},
        {"x": npy(f"({', '.join('0' * 100)})", b"")},
        {"policyTargetsNCMove": npy(f"(0, 2, {20_000**2 + 1})", b"", "<i2"), "globalTargetsNC": npy("(0, 64)", b"")},
    ],
)
def test_arrays_without_rows_may_not_be_of_any_size(arrays: dict[str, bytes], tmp_path: Path):
    """No data proves it wrong."""
    file = make_shard(tmp_path / "a.npz", npz(arrays))
    assert detect_schema(file) is None
    if "x" in arrays:
        opened = open_shard(file)
        with pytest.raises(ShardReadError, match=r"rows in x\.npy"):
            arrays_of(file, opened.read_at)
        opened.close()


@pytest.mark.parametrize("count", [3, 5])
def test_rows_of_several_arrays_may_not_be_too_large_together(count: int, tmp_path: Path):
    """numpy's size of a record wraps around."""
    file = make_shard(tmp_path / "a.npz", npz({name: npy(f"(0, {1 << 28})", b"", "<f4") for name in "abcde"[:count]}))
    with pytest.raises(ShardReadError, match=f"at most 2147483647 bytes, found one of {count << 30} bytes"):
        stored_in(file)

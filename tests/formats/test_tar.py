"""The members of a tar: what other programs write is found, and what nobody should write ends the tar there."""

from __future__ import annotations

import gzip
import io
import os
import posixpath
import subprocess
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import Damage
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.tar import Member, find_members
from loaderd.storage.files import open_shard
from tests.formats.shard_bytes import make_shard
from tests.helpers.evil_tars import base_256, header, padded, pax_record
from tests.helpers.fixed_files import RECORDS, records_from

END = bytes(1024)


def found_in(path: Path, data: bytes) -> tuple[list[Member], list[Damage]]:
    file = make_shard(path, data)
    with closing(open_shard(file)) as opened:
        found = list(find_members(file.uri, opened.read_at, file.size_bytes))
    return [one for one in found if isinstance(one, Member)], [one for one in found if isinstance(one, Damage)]


# ------------------------------------------------------------------------------------------ what others write

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300).map(
    lambda name: name.strip("/") or "x"
)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@given(wanted=st.lists(st.tuples(names, st.sampled_from(["", ".gz", ".zst"]), st.binary(max_size=1200)), max_size=5))
def test_what_tarfile_writes(tmp_path: Path, tar_format: int, wanted: list[tuple[str, str, bytes]]):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name, ending, data in wanted:
            info = tarfile.TarInfo(name[: 80 if tar_format == tarfile.USTAR_FORMAT else None] + ending)
            info.size, info.mtime = len(data), 1e9 + 0.5  # PAX has a record for half a second
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name that USTAR cannot hold
                assert tar_format == tarfile.USTAR_FORMAT
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    expected = [
        one for one in expected if one[0].endswith((".gz", ".zst")) and posixpath.basename(one[0])[:2] != "._"
    ]
    members, damages = found_in(tmp_path / "a.tar", out.getvalue())
    assert not damages and [tuple(member) for member in members] == expected


@pytest.mark.parametrize("tar_format", ["v7", "oldgnu", "gnu", "ustar", "posix"])
def test_what_gnu_tar_writes(tmp_path: Path, tar_format: str):
    folder = tmp_path / "games"
    (folder / "empty").mkdir(parents=True)
    (folder / "a.gz").write_bytes(b"1" * 700)
    (folder / ("n" * 60 + ".zst")).write_bytes(b"2" * 512)
    if tar_format in ("oldgnu", "gnu", "posix"):
        (folder / ("long" * 50 + ".gz")).write_bytes(b"3")
    os.link(folder / "a.gz", folder / "z.gz")
    (folder / "link.gz").symlink_to("a.gz")
    with open(folder / "README", "wb") as sparse:  # of many pieces: their map has blocks of its own
        for piece in range(60):
            sparse.seek(piece << 16)
            sparse.write(b"x")
    sparse_too = ["--sparse"] if tar_format in ("oldgnu", "gnu", "posix") else []
    command = ["tar", "--sort=name", f"--format={tar_format}", *sparse_too, "-cf", "a.tar", "games"]
    subprocess.run(command, cwd=tmp_path, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    members, damages = found_in(tmp_path / "b.tar", data)
    assert not damages
    held = {member.name: data[member.offset : member.offset + member.num_bytes] for member in members}
    files = {name for name in os.listdir(folder) if name.endswith((".gz", ".zst"))} - {"link.gz", "z.gz"}
    assert held == {f"games/{name}": (folder / name).read_bytes() for name in files}


@pytest.mark.parametrize("sparse", ["gnu", "0.0", "0.1", "1.0"])
def test_sparse_files_are_read_if_they_have_no_holes(tmp_path: Path, sparse: str):
    """GNU tar writes its map also where the file system says of a file without zeros that it has holes."""
    with open(tmp_path / "a.gz", "wb") as file:
        file.write(b"1" * 4096)
        file.truncate(5 * 4096)
    how = ["--format=gnu"] if sparse == "gnu" else ["--format=posix", f"--sparse-version={sparse}"]
    subprocess.run(["tar", "--sparse", *how, "-cf", "a.tar", "a.gz"], cwd=tmp_path, check=True)
    data = (tmp_path / "a.tar").read_bytes()
    members, damages = found_in(tmp_path / "b.tar", data)
    assert not members and damages[0].expected.startswith("20,480 bytes of 'a.gz', without holes")
    assert damages[0].found == "4,096 bytes"
    # The same tar, of a file that is no larger than what is stored of it.
    with tarfile.open(tmp_path / "c.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info, content = tarfile.TarInfo("GNUSparseFile.0/b.gz"), b"1\n0\n4096\n".ljust(512, b"\0") + b"1" * 4096
        info.size = len(content)
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "4096"}
        info.pax_headers["GNU.sparse.name"] = "b.gz"
        tar.addfile(info, io.BytesIO(content))
    data = (tmp_path / "c.tar").read_bytes()
    (member,), damages = found_in(tmp_path / "d.tar", data)
    assert not damages and member.name == "b.gz" and data[member.offset :][: member.num_bytes] == b"1" * 4096


# ---------------------------------------------------------------------------------------- what nobody should

GAME = gzip.compress(records_from(0, 10).tobytes(), mtime=0)
SOUND = header("0.gz", len(GAME)) + padded(GAME)
BEHIND = header("2.gz", len(GAME)) + padded(GAME) + END


@pytest.mark.parametrize(
    ("evil", "found"),
    [
        pytest.param(header("1.gz", base_256(-512)), "a size of -512 bytes of '1.gz'", id="to itself"),
        pytest.param(header("1.gz", base_256(-len(SOUND) - 512)), "a size of -", id="to the member before"),
        pytest.param(header("1.gz", base_256(-(1 << 87))), "a size of -", id="far below 0"),
        pytest.param(header("1.gz", base_256((1 << 87) + 5)), "0 bytes, and the end of the file", id="huge"),
        pytest.param(header("README", base_256(1 << 63)), "0 bytes, and the end of the file", id="huge, skipped"),
        pytest.param(header("1.gz", b"-0000001000\0"), "b'-0000001000\\x00' where a number", id="octal, below 0"),
        pytest.param(header("1.gz", b"0o00001_000\0"), "where a number should be", id="Python's octal"),
        pytest.param(header("L", base_256(-512), b"L"), "a size of -512 bytes", id="a long name"),
        pytest.param(header("L", base_256(1 << 40), b"L"), f"a header of {1 << 40} bytes", id="a very long name"),
        pytest.param(header("x", 3 << 20, b"x") + bytes(3 << 20), f"a header of {3 << 20} bytes", id="large header"),
        pytest.param(header("x", 99_999, b"g"), "bytes, and the end of the file", id="a header that is cut"),
        pytest.param(
            header("x", 20, b"x") + padded(pax_record(b"size", b"-512")), "b'-512' where a number", id="PAX, below 0"
        ),
        pytest.param(
            header("x", 42, b"x") + padded(pax_record(b"size", b"9" * 30)), "where a number", id="PAX, many digits"
        ),
        pytest.param(header("x", 9, b"x") + padded(b"0 path=a\n"), "where a PAX record should be", id="PAX, 0"),
        pytest.param(header("x", 9, b"x") + padded(b"2 path=a\n"), "where a PAX record should be", id="PAX, back"),
        pytest.param(header("x", 10, b"x") + padded(b"99 path=a\n"), "where a PAX record should be", id="PAX, far"),
        pytest.param(header("x", 200_000, b"x") + padded(b"1" * 200_000), "where a number", id="PAX, digits"),
        pytest.param(header("x", 200_000, b"x") + padded(b"7 a=bc\n" * 28_571 + b"   "), "where a", id="PAX, many"),
        pytest.param(header("1.gz", 512, b"S", sparse=True) + b"\1" * 512, "end of the file", id="a sparse map"),
    ],
)
def test_what_is_in_front_of_a_header_that_is_wrong_is_kept(evil: bytes, found: str, tmp_path: Path):
    behind = b"" if "end of the file" in found else BEHIND
    file = make_shard(tmp_path / "a.tar", SOUND + evil + behind)
    index = build_fixed_index(file, RECORDS, 7)
    assert index.num_records == 10 and index.counts.tolist() == [10]
    damage = index.damages[-1]
    assert damage.expected == "a member of the tar, or the zeros at its end" and found in damage.found
    assert len(SOUND) <= damage.offset <= file.size_bytes


def test_many_headers_in_front_of_a_member(tmp_path: Path):
    """More than Python would let a function call itself."""
    path = pax_record(b"path", b"1.gz")
    front = (header("x", len(path), b"x") + padded(path)) * 3000
    members, damages = found_in(tmp_path / "a.tar", front + header("other", len(GAME)) + padded(GAME) + END)
    assert not damages and members == [Member("1.gz", len(front) + 512, len(GAME))]


def test_a_member_that_is_cut_is_named_even_if_what_there_is_can_be_inflated(tmp_path: Path):
    data = GAME + gzip.compress(records_from(10, 10).tobytes())
    file = make_shard(tmp_path / "a.tar", header("0.gz", len(data)) + data[: len(GAME)])
    index = build_fixed_index(file, RECORDS, 7)
    (damage,) = index.damages
    assert index.num_records == 10
    assert (damage.offset, damage.found) == (file.size_bytes, "0 bytes, and the end of the file")


def test_a_header_whose_bytes_were_summed_up_with_their_signs(tmp_path: Path):
    block = bytearray(header("\u00e4\u00f6.gz", len(GAME)))
    total = sum(block) - sum(block[148:156]) + 8 * 32
    block[148:156] = b"%06o\0 " % (total - 256 * sum(byte > 127 for byte in block))
    members, damages = found_in(tmp_path / "a.tar", bytes(block) + padded(GAME) + END)
    assert not damages and members == [Member("\u00e4\u00f6.gz", 512, len(GAME))]


def test_of_a_long_name_a_damage_has_the_front(tmp_path: Path):
    path = pax_record(b"path", b"x/" * 100_000 + b"1.gz")
    evil = header("x", len(path), b"x") + padded(path) + header("1.gz", 5) + padded(b"hello")
    index = build_fixed_index(make_shard(tmp_path / "a.tar", SOUND + evil + END), RECORDS, 7)
    (damage,) = index.damages
    assert damage.record == 10 and "'x/x/x/" in damage.found and len(damage.found) < 400


def test_a_tar_whose_members_are_skipped_says_how_far_it_is(tmp_path: Path):
    """Else a worker that reads it for two minutes would be taken for one whose storage is silent."""
    data = (header("LICENSE", 5) + padded(b"hello")) * 2000 + bytes(1024)
    file = make_shard(tmp_path / "a.tar", data)
    reached: list[int] = []
    with closing(open_shard(file)) as opened:
        assert not list(find_members(file.uri, opened.read_at, file.size_bytes, on_read=reached.append))
    assert len(reached) > 5 and reached == sorted(reached) and reached[-1] > file.size_bytes // 2

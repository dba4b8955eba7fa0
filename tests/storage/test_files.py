"""What names a shard, on disk and in a bucket, and reading bytes from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd.errors import NoShardsError, OptionError, ShardReadError, StorageError
from loaderd.formats.blocks import BlockReader
from loaderd.formats.shard_index import build_index
from loaderd.kernels.crc import framed
from loaderd.options import Storage, as_absolute
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards, open_shard
from loaderd.storage.local_file import LocalFile
from loaderd.storage.names import absolute
from loaderd.storage.shard_file import ShardFile
from tests.formats.shard_bytes import COMPRESS, blocks_of, frames, num_descriptors, payloads_of, read_blocks

NAMES = [
    "a.rec",
    "b.rec",
    "B.rec",
    "c.txt",
    ".hidden.rec",
    "sub/d.rec",
    "sub/deep/e.rec",
    "other/d.rec",
    ".git/f.rec",
    "with blank.rec",
    "100%25.rec",
    "day=1+2/é.rec",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in NAMES:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(framed(name.encode()))
    return tmp_path / "tree"


def content(file: ShardFile) -> bytes:
    opened = open_shard(file)
    try:
        data = bytearray(file.size_bytes + 10)
        got = opened.read_at(0, memoryview(data))
        return bytes(data[:got])
    finally:
        opened.close()


def names_of(shards: Any) -> list[str]:
    """The payload of each shard, which is its name in the tree."""
    return [content(file)[12:-4].decode() for file in list_shards(shards)]


# ------------------------------------------------------------------------------------------------------ local files


def test_a_path_or_a_list_of_them(tree: Path, monkeypatch: pytest.MonkeyPatch):
    path = tree / "b.rec"
    (file,) = list_shards(path)
    status = path.stat()
    assert file == ShardFile(str(path), status.st_size, status.st_mtime_ns)
    assert list_shards(str(path)) == list_shards([path]) == list_shards(iter((str(path),))) == [file]
    matches = ["100%25.rec", "B.rec", "a.rec", "b.rec", "with blank.rec"]
    assert names_of(f"{tree}/*.rec") == matches, "a glob's matches come sorted"
    assert list_shards(iter([path])) == list_shards({path}) == list_shards(np.array([str(path)])) == [file]
    monkeypatch.chdir(tree)
    assert list_shards("b.rec") == list_shards("sub/../b.rec") == list_shards("./*b.rec") == [file]
    monkeypatch.setenv("HOME", str(tree))
    assert list_shards("~/b.rec") == [file]


def test_paths_as_bytes_and_as_tensors(tree: Path, monkeypatch: pytest.MonkeyPatch):
    """As ``os.fsencode``, numpy and TensorFlow's own functions give them."""
    import tensorflow as tf

    monkeypatch.chdir(tree)
    for name in (b"a.rec", np.bytes_(b"a.rec"), np.array("a.rec"), np.array(b"a.rec", object), tf.constant("a.rec")):
        assert names_of(name) == names_of([name]) == ["a.rec"]
    both = ["a.rec", "b.rec"]
    for shards in (tf.constant(both), np.array(both), np.array(both, bytes), list(map(tf.constant, both))):
        assert names_of(shards) == both
    for wrong in (tf.constant(3), tf.constant([3.0]), np.array(3), b"", np.array(None)):
        with pytest.raises(OptionError, match="shards must be a path"):
            list_shards(wrong)


def test_a_file_uri(tree: Path):
    for name in ("a.rec", "with blank.rec", "100%25.rec", "day=1+2/é.rec"):
        assert names_of((tree / name).as_uri()) == [name]
    assert names_of(f"file://{tree}/with blank.rec") == ["with blank.rec"]
    assert names_of(f"file://localhost{tree}/a.rec") == ["a.rec"]
    assert names_of(f"file://{tree}/sub/*.rec") == ["sub/d.rec"]


def test_a_file_that_exists_is_no_pattern(tree: Path):
    (tree / "a[b].rec").write_bytes(framed(b"with brackets"))
    assert names_of(tree / "a[b].rec") == ["with brackets"]
    assert names_of(f"{tree}/a[[]*.rec") == ["with brackets"]


@pytest.mark.parametrize(
    ("shards", "error", "text"),
    [
        ("nothing", NoShardsError, "nothing does not exist"),
        ("a.rec/b.rec", NoShardsError, "does not exist"),
        ("*.nothing", NoShardsError, "matches no file"),
        ("sub", NoShardsError, r"(?s)sub is a folder.*sub/\*\.rec"),
        ("loop", NoShardsError, "does not exist"),
        ("pipe", NoShardsError, "pipe is not a regular file"),
        ("/dev/null", NoShardsError, "is not a regular file"),
        ("?u?", NoShardsError, "matches no file"),
        (["a.rec", "link"], OptionError, "one file twice, as .*a.rec and as .*link"),
        (["a.rec", "hard"], OptionError, "one file twice, as .*a.rec and as .*hard"),
        (["sub/d.rec", "linked/d.rec"], OptionError, "one file twice, as .*sub/d.rec and as .*linked/d.rec"),
        (["a.rec", "nothing"], NoShardsError, "nothing does not exist"),
        ([], NoShardsError, "at least one file"),
        (["a.rec", "a.rec"], OptionError, "a.rec twice"),
        (["a.rec", "./sub/../*.rec"], OptionError, "a.rec twice"),
        (5, OptionError, "a path, a glob, a URI or a list of them, got 5"),
        ([5], OptionError, "got 5"),
        (b"nothing", NoShardsError, "nothing does not exist"),
        ("run[v1]/*.rec", NoShardsError, r"\[ \] are wildcards .* write \[\[\] for \[: .*/run\[\[\]v1\]/\*.rec\n"),
        ("run[v1].rec", NoShardsError, r"\[ \] are wildcards"),
        (None, OptionError, "got None"),
        ("", OptionError, "got ''"),
        ("a\0b", OptionError, "got 'a.x00b'"),
        ({"a.rec": 1}, OptionError, "got {'a.rec': 1}"),
        (iter(()), NoShardsError, "Was a generator used up before"),
        ("nosuchscheme://bucket/key", ShardReadError, "nosuchscheme"),
    ],
)
def test_what_names_no_file(tree: Path, monkeypatch: pytest.MonkeyPatch, shards: Any, error: type, text: str):
    monkeypatch.chdir(tree)
    os.symlink("loop", "loop")
    os.symlink("a.rec", "link")
    os.link("a.rec", "hard")
    os.symlink("sub", "linked")
    os.mkfifo("pipe")
    with pytest.raises(error, match=text):
        list_shards(shards)


def test_reading_at_any_offset(tree: Path):
    (file,) = list_shards(tree / "a.rec")
    opened = open_shard(file)
    data = framed(b"a.rec")
    for offset in range(len(data) + 3):
        for size in (0, 1, 5, 100):
            view = memoryview(bytearray(size))
            got = opened.read_at(offset, view)
            assert view[:got] == data[offset : offset + size] and got == len(data[offset : offset + size])
    opened.close()
    opened.close()


def test_a_file_that_cannot_be_read(tree: Path):
    with pytest.raises(ShardReadError, match=r"a.rec/b: Not a directory"):
        open_shard(ShardFile(str(tree / "a.rec/b"), 5, 5))
    # The kernel refuses to read address 0.
    opened = LocalFile(ShardFile("/proc/self/mem", 10, 5), Access(Storage(retry_s=0.3)))
    with pytest.raises(StorageError, match=r"/proc/self/mem: Input/output error at byte 0"):
        opened.read_at(0, memoryview(bytearray(10)))
    opened.close()


@pytest.mark.parametrize(
    "change", [lambda path: path.write_bytes(b"longer than it was"), lambda path: os.utime(path, ns=(1, 1))]
)
def test_a_file_that_changed_is_noticed(tree: Path, change: Callable[[Path], Any]):
    (file,) = list_shards(tree / "a.rec")
    opened = open_shard(file)
    opened.check_unchanged()
    change(tree / "a.rec")
    with pytest.raises(ShardReadError, match=r"a.rec changed while it was in use: expected 21 bytes"):
        opened.check_unchanged()
    opened.close()
    num_open = num_descriptors()
    with pytest.raises(ShardReadError, match=r"a.rec changed while it was in use"):
        open_shard(file)
    assert num_descriptors() == num_open
    (tree / "a.rec").unlink()
    with pytest.raises(ShardReadError, match=r"a.rec: No such file"):
        open_shard(file)


# ------------------------------------------------------------------------------------------- files in a bucket


class Bucket:
    """A bucket of an S3 server on this machine."""

    def __init__(self, query: str) -> None:
        from pyarrow import fs

        self.query = query
        self._files, _ = fs.FileSystem.from_uri(f"s3://shards{query}&allow_bucket_creation=true")
        self._files.create_dir("shards")

    def put(self, name: str, data: bytes) -> None:
        with self._files.open_output_stream(f"shards/{name}") as out:
            out.write(data)

    def delete(self, name: str) -> None:
        self._files.delete_file(f"shards/{name}")

    def uri(self, address: str) -> str:
        return f"s3://shards/{address}{self.query}"


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        try:
            host, port = server.get_host_and_port()
            found = Bucket(f"?endpoint_override={host}:{port}&scheme=http&region=us-east-1")
            for name in NAMES:
                found.put(f"tree/{name}", framed(name.encode()))
            yield found
        finally:
            server.stop()


def test_an_object(bucket: Bucket):
    (file,) = list_shards(bucket.uri("tree/a.rec"))
    assert file.uri == bucket.uri("tree/a.rec") and file.size_bytes == 21 and file.mtime_ns > 10**18
    assert content(file) == framed(b"a.rec")
    assert names_of([bucket.uri("tree/sub/d.rec"), bucket.uri("tree/a.rec")]) == ["a.rec", "sub/d.rec"]
    assert names_of(bucket.uri("tree/with%20blank.rec")) == ["with blank.rec"]
    assert names_of(bucket.uri("tree/100%2525.rec")) == ["100%25.rec"]


@pytest.mark.parametrize(
    "pattern",
    [
        "*.rec",
        "*",
        "[ab].rec",
        "[!a].rec",
        "B*",
        "*/*.rec",
        "*/d.rec",
        "**",
        "sub/**",
        "*/**",
        "sub/*",
        "**/*.rec",
        "**/d.rec",
        "sub/**/*.rec",
        "**/deep/*.rec",
        ".*.rec",
        ".git/*.rec",
        "day=*/*.rec",
        "100%25*.rec",
    ],
)
def test_a_glob_means_the_same_as_on_disk(bucket: Bucket, tree: Path, pattern: str):
    local = names_of(f"{tree}/{pattern}")
    assert local
    remote = names_of(bucket.uri("tree/" + pattern.replace("%", "%25")))
    assert remote == sorted(remote) and sorted(local) == remote


@pytest.mark.parametrize(
    ("address", "error", "text"),
    [
        ("tree/nothing", NoShardsError, "tree/nothing.* does not exist"),
        ("tree/*.nothing", NoShardsError, r"\*.nothing.* matches no file"),
        ("nothing/*", NoShardsError, "matches no file"),
        ("tree[v1]/*", NoShardsError, r"\[ \] are wildcards .*: s3://shards/tree\[\[\]v1\]/\*"),
        ("tree", NoShardsError, "s3://shards/tree is a folder"),
        ("tree/with blank.rec", ShardReadError, "the URI contains a space"),
    ],
)
def test_what_names_no_object(bucket: Bucket, address: str, error: type, text: str):
    with pytest.raises(error, match=text):
        list_shards(bucket.uri(address))


def test_an_object_named_twice(bucket: Bucket):
    with pytest.raises(OptionError, match="twice"):
        list_shards([bucket.uri("tree/a.rec"), bucket.uri("tree/*.rec")])


def test_an_object_that_changed_is_noticed(bucket: Bucket):
    bucket.put("changing.rec", framed(b"as it was"))
    (file,) = list_shards(bucket.uri("changing.rec"))
    opened = open_shard(file)
    view = memoryview(bytearray(30))
    assert view[: opened.read_at(12, view)] == framed(b"as it was")[12:]
    assert opened.read_at(25, view) == opened.read_at(1000, view) == 0
    opened.check_unchanged()
    bucket.put("changing.rec", framed(b"as it is now"))
    with pytest.raises(ShardReadError, match=r"expected 25 bytes, written .*, found 28 bytes"):
        open_shard(file)
    bucket.delete("changing.rec")
    with pytest.raises(ShardReadError, match=r"changing.rec"):
        open_shard(file)
    opened.close()


@pytest.mark.parametrize("compression", list(COMPRESS))
def test_shards_in_a_bucket(bucket: Bucket, compression: Any):
    payloads = payloads_of(300)
    for number, part in enumerate((payloads[:100], payloads[100:])):
        bucket.put(f"{compression}/{number}.rec", COMPRESS[compression](frames(part)))
    files = list_shards(bucket.uri(f"{compression}/*.rec"))
    indexes = [build_index(file, 64) for file in files]
    assert [index.num_records for index in indexes] == [100, 200]
    reader = BlockReader(files, [compression] * 2)
    blocks = [block for number, index in enumerate(indexes) for block in blocks_of(index, number)]
    found = [read_blocks(reader, [block]) for block in blocks]
    assert [payload for records, _ in found for payload in records.values()] == payloads
    assert not any(damages for _, damages in found)
    assert reader.read_together(blocks) is not None
    reader.close()


def test_the_name_of_a_shard_stays_when_it_is_moved():
    names = {
        "/data/a b?c#.tfrecord": "a b?c#.tfrecord",
        "s3://bucket/x/a%20b%3Fc%23.tfrecord?region=eu&x=/y": "a b?c#.tfrecord",
        "gs://bucket/a.tfrecord": "a.tfrecord",
        "/data/\udcff.tfrecord": "\udcff.tfrecord",
    }
    assert {uri: ShardFile(uri, 1, 1).name for uri in names} == names


def test_a_relative_path_where_the_working_directory_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert absolute("/data/*.rec") == "/data/*.rec"
    with pytest.raises(NoShardsError, match=r"\*.rec is relative to the working directory .* been deleted"):
        absolute("*.rec")
    with pytest.raises(OptionError, match="report must be an absolute path where the working directory has been"):
        as_absolute("r.jsonl", "report")

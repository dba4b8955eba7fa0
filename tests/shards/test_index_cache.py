"""The cache of indexes: found again for the very same file, made again for any other, and never in the way."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgpack
import pytest
from shard_bytes import frames, make_shard, payloads_of

from loaderd.shards.crc import masked_crc
from loaderd.shards.files import list_shards
from loaderd.shards.index_cache import IndexCache, default_cache_dir
from loaderd.shards.index_pruning import prune
from loaderd.shards.shard_file import ShardFile
from loaderd.shards.shard_index import INDEX_VERSION, build_index, decode_index


@pytest.fixture
def file(tmp_path: Path) -> ShardFile:
    (tmp_path / "data").mkdir()
    return make_shard(tmp_path / "data" / "a.tfrecord", frames(payloads_of(10)))


@pytest.fixture(params=["a folder", "beside", "user"])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LOADERD_CACHE_DIR", str(tmp_path / "env"))
    return str(tmp_path / "chosen") if request.param == "a folder" else request.param


@pytest.fixture
def cache(where: str) -> IndexCache:
    return IndexCache(where, 4)


def path_in(cache: IndexCache, file: ShardFile) -> Path:
    path = cache.path_of(file)
    assert path is not None
    return path


# ------------------------------------------------------------------------------------------------- kept and found


def test_what_was_kept_is_found(cache: IndexCache, file: ShardFile):
    assert cache.load(file) is None
    index = build_index(file, 4)
    assert cache.store(index) is None
    found = cache.load(file)
    assert found is not None and found.encode() == index.encode()
    assert cache.store(index) is None, "to keep it again is no error"


def test_another_size_time_name_or_block_size_misses(cache: IndexCache, where: str, file: ShardFile):
    cache.store(build_index(file, 4))
    others = (
        ShardFile(file.uri, file.size_bytes + 1, file.mtime_ns),
        ShardFile(file.uri, file.size_bytes, file.mtime_ns + 1),
        ShardFile(file.uri + "x", file.size_bytes, file.mtime_ns),
    )
    for other in others:
        assert cache.load(other) is None
    assert IndexCache(where, 5).load(file) is None
    os.utime(file.uri, ns=(1, 1))
    (touched,) = list_shards(file.uri)
    assert cache.load(touched) is None
    assert cache.load(file) is not None, "the old one is still the old one's"


def test_an_index_of_another_file_is_not_taken(cache: IndexCache, file: ShardFile, tmp_path: Path):
    other = make_shard(tmp_path / "data" / "b.tfrecord", frames(payloads_of(20)))
    path_in(cache, file).parent.mkdir(parents=True, exist_ok=True)
    path_in(cache, file).write_bytes(build_index(other, 4).encode())
    assert cache.load(file) is None


@pytest.mark.one_variant
def test_one_that_is_damaged_is_made_again(cache: IndexCache, file: ShardFile):
    index = build_index(file, 4)
    cache.store(index)
    path = path_in(cache, file)
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    for broken in (*[data[:cut] for cut in range(len(data))], *flipped, data + b"\x00", bytes(50)):
        path.write_bytes(broken)
        assert cache.load(file) is None
    for broken in (b"", bytes(50)):
        path.write_bytes(broken)
        assert cache.store(index) is None
        found = cache.load(file)
        assert found is not None and found.num_records == 10


def of_another_version(**fields: object) -> bytes:
    body: bytes = msgpack.packb({"version": INDEX_VERSION, **fields})
    return body + masked_crc(body).to_bytes(4, "little")


@pytest.mark.parametrize(
    "data",
    [
        of_another_version(version=INDEX_VERSION + 1),
        of_another_version(version=None),
        of_another_version(file=["a", 1, 1]),
        of_another_version(file=["a", 1, 1, 1], compression="none", digest=1, damages=[]),
        of_another_version(file=["a", 1, 1], compression="none", digest=1, damages=[{"shard": "a", "number": 1}]),
    ],
)
def test_one_of_another_version_is_made_again(cache: IndexCache, file: ShardFile, data: bytes):
    """Its CRC is right, but what it holds is something else."""
    with pytest.raises(ValueError, match=r"version|no index"):
        decode_index(data)
    path_in(cache, file).parent.mkdir(parents=True, exist_ok=True)
    path_in(cache, file).write_bytes(data)
    assert cache.load(file) is None
    assert cache.store(build_index(file, 4)) is None
    assert cache.load(file) is not None


@pytest.mark.one_variant
def test_writers_in_several_processes(cache: IndexCache, where: str, file: ShardFile, tmp_path: Path):
    program = (
        "import sys; from loaderd.shards.files import list_shards;"
        "from loaderd.shards.shard_index import build_index;"
        "from loaderd.shards.index_cache import IndexCache; (file,) = list_shards(sys.argv[1]);"
        "cache = IndexCache(sys.argv[2], 4); index = build_index(file, 4); sys.stdin.readline();"
        "assert all(cache.store(index) is None and cache.load(file) is not None for _ in range(200))"
    )
    command = [sys.executable, "-c", program, file.uri, where]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(2)]
    for writer in writers:
        writer.communicate(b"go\n")
    assert [writer.returncode for writer in writers] == [0, 0]
    found = cache.load(file)
    assert found is not None and found.encode() == build_index(file, 4).encode()
    assert not [path for path in tmp_path.rglob("*.tmp")], "nothing temporary is left"


def test_writers_at_the_same_time(cache: IndexCache, file: ShardFile):
    index = build_index(file, 4)
    cache.store(index)

    def store_and_load(_: int) -> bool:
        found = cache.load(file)
        return cache.store(index) is None and found is not None and found.encode() == index.encode()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(store_and_load, range(200)))
    left = {path.name for path in path_in(cache, file).parent.iterdir()}
    assert left - {"a.tfrecord"} == {path_in(cache, file).name}, "nothing temporary is left"


# --------------------------------------------------------------------------------------------------- where it is


def test_where_it_is(file: ShardFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOADERD_CACHE_DIR", str(tmp_path / "env"))
    remote = ShardFile("s3://bucket/a.tfrecord", 1, 1)
    assert path_in(IndexCache("user", 4), file).is_relative_to(tmp_path / "env")
    assert path_in(IndexCache("user", 4), remote).is_relative_to(tmp_path / "env")
    assert path_in(IndexCache("beside", 4), remote).is_relative_to(tmp_path / "env"), "nothing is written to a bucket"
    assert path_in(IndexCache(str(tmp_path / "x"), 4), file).is_relative_to(tmp_path / "x")
    assert IndexCache("none", 4).path_of(file) is None
    monkeypatch.delenv("LOADERD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "loaderd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "loaderd"
    assert path_in(IndexCache("~/indexes", 4), file).is_relative_to(tmp_path / "home" / "indexes")


def test_none_keeps_nothing(file: ShardFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOADERD_CACHE_DIR", str(tmp_path / "env"))
    cache = IndexCache("none", 4)
    assert cache.store(build_index(file, 4)) is None and cache.load(file) is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tfrecord", "data"]


def test_beside_is_hidden_from_a_glob_over_the_shards(file: ShardFile, monkeypatch: pytest.MonkeyPatch):
    folder = Path(file.uri).parent
    seen: list[list[ShardFile]] = []
    replace = os.replace

    def look_and_replace(source: Path, target: Path) -> None:
        seen.append(list_shards(f"{folder}/*"))
        assert Path(source).parent == folder, "or to rename would be to copy"
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_and_replace)
    cache = IndexCache("beside", 4)
    assert cache.store(build_index(file, 4)) is None
    assert seen == [[file]], "while it is written"
    assert list_shards(f"{folder}/*") == [file]
    assert path_in(cache, file).parent == folder


def test_others_may_read_it(cache: IndexCache, file: ShardFile):
    umask = os.umask(0o022)
    try:
        cache.store(build_index(file, 4))
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path_in(cache, file).stat().st_mode) == 0o644


# -------------------------------------------------------------------------------------- where it cannot be kept


def test_a_folder_that_cannot_be_written(file: ShardFile, tmp_path: Path):
    occupied = tmp_path / "occupied"
    occupied.write_text("a file, where a folder should be")
    for where in (occupied, occupied / "deeper", Path("/proc/no/such/folder")):
        cache = IndexCache(str(where), 4)
        assert cache.load(file) is None
        error = cache.store(build_index(file, 4))
        assert isinstance(error, OSError) and error.strerror
    assert occupied.read_text().startswith("a file")


def test_a_disk_that_is_full(cache: IndexCache, file: ShardFile, tmp_path: Path):
    """A file that must not grow: the same to whoever writes it as a disk without room, or a quota."""
    index = build_index(file, 4)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 1, len(index.encode()) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            error = cache.store(index)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert isinstance(error, OSError) and error.strerror == "File too large"
        assert str(tmp_path) in str(error), "which disk it is"
        assert cache.load(file) is None
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.tfrecord"], "nothing is left"
    assert cache.store(index) is None


def test_a_place_that_is_taken_leaves_nothing_temporary(cache: IndexCache, file: ShardFile):
    path = path_in(cache, file)
    path.mkdir(parents=True)
    assert cache.load(file) is None
    assert isinstance(cache.store(build_index(file, 4)), OSError)
    assert {other.name for other in path.parent.iterdir()} - {"a.tfrecord"} == {path.name}


def test_a_user_without_a_home(file: ShardFile, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOADERD_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a container's random user has no entry in passwd
    cache = IndexCache("user", 4)
    assert cache.load(file) is None
    error = cache.store(build_index(file, 4))
    assert isinstance(error, OSError) and "LOADERD_CACHE_DIR" in str(error)


# ------------------------------------------------------------------------------------------------------- bounded

DAY_S = 86_400


def used_days_ago(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def test_what_nobody_has_used_for_long_goes(tmp_path: Path):
    """Of a folder; one file more a shard that was deleted or changed, else. Once a day, and nothing but indexes."""
    cache = IndexCache(str(tmp_path / "chosen"), 4)
    files = [make_shard(tmp_path / f"{number}.tfrecord", frames(payloads_of(5))) for number in range(4)]
    gone, used, lately, new = files
    for file in (gone, used, lately):
        cache.store(build_index(file, 4))
    left = path_in(cache, gone).with_name(f".{16 * 'a'}.tmp")
    alien = path_in(cache, gone).with_name("mine")
    for path in (left, alien):
        path.touch()
    for path in (left, alien, path_in(cache, gone), path_in(cache, used)):
        used_days_ago(path, 61)
    used_days_ago(path_in(cache, lately), 59)
    assert cache.load(used) is not None
    cache.store(build_index(new, 4))
    assert path_in(cache, gone).exists(), "it was pruned today"
    used_days_ago(tmp_path / "chosen" / "index" / ".pruned", 2)
    cache.store(build_index(new, 4))
    assert cache.load(gone) is None and not left.exists() and alien.exists()
    assert all(cache.load(file) is not None for file in (used, lately, new))


def test_the_least_used_go_where_there_are_too_many(tmp_path: Path):
    cache = IndexCache(str(tmp_path / "chosen"), 4)
    files = [make_shard(tmp_path / f"{number}.tfrecord", frames(payloads_of(5))) for number in range(4)]
    for days, file in enumerate(files):
        cache.store(build_index(file, 4))
        used_days_ago(path_in(cache, file), days)
    prune(tmp_path / "chosen" / "index", max_bytes=5 * path_in(cache, files[0]).stat().st_size // 2)
    assert [path_in(cache, file).exists() for file in files] == [True, True, False, False]


def test_indexes_beside_their_shards_are_left_alone(tmp_path: Path):
    cache = IndexCache("beside", 4)
    file = make_shard(tmp_path / "a.tfrecord", frames(payloads_of(5)))
    cache.store(build_index(file, 4))
    used_days_ago(path_in(cache, file), 100)
    cache.store(build_index(make_shard(tmp_path / "b.tfrecord", frames(payloads_of(5))), 4))
    assert cache.load(file) is not None and not (tmp_path / ".pruned").exists()

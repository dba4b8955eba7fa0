"""The cache of indexes: found again for the very same file, made again for any other, and never in the way."""

from __future__ import annotations

import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from random import Random

import msgpack
import numpy as np
import pytest
from pyarrow.fs import LocalFileSystem

from loaderd.errors import Damage
from loaderd.formats import index_cache
from loaderd.formats.index_cache import IndexCache, default_cache_dir, groups_of
from loaderd.formats.indexer import find_indexes
from loaderd.formats.shard_index import INDEX_VERSION, build_index, decode_indexes, encode_indexes
from loaderd.kernels.crc import masked_crc
from loaderd.options import Storage
from loaderd.schemas import leela
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile
from tests.formats.shard_bytes import frames, make_shard, payloads_of

NO_DAMAGE = Damage("", 0, 0, "", "").to_wire()


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


def path_in(cache: IndexCache, *group: ShardFile) -> Path:
    path = cache.path_of(*group)
    assert path is not None
    return path


def keep(cache: IndexCache, *group: ShardFile) -> str | None:
    return cache.store(group, encode_indexes([build_index(file, 4) for file in group]))


def is_kept(cache: IndexCache, *group: ShardFile) -> bool:
    kept = cache.load(*group)
    return kept is not None and encode_indexes(kept) == encode_indexes([build_index(file, 4) for file in group])


# ------------------------------------------------------------------------------------------------- kept and found


def test_what_was_kept_is_found(cache: IndexCache, file: ShardFile):
    assert cache.load(file) is None
    assert keep(cache, file) is None and is_kept(cache, file)
    assert keep(cache, file) is None, "to keep it again is no error"


def test_another_size_time_name_or_block_size_misses(cache: IndexCache, where: str, file: ShardFile):
    keep(cache, file)
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
    path_in(cache, file).write_bytes(encode_indexes([build_index(other, 4)]))
    assert cache.load(file) is None


@pytest.mark.one_variant
def test_one_that_is_damaged_is_made_again(cache: IndexCache, file: ShardFile):
    keep(cache, file)
    path = path_in(cache, file)
    data = path.read_bytes()
    flipped = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    for broken in (*[data[:cut] for cut in range(len(data))], *flipped, data + b"\x00", bytes(50)):
        path.write_bytes(broken)
        assert cache.load(file) is None
    for broken in (b"", bytes(50)):
        path.write_bytes(broken)
        assert keep(cache, file) is None and is_kept(cache, file)


def of_another_version(**fields: object) -> bytes:
    body: bytes = msgpack.packb({"version": INDEX_VERSION, **fields})
    return body + masked_crc(body).to_bytes(4, "little")


EMPTY = {name: [1, b""] for name in ("offsets", "num_bytes", "counts", "first_records", "runs")}
OF_ONE = {"compressions": ["none"], "digests": [1], "blocks": [0], "num_runs": [0], **EMPTY}


@pytest.mark.parametrize(
    "data",
    [
        of_another_version(version=INDEX_VERSION + 1),
        of_another_version(version=None),
        of_another_version(files=[["a", 1, 1]]),
        of_another_version(files=[["a", 1, 1, 1]], compressions=["none"], digests=[1], damages=[[]]),
        of_another_version(files=[["a", 1, 1]], **OF_ONE, damages=[[{"shard": "a", "number": 1}]]),
        of_another_version(files=[["a", 1, 1]], **{**OF_ONE, "blocks": [2]}, damages=[[]]),
        of_another_version(files=[["a", 1, 1]], **{**OF_ONE, "digests": [1, 2]}, damages=[[]]),
    ],
)
def test_one_of_another_version_is_made_again(cache: IndexCache, file: ShardFile, data: bytes):
    """Its CRC is right, but what it holds is something else."""
    with pytest.raises(ValueError, match=r"version|no index|lengths|argument"):
        decode_indexes(data)
    path_in(cache, file).parent.mkdir(parents=True, exist_ok=True)
    path_in(cache, file).write_bytes(data)
    assert cache.load(file) is None
    assert keep(cache, file) is None
    assert cache.load(file) is not None


@pytest.mark.one_variant
@pytest.mark.parametrize("trap", ["a pipe", "/dev/zero", "a file of 20 GiB", "a folder"])
def test_what_others_put_in_the_place_of_an_index_is_not_read(cache: IndexCache, file: ShardFile, trap: str):
    """To open a pipe waits for somebody who writes; the others would be read until all memory is taken."""
    path = path_in(cache, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    if trap == "a pipe":
        os.mkfifo(path)
    elif trap == "/dev/zero":
        path.symlink_to(trap)
    elif trap == "a folder":
        path.mkdir()
    else:
        with path.open("wb") as out:
            out.truncate(20 << 30)
    assert cache.load(file) is None
    assert isinstance(keep(cache, file), str) == (trap == "a folder"), "what is no folder is replaced"
    assert {other.name for other in path.parent.iterdir()} - {"a.tfrecord"} == {path.name}, "nothing temporary"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compressions", ["bzip9"]),
        ("compressions", [["none"]]),
        ("offsets", 1 << 60),
        ("offsets", 1 << 63),
        ("num_bytes", 1 << 40),
        ("counts", 1 << 40),
        ("counts", 0),
        ("first_records", (1 << 64) - 1),
        ("damages", [[{**NO_DAMAGE, "shard": 7}]]),
        ("damages", [[{**NO_DAMAGE, "record": "0"}]]),
        ("damages", [[{}]]),
    ],
)
def test_one_that_is_forged_is_made_again(cache: IndexCache, file: ShardFile, name: str, value: int | list[object]):
    """Its CRC is right. Memory would be taken for its numbers, or a process would fail with its types."""
    assert keep(cache, file) is None
    path = path_in(cache, file)
    fields = msgpack.unpackb(path.read_bytes()[:-4])
    count = fields["blocks"][0]
    fields[name] = [8, value.to_bytes(8, "little") * count] if isinstance(value, int) else value
    body = msgpack.packb(fields)
    path.write_bytes(body + masked_crc(body).to_bytes(4, "little"))
    assert cache.load(file) is None


def test_writers_in_several_processes(cache: IndexCache, where: str, file: ShardFile, tmp_path: Path):
    program = (
        "import sys; from loaderd.storage.files import list_shards;"
        "from loaderd.formats.shard_index import build_index, encode_indexes;"
        "from loaderd.formats.index_cache import IndexCache; (file,) = list_shards(sys.argv[1]);"
        "cache = IndexCache(sys.argv[2], 4); data = encode_indexes([build_index(file, 4)]); sys.stdin.readline();"
        "assert all(cache.store([file], data) is None and cache.load(file) is not None for _ in range(200))"
    )
    command = [sys.executable, "-c", program, file.uri, where]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) for _ in range(2)]
    for writer in writers:
        writer.communicate(b"go\n")
    assert [writer.returncode for writer in writers] == [0, 0]
    assert is_kept(cache, file)
    assert not [path for path in tmp_path.rglob("*.tmp")], "nothing temporary is left"


# ------------------------------------------------------------------------------------------------------- groups


def names_of(groups: list[tuple[ShardFile, ...]]) -> list[list[str]]:
    return [[file.uri for file in group] for group in groups]


def made_up(names: Iterable[str], size_bytes: int = 1000) -> list[ShardFile]:
    return [ShardFile(f"/data/{name}", size_bytes, 1) for name in names]


def test_large_shards_are_alone_and_small_ones_stay_in_their_folder():
    small, large = made_up(["a/1", "a/2", "b/1"]), made_up(["b/2"], 10 << 20)
    groups = groups_of([*small, *large, *made_up(["b/3", "b/4"])])
    assert names_of(groups) == [["/data/a/1", "/data/a/2"], ["/data/b/1"], ["/data/b/2"], ["/data/b/3", "/data/b/4"]]
    sizes = [sum(file.size_bytes for file in group) for group in groups_of(made_up(map(str, range(1000)), 200_000))]
    assert max(sizes) <= 4 << 20, "or a shard that changes would have so much more read again"
    assert groups_of([]) == []


@pytest.mark.parametrize("name", ["{:05}.tfrecord", "train-{:05}-of-01000", "{}", "x{:08x}.gz"])
def test_groups_are_neither_small_nor_large_whatever_the_names_are(name: str):
    files = sorted(made_up(name.format(number) for number in range(20_000)))
    groups = groups_of(files)
    assert [file for group in groups for file in group] == files
    assert 40 < len(groups) < 130 and max(map(len, groups)) <= 1024


@pytest.mark.parametrize("seed", range(5))
def test_a_shard_more_or_less_changes_its_own_group_alone(seed: int):
    rng = Random(seed)
    files = made_up(f"{number:05}.tfrecord" for number in range(2000))
    before = groups_of(files)
    place = rng.randrange(2000)
    for others in (files[:place] + files[place + 1 :], sorted([*files, *made_up([f"{place:05}b"])])):
        assert len(set(groups_of(others)) - set(before)) <= 4, "two, but for names without an end for long"


def test_the_indexes_of_a_group_are_kept_in_one_file(cache: IndexCache, tmp_path: Path):
    (tmp_path / "data").mkdir()
    group = [make_shard(tmp_path / "data" / str(n), frames(payloads_of(n % 3))) for n in range(7)]
    assert not is_kept(cache, *group)
    assert keep(cache, *group) is None and is_kept(cache, *group)
    assert [path for path in tmp_path.rglob("*.loaderd-index")] == [path_in(cache, *group)]
    assert not is_kept(cache, *group[:-1]) and not is_kept(cache, group[0])
    os.utime(group[3].uri, ns=(1, 1))
    assert not is_kept(cache, *list_shards([file.uri for file in group])), "one of them has changed"
    assert list_shards(f"{tmp_path}/data/*") == list_shards([file.uri for file in group]), "it is hidden"


@pytest.mark.parametrize("kind", ["tfrecord", "lc0"])
def test_a_group_is_read_once_and_not_again_where_it_is_kept(where: str, kind: str, tmp_path: Path):
    """Where only the content of its shards says what they are: of others than TFRecord, each is looked at first."""
    records = np.frombuffer(np.random.default_rng(0).bytes(5 * leela.RECORD_V6.itemsize), leela.RECORD_V6).copy()
    records["version"], records["input_format"] = 6, 1
    for number in range(20):
        data = frames([bytes(40_000)]) if kind == "tfrecord" else records.tobytes()
        make_shard(tmp_path / f"{number}.bin", data)
    access = Access(Storage(filesystem=LocalFileSystem()))
    group = list_shards(f"counted://{tmp_path}/*.bin", access=access)
    total = sum(file.size_bytes for file in group)
    for run, most_bytes in enumerate([(1.2 if kind == "tfrecord" else 2.2) * total, 0.1 * total]):
        access.take_counts()
        results = find_indexes(where, 4, "detect", group, access=access)
        assert all(result.is_known == bool(run) and not result.index.damages for result in results)
        assert access.take_counts().bytes <= most_bytes


# --------------------------------------------------------------------------------------------------- where it is


def test_where_it_is(file: ShardFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOADERD_CACHE_DIR", str(tmp_path / "env"))
    remote = ShardFile("s3://bucket/a.tfrecord", 1, 1)
    assert path_in(IndexCache("user", 4), file).is_relative_to(tmp_path / "env")
    assert path_in(IndexCache("user", 4), remote).is_relative_to(tmp_path / "env")
    assert path_in(IndexCache("beside", 4), remote).is_relative_to(tmp_path / "env"), "nothing is written to a bucket"
    assert path_in(IndexCache(str(tmp_path / "x"), 4), file).is_relative_to(tmp_path / "x")
    none = IndexCache("none", 4)
    assert none.path_of(file) is None and keep(none, file) is None and none.load(file) is None
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tfrecord", "data"]
    monkeypatch.delenv("LOADERD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "loaderd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "loaderd"
    assert path_in(IndexCache("~/indexes", 4), file).is_relative_to(tmp_path / "home" / "indexes")


def test_others_may_read_it(cache: IndexCache, file: ShardFile):
    umask = os.umask(0o022)
    try:
        keep(cache, file)
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
        assert re.fullmatch("/.*: (Not a directory|No such file or directory|File exists)", keep(cache, file) or "")
    assert occupied.read_text().startswith("a file")


def test_a_disk_that_is_full(cache: IndexCache, file: ShardFile, tmp_path: Path):
    """A file that must not grow: the same to whoever writes it as a disk without room, or a quota."""
    data = encode_indexes([build_index(file, 4)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 1, len(data) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            error = cache.store([file], data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert error is not None and str(tmp_path) in error and error.endswith(": File too large")
        assert cache.load(file) is None
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.tfrecord"], "nothing is left"
    assert keep(cache, file) is None


def test_a_user_without_a_home(file: ShardFile, monkeypatch: pytest.MonkeyPatch):
    for name in ("LOADERD_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a container's random user has no entry in passwd
    cache = IndexCache("user", 4)
    assert cache.load(file) is None
    assert "LOADERD_CACHE_DIR" in (keep(cache, file) or "")


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
        keep(cache, file)
    left = path_in(cache, gone).with_name(f".{16 * 'a'}.tmp")
    alien = path_in(cache, gone).with_name("mine")
    for path in (left, alien):
        path.touch()
    for path in (left, alien, path_in(cache, gone), path_in(cache, used)):
        used_days_ago(path, 61)
    used_days_ago(path_in(cache, lately), 59)
    assert cache.load(used) is not None
    keep(cache, new)
    assert path_in(cache, gone).exists(), "it was pruned today"
    used_days_ago(tmp_path / "chosen" / "index" / ".pruned", 2)
    keep(cache, new)
    assert cache.load(gone) is None and not left.exists() and alien.exists()
    assert all(cache.load(file) is not None for file in (used, lately, new))


def test_the_least_used_go_where_there_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = IndexCache(str(tmp_path / "chosen"), 4)
    files = [make_shard(tmp_path / f"{number}.tfrecord", frames(payloads_of(5))) for number in range(4)]
    for days, file in enumerate(files):
        keep(cache, file)
        used_days_ago(path_in(cache, file), days)
    monkeypatch.setattr(index_cache, "_MAX_BYTES", 5 * path_in(cache, files[0]).stat().st_size // 2)
    used_days_ago(tmp_path / "chosen" / "index" / ".pruned", 2)
    keep(cache, files[0])
    assert [path_in(cache, file).exists() for file in files] == [True, True, False, False]


def test_a_link_in_the_place_of_the_marker_is_not_followed(file: ShardFile, tmp_path: Path):
    """Else another user of the folder has this one make a file anywhere."""
    cache = IndexCache(str(tmp_path / "shared"), 4)
    (tmp_path / "shared" / "index").mkdir(parents=True)
    (tmp_path / "shared" / "index" / ".pruned").symlink_to(tmp_path / "elsewhere")
    assert keep(cache, file) is None and is_kept(cache, file)
    assert not (tmp_path / "elsewhere").exists()


def test_indexes_beside_their_shards_are_left_alone(tmp_path: Path):
    cache = IndexCache("beside", 4)
    file = make_shard(tmp_path / "a.tfrecord", frames(payloads_of(5)))
    keep(cache, file)
    used_days_ago(path_in(cache, file), 100)
    keep(cache, make_shard(tmp_path / "b.tfrecord", frames(payloads_of(5))))
    assert cache.load(file) is not None and not (tmp_path / ".pruned").exists()


_STORE = """
import os, sys
from pathlib import Path
from loaderd.options import Storage
from loaderd.schemas import leela
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import build_index, encode_indexes

os.umask(0o077)
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
cache = IndexCache(sys.argv[2], 4)
(file,) = list_shards(sys.argv[3])
print("found" if cache.load(file) else "made", cache.store([file], encode_indexes([build_index(file, 4)])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
@pytest.mark.parametrize("mode", [0o1777, 0o2777])
def test_a_folder_that_users_share_takes_the_indexes_of_each(tmp_path: Path, mode: int):
    """Two users of other groups, with a umask that lets nobody else read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        shared = Path(folder, "indexes")
        shared.mkdir()
        shared.chmod(mode)
        shard = Path(folder, "a.tfrecord")
        of_user = {}
        for number in range(600):  # two whose indexes lie in one subfolder
            shard = Path(folder, f"{number}.tfrecord")
            file = make_shard(shard, frames(payloads_of(3)))
            shard.chmod(0o644)
            inner = path_in(IndexCache(str(shared), 4), file).parent.name
            if inner in of_user:
                break
            of_user[inner] = shard
        first, second = of_user[inner], shard

        def run(user: int, shard: Path) -> str:
            code = [sys.executable, "-c", _STORE, str(user), str(shared), str(shard)]
            return subprocess.run(code, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

        assert run(12345, first) == "made None" and run(23456, second) == "made None"
        assert run(23456, first).startswith("found") and run(12345, second).startswith("found")
        for path in (shared / "index", shared / "index" / inner):
            assert stat.S_IMODE(path.stat().st_mode) & 0o1777 == mode & 0o1777

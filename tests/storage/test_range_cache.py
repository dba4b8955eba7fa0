"""Parts of shards on a local disk: whole or not there, bounded, and never an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from loaderd.storage.range_cache import PART_BYTES, RangeCache
from loaderd.storage.shard_file import ShardFile

FILE = ShardFile("s3://bucket/a.tfrecord", 10 * PART_BYTES, 5)
OTHER = ShardFile("s3://bucket/b.tfrecord", 20 * PART_BYTES, 5)
MIB = 1 << 20


def parts_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_is_kept_is_found_by_shard_time_and_number(tmp_path: Path):
    cache = RangeCache(str(tmp_path), 64 * MIB)
    cache.store(FILE, 3, b"three")
    assert RangeCache(str(tmp_path), 64 * MIB).load(FILE, 3) == b"three"
    assert cache.load(FILE, 4) is None
    for other in (
        ShardFile("s3://bucket/b.tfrecord", FILE.size_bytes, 5),
        ShardFile(FILE.uri, FILE.size_bytes + 1, 5),
        ShardFile(FILE.uri, FILE.size_bytes, 6),
    ):
        assert cache.load(other, 3) is None
    with_key = ShardFile("s3://key:secret@bucket/a.tfrecord", FILE.size_bytes, 5)
    cache.store(with_key, 3, b"with a key")
    assert cache.load(ShardFile(with_key.uri.replace("secret", "other"), FILE.size_bytes, 5), 3) == b"with a key"


def test_what_was_damaged_on_the_disk_is_not_there(tmp_path: Path):
    cache = RangeCache(str(tmp_path), 64 * MIB)
    for damage in (lambda data: b"X" + data[1:], lambda data: data[:-5], lambda data: b""):
        cache.store(FILE, 1, b"some bytes")
        (path,) = parts_in(tmp_path)
        path.write_bytes(damage(path.read_bytes()))
        assert cache.load(FILE, 1) is None
        assert parts_in(tmp_path) == []


def test_what_others_put_in_the_place_of_a_part_is_not_read(tmp_path: Path):
    cache = RangeCache(str(tmp_path), 64 * MIB)
    cache.store(FILE, 3, b"three")
    (path,) = parts_in(tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert cache.load(FILE, 3) is None
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    assert cache.load(FILE, 3) is None


def test_it_stays_below_its_size_and_keeps_what_was_used_last(tmp_path: Path):
    most = 8 * MIB
    cache = RangeCache(str(tmp_path), most)
    for number in range(100):
        cache.store(FILE, number, bytes(PART_BYTES))
        (newest,) = [path for path in parts_in(tmp_path) if path.name.endswith(f"-{number}.part")]
        os.utime(newest, (number, number))  # so that their order is certain
        if number == 20:
            assert cache.load(FILE, 0) is not None  # which notes that it is used
        assert sum(path.stat().st_size for path in parts_in(tmp_path)) <= most
    kept = [number for number in range(100) if cache.load(FILE, number) is not None]
    assert len(kept) > 20 and kept == [0, *range(101 - len(kept), 100)]


def test_a_cache_that_is_too_small_keeps_what_it_has(tmp_path: Path):
    """Else each part would be deleted before it is read again, in the next epoch."""
    most = 8 * MIB
    of_before = RangeCache(str(tmp_path), most)
    for number in range(20):
        of_before.store(OTHER, number, bytes(PART_BYTES))
    for path in parts_in(tmp_path):
        os.utime(path, (1, 1))
    cache = RangeCache(str(tmp_path), most)
    for number in range(100):
        cache.store(FILE, number, bytes(PART_BYTES))
    kept = [number for number in range(100) if cache.load(FILE, number) is not None]
    assert cache.is_full and 28 <= len(kept) <= 32 and kept == list(range(len(kept)))
    assert not any(cache.load(OTHER, number) for number in range(20)), "nobody has used it since"
    assert sum(path.stat().st_size for path in parts_in(tmp_path)) <= most + PART_BYTES
    for path in parts_in(tmp_path):
        path.unlink()
    later = RangeCache(str(tmp_path), most)
    later.store(FILE, 50, b"some bytes")
    assert not later.is_full and later.load(FILE, 50) is not None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path):
    (tmp_path / "file").touch()
    cache = RangeCache(str(tmp_path / "file"), 64 * MIB)
    cache.store(FILE, 0, b"some bytes")
    assert cache.load(FILE, 0) is None
    full = RangeCache("/dev/full", 64 * MIB)
    full.store(FILE, 0, b"some bytes")
    assert full.load(FILE, 0) is None


def test_a_full_disk_keeps_nothing_and_leaves_nothing(tmp_path: Path):
    """The limit of a file's size does what a full disk does: a write fails in the middle."""
    script = textwrap.dedent(f"""
        import resource, signal
        from loaderd.storage.range_cache import RangeCache
        from loaderd.storage.shard_file import ShardFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        cache, file = RangeCache({str(tmp_path)!r}, 1 << 26), ShardFile("s3://a/b", 5, 5)
        cache.store(file, 0, bytes(5000))
        assert cache.load(file, 0) is None
    """)
    subprocess.run([sys.executable, "-c", script], check=True)
    assert parts_in(tmp_path) == []


def test_processes_that_are_killed_while_they_write_leave_whole_parts(tmp_path: Path):
    script = textwrap.dedent(f"""
        import itertools
        from loaderd.storage.range_cache import PART_BYTES, RangeCache
        from loaderd.storage.shard_file import ShardFile
        cache = RangeCache({str(tmp_path)!r}, 4 << 20)
        print(flush=True)
        for number in itertools.count():
            cache.store(ShardFile("s3://a/b", 5, 5), number % 30, bytes([number % 30]) * PART_BYTES)
    """)
    writers = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()
    cache, file = RangeCache(str(tmp_path), 4 * MIB), ShardFile("s3://a/b", 5, 5)
    until_s = time.monotonic() + 60
    while not any(cache.load(file, number) for number in range(30)):
        assert time.monotonic() < until_s
    time.sleep(0.1)  # in which they write more, and over what they wrote
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    found = {number: cache.load(file, number) for number in range(30)}
    assert any(found.values())
    assert all(part is None or part == bytes([number]) * PART_BYTES for number, part in found.items())

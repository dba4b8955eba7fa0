"""An object store that is slow, fails now and then, is away for a while, or has other objects than it had."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
import re
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distant_s3 import ENVIRONMENT, DistantS3

import loaderd
from loaderd.errors import ClosedError, LoaderdError, ShardReadError, StorageError
from loaderd.observe.running_streams import running_streams
from loaderd.observe.top_rows import Row, row_of
from tests.helpers.serving import Server
from tests.reliability import numbered
from tests.reliability.numbered import SCHEMA, numbers_of, write_shards

SIZES = [3000, 3000, 2000]
OPTIONS: dict[str, Any] = {
    "batch_size": 100,
    "workers": 2,
    "seed": 5,
    "shuffle": loaderd.Shuffle(window_records=1000, block_records=64),
}


FIXED_SCHEMA = loaderd.Schema(loaderd.FixedRecords([("n", "<i8"), ("again", "<i8")]), {"n": loaderd.Array("n")})


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    return write_shards(tmp_path / "shards", SIZES)


@pytest.fixture
def store(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[DistantS3]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with DistantS3() as found:
        for path in shards:
            found.put(os.path.basename(path), Path(path).read_bytes())
        yield found


def taken(loader: loaderd.Loader) -> list[int]:
    return np.concatenate([numbers_of(batch) for batch in loader]).tolist()


@pytest.fixture
def planned(shards: list[str]) -> list[int]:
    """The order of the records, read from this machine's disk."""
    with loaderd.Loader(shards, SCHEMA, **OPTIONS) as loader:
        return taken(loader)


def wait_for_quiet(store: DistantS3) -> None:
    """Until nobody has asked the store for anything for half a second."""
    before = -1
    while (now := store.asked.total()) != before:
        before = now
        time.sleep(0.5)


# Where records may be skipped, one that could not be fetched might be.
ON_CORRUPT = [pytest.param("raise", marks=pytest.mark.slow), "skip_record"]


@pytest.mark.parametrize("on_corrupt", ON_CORRUPT)
@pytest.mark.parametrize("failing", [0.05, 0.3])
def test_answers_that_fail_at_random_lose_nothing(
    store: DistantS3, planned: list[int], failing: float, on_corrupt: Any
):
    store.failing = 0.05
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, on_corrupt=on_corrupt, **OPTIONS) as loader:
        store.failing = failing
        assert taken(loader) == planned
        statistics = loader.statistics()
    assert store.asked["failed"] > 0 and statistics.storage.retries > 0
    assert statistics.storage.requests > 20 and statistics.workers_restarted == 0
    assert statistics.damages == () and statistics.records_skipped == 0


@pytest.mark.parametrize("on_corrupt", ON_CORRUPT)
def test_a_store_that_is_away_for_a_while_loses_nothing(store: DistantS3, planned: list[int], on_corrupt: Any):
    store.delay_s = 0.02
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, on_corrupt=on_corrupt, **OPTIONS) as loader:
        batches = iter(loader)
        found = [numbers_of(next(batches))]
        store.away = True
        threading.Timer(3.0, lambda: setattr(store, "away", False)).start()
        found += [numbers_of(batch) for batch in batches]
        statistics = loader.statistics()
    assert np.concatenate(found).tolist() == planned
    assert store.asked["away"] > 0 and statistics.storage.retries > 0
    assert statistics.damages == () and statistics.workers_restarted == 0


@pytest.mark.one_variant
@pytest.mark.parametrize("trouble", ["failing", "away", "refusing"])
def test_an_outage_is_named_and_logged(store: DistantS3, caplog: pytest.LogCaptureFixture, trouble: str):
    """However the store fails: it was called a lack of workers, who would make the training four times faster."""
    options = {**OPTIONS, "epochs": None}
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, **options) as loader:
        batches, pause_s = iter(loader), 0.005

        def take() -> None:
            with contextlib.suppress(ClosedError):
                while True:
                    with contextlib.suppress(StorageError):  # of refusals, every five seconds
                        next(batches)
                        time.sleep(pause_s)

        taker = threading.Thread(target=take)
        next(batches)
        taker.start()
        setattr(store, trouble, 1.0 if trouble == "failing" else True)
        until_s = time.monotonic() + 60
        while not (caplog.messages and loader.diagnose().verdict == "storage does not answer"):
            assert time.monotonic() < until_s, (caplog.messages, loader.diagnose())
            time.sleep(0.1)
        found, (row,) = loader.diagnose(), rows_of(os.getpid())
        setattr(store, trouble, False)
        pause_s = 0  # a consumer that never waits reads no messages
        while len(caplog.messages) < 2:
            assert time.monotonic() < until_s, (caplog.messages, loader.diagnose())
            time.sleep(0.1)
    taker.join()
    assert found.gain == 1 and "workers" not in found.advice and found.limiting_stage == ""
    assert found.outage_s >= 3 and found.failed_requests >= 2
    what = {
        "failing": "SLOW_DOWN|SERVICE_UNAVAILABLE|503",
        "away": "NETWORK_CONNECTION",
        "refusing": "ACCESS_DENIED",
    }[trouble]
    assert re.search(what, found.last_error) and re.search(what, row.workers) and row.verdict == found.verdict
    first, last = caplog.messages
    assert re.match(
        r"no answer from the storage for [56] s; \d+ requests failed, the last one: s3://shards/00", first
    )
    assert re.search(what, first) and re.match(r"answers come from the storage again, after \d+ s", last)


def rows_of(pid: int) -> list[Row]:
    """What ``loaderd top`` shows of a process."""
    found = running_streams(frozenset({pid}))
    now_s = time.monotonic()
    sampled = [(one, one.watched.samples()) for one in found]
    return [row_of(one.consumer, "", samples, one.watched.facts, now_s) for one, samples in sampled if samples]


@pytest.mark.slow
def test_an_outage_while_the_index_is_made_is_logged(store: DistantS3, caplog: pytest.LogCaptureFixture):
    store.delay_s = 0.2
    names = [store.uri(f"00{number}.tfrecord") for number in range(3)]

    def fail_until_logged() -> None:
        while not store.asked["GET"]:
            time.sleep(0.01)
        store.failing = 1.0
        while not caplog.messages:
            time.sleep(0.1)
        store.failing = 0.0

    failing = threading.Thread(target=fail_until_logged)
    failing.start()
    with loaderd.Loader(names, SCHEMA, index_cache="none", **OPTIONS):
        failing.join()
    assert re.match("no answer from the storage for 5 s; .*(SLOW_DOWN|UNAVAILABLE|503)", caplog.messages[0])
    assert f"Asked was 127.0.0.1:{store.port}, with AWS_ACCESS_KEY_ID of the environment" in caplog.messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("on_corrupt", ["raise", "skip_record"])
def test_a_store_that_stays_away_is_an_error_and_whoever_asks_again_misses_nothing(
    store: DistantS3, planned: list[int], on_corrupt: Any
):
    storage = loaderd.Storage(retry_s=1)
    uri = store.uri("*.tfrecord")
    with loaderd.Loader(uri, SCHEMA, on_corrupt=on_corrupt, storage=storage, **OPTIONS) as loader:
        batches = iter(loader)
        found, errors = [numbers_of(next(batches))], []
        store.away = True
        while batches is not None:
            try:
                found.append(numbers_of(next(batches)))
            except StorageError as error:
                errors.append(error)
                store.away = len(errors) < 2  # once is not enough
            except StopIteration:
                break
        statistics = loader.statistics()
    assert np.concatenate(found).tolist() == planned
    assert 2 <= len(errors) <= 4
    assert "s3://shards/00" in errors[0].message and "tried for 1 s" in errors[0].message
    assert "Nothing is skipped: ask again" in errors[0].hint
    assert statistics.damages == () and statistics.records_skipped == 0 and statistics.daemon_restarts == 0


@pytest.mark.slow
def test_what_was_read_ahead_is_taken_before_an_outage_is_told(store: DistantS3, planned: list[int]):
    begun: list[int] = []

    def hand_over(batch: loaderd.Batch) -> Callable[[], list[int]]:
        begun.append(batch.num_records)
        return lambda: numbers_of(batch)

    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, storage=loaderd.Storage(retry_s=1), **OPTIONS) as loader:
        batches = loader._iterate(hand_over, ahead=3)
        found = [next(batches)]
        store.away = True
        with pytest.raises(StorageError, match="tried for 1 s"):
            while True:
                found.append(next(batches))
        assert len(found) == len(begun), "nothing that was read is kept back"
        store.away = False
        found += batches
    assert np.concatenate(found).tolist() == planned


@pytest.mark.slow
def test_members_of_a_group_are_told_that_the_store_is_away_only_where_they_wait(store: DistantS3, tmp_path: Path):
    module = """
        import loaderd, numbered
        storage, shuffle = loaderd.Storage(retry_s=1), loaderd.Shuffle(window_records=200, block_records=64)
        train = loaderd.Dataset({uri!r}, numbered.SCHEMA, storage=storage, shuffle=shuffle)
    """
    (tmp_path / "away_sets.py").write_text(textwrap.dedent(module.format(uri=store.uri("*.tfrecord"))))
    path = os.path.dirname(numbered.__file__)
    server = Server(
        tmp_path, "away_sets:train", "--workers", "2", PYTHONPATH=f"{path}:{os.environ.get('PYTHONPATH', '')}"
    )
    with contextlib.closing(server):
        server.wait_line("memory:")
        options: dict[str, Any] = {"batch_size": 100, "sharing": "mirrored", "consumers": 2}
        with ThreadPoolExecutor(2) as pool:
            connect = functools.partial(loaderd.connect, f"unix:{server.path}", "train", **options)
            loaders = [one.result() for one in [pool.submit(connect) for _ in range(2)]]
            iterators = [iter(loader) for loader in loaders]

            def next_of_all() -> list[int]:
                return [numbers_of(batch)[0] for batch in pool.map(next, iterators)]

            next_of_all()
            wait_for_quiet(store)  # all is loaded that there is room for: nobody waits for what is asked for next
            store.away = True
            while not store.asked["away"]:
                next_of_all()
                wait_for_quiet(store)
            time.sleep(4)
            store.away = False
            time.sleep(8)
            for _ in range(12):
                assert len(next_of_all()) == 2
            store.away = True

            def error_of(batches: Iterator[loaderd.Batch]) -> StorageError:
                with pytest.raises(StorageError) as caught:
                    for _ in batches:
                        pass
                return caught.value

            assert all("tried for 1 s" in error.message for error in pool.map(error_of, iterators)), "now they waited"
            store.away = False
            time.sleep(2)  # what is asked for now may still fail
            assert len(next_of_all()) == 2
            for loader in loaders:
                loader.close()


@pytest.mark.slow
def test_a_store_that_is_away_from_the_start_is_an_error(store: DistantS3):
    store.away = True
    storage = loaderd.Storage(retry_s=0.5)
    for on_corrupt in ("raise", "skip_record"):
        with pytest.raises(StorageError, match=r"s3://shards/\*.*tried for 1 s|s3://shards/\*"):
            loaderd.Loader(
                store.uri("*.tfrecord"), SCHEMA, on_corrupt=on_corrupt, storage=storage, index_cache="none", **OPTIONS
            )


@pytest.fixture
def keys(store: DistantS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes an access key into the file of credentials, as a sidecar does; "old" is there, and is taken."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))

    def write(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = t\n"
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(tmp_path / "credentials")

    write("old")
    store.keys = {"old"}
    return write


def test_credentials_that_are_renewed_while_they_are_used_are_taken(
    store: DistantS3, planned: list[int], keys: Callable[[str], None]
):
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, **OPTIONS) as loader:
        batches = iter(loader)
        found = [numbers_of(next(batches))]
        store.keys = {"new"}
        threading.Timer(1.0, keys, ["new"]).start()
        found += [numbers_of(batch) for batch in batches]
    assert np.concatenate(found).tolist() == planned
    assert 0 < store.refused["old"] < 100 and store.refused["new"] == 0


def test_credentials_that_have_expired_are_named_and_new_ones_lose_nothing(
    store: DistantS3, planned: list[int], keys: Callable[[str], None], tmp_path: Path
):
    store.refusal = (400, "ExpiredToken", "The provided token has expired.")
    storage = loaderd.Storage(retry_s=0.5)
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, storage=storage, **OPTIONS) as loader:
        batches = iter(loader)
        found = [numbers_of(next(batches))]
        store.keys = {"new"}
        with pytest.raises(StorageError, match="ExpiredToken: The provided token has expired") as caught:
            while True:
                found.append(numbers_of(next(batches)))
        assert f"with the profile 'default' of {tmp_path}/credentials. Renew them" in caught.value.hint
        keys("new")
        while True:
            try:
                found.append(numbers_of(next(batches)))
            except StorageError:
                continue
            except StopIteration:
                break
    assert np.concatenate(found).tolist() == planned


def test_credentials_that_were_never_taken_are_an_error_at_once(store: DistantS3, keys: Callable[[str], None]):
    store.keys, store.refusal = {"other"}, (403, "InvalidAccessKeyId", "The key does not exist in our records.")
    with pytest.raises(StorageError, match="INVALID_ACCESS_KEY_ID") as caught:
        loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, **OPTIONS)
    assert "tried for" not in caught.value.message and store.refused["old"] <= 3


@pytest.mark.parametrize("kind", ["tfrecord", "tfrecord.gz", "fixed", "fixed.gz", "npz"])
def test_no_record_is_of_an_object_that_replaced_one_of_its_size(store: DistantS3, tmp_path: Path, kind: str):
    """Its CRCs are right, its size is the same, and the workers looked at the one before a moment ago."""
    schema = SCHEMA if "tfrecord" in kind else FIXED_SCHEMA

    def content(first: int) -> bytes:
        numbers, out = np.arange(first, first + 1000, dtype="<i8"), io.BytesIO()
        if "tfrecord" in kind:
            out.write(Path(write_shards(tmp_path / f"{first}", [first, 1000])[1]).read_bytes())
        elif kind == "npz":
            np.savez(out, n=numbers, again=numbers)
        else:
            out.write(np.stack([numbers, numbers], axis=1).tobytes())
        return gzip.compress(out.getvalue(), 0) if kind.endswith(".gz") else out.getvalue()

    before, after = [content(1000 * number) for number in range(8)], content(20_000)
    for number, data in enumerate(before):
        store.put(f"of/{number}.{kind}", data)
    stored_s = time.time()
    with loaderd.Loader(store.uri("of/*"), schema, on_corrupt="skip_record", **OPTIONS) as loader:
        batches = iter(loader)
        found = [next(batches)["n"]]
        time.sleep(max(0.0, stored_s + 1.1 - time.time()))  # of compressed TFRecords and npz, the time must differ
        for number, data in enumerate(before):
            assert len(data) == len(after)
            store.put(f"of/{number}.{kind}", after)
        found += [batch["n"] for batch in batches]
        damages = loader.statistics().damages
    numbers = np.concatenate(found) - (1 << 14 if "tfrecord" in kind else 0)
    assert len(numbers) < 8000 and numbers.max() < 8000
    assert "the file that was indexed" in damages[0].expected


@pytest.mark.slow
def test_what_is_on_the_local_disk_is_not_fetched_again(store: DistantS3, planned: list[int], tmp_path: Path):
    storage = loaderd.Storage(cache_dir=str(tmp_path / "cache"))
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, storage=storage, **OPTIONS) as loader:
        assert taken(loader) == planned
        first = loader.statistics().storage
    assert first.bytes == sum(os.path.getsize(path) for path in (tmp_path / "shards").iterdir())
    store.asked.clear()
    with loaderd.Loader(store.uri("*.tfrecord"), SCHEMA, storage=storage, **OPTIONS) as loader:
        assert taken(loader) == planned
        second = loader.statistics().storage
    assert second.bytes == 0 and second.cache_hits > 0 and second.cache_misses == 0
    assert store.asked["HEAD"] <= 1 and store.asked["GET"] == 1  # the first look, and the listing


@pytest.mark.slow
def test_many_small_objects_are_indexed_at_the_same_time(store: DistantS3, shards: list[str]):
    data = Path(shards[0]).read_bytes()[:320]  # ten records
    for number in range(200):
        store.put(f"small/{number:03}.tfrecord", data)
    store.delay_s = 0.05
    with loaderd.Loader(store.uri("small/*.tfrecord"), SCHEMA, index_cache="none", **OPTIONS) as loader:
        statistics = loader.statistics()
    assert statistics.num_records == 2000
    assert store.asked["HEAD"] <= 210 + statistics.storage.retries
    assert store.most_at_once > 2, "the requests were made one after the other"


@pytest.mark.parametrize("scheme", ["http", "s3a"])
def test_a_scheme_that_nobody_knows_says_which_are_known(scheme: str):
    with pytest.raises(ShardReadError) as caught:
        loaderd.Loader(f"{scheme}://a/b.tfrecord", SCHEMA, **OPTIONS)
    assert "s3://, gs://" in caught.value.hint and "Storage(filesystem=…)" in caught.value.hint


def test_a_file_system_that_is_given_opens_any_scheme(shards: list[str], planned: list[int]):
    from pyarrow import fs

    folder = os.path.dirname(shards[0])
    given = fs.SubTreeFileSystem(os.path.dirname(folder), fs.LocalFileSystem())
    storage = loaderd.Storage(filesystem=given)
    with loaderd.Loader("s3a://shards/*.tfrecord", SCHEMA, storage=storage, **OPTIONS) as loader:
        assert taken(loader) == planned


def test_no_secret_comes_to_light(store: DistantS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    uri = store.uri("*.tfrecord", user="someone:s%2Fecret@")
    cache = tmp_path / "index"
    dataset = loaderd.Dataset(uri, SCHEMA, index_cache=str(cache), storage=loaderd.Storage(retry_s=0.2))
    with loaderd.Loader(dataset, batch_size=100, workers=2) as loader:
        assert len(taken(loader)) == sum(SIZES)
        store.put("000.tfrecord", b"another")
        seen = [repr(dataset), repr(loader), repr(loader.statistics())]
    kept = b"".join(path.read_bytes() for path in cache.rglob("*") if path.is_file())
    assert b"shards/001.tfrecord" in kept and b"s%2Fecret" not in kept
    for shards in (uri, uri.replace("*", "nothing-*"), [uri, uri]):
        store.away = shards == uri
        with pytest.raises(LoaderdError) as caught:
            loaderd.Loader(
                shards, SCHEMA, batch_size=100, workers=2, storage=loaderd.Storage(retry_s=0.2), index_cache="none"
            )
        seen += [str(caught.value), repr(caught.value)]
    assert all("***@shards" in text for text in (seen[0], *seen[3:]))
    assert not any("s%2Fecret" in text or "s/ecret" in text for text in seen)

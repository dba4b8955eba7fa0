"""File systems that a user gives."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import pytest
from pyarrow import fs

from loaderd.errors import NoShardsError, ShardReadError, StorageError
from loaderd.options import Storage
from loaderd.storage.access import Access, _mtime_ns
from loaderd.storage.files import list_shards, open_shard

LONG_S = 60.0
NAMES = ["a b.rec", "a#b.rec", "100%25.rec", "[a].rec", "é.rec", "a?b.rec"]


@pytest.fixture
def access(tmp_path: Path) -> Access:
    (tmp_path / "shards").mkdir()
    for name in NAMES:
        (tmp_path / "shards" / name).write_text(name)
    return Access(Storage(filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), retry_s=0.0))


def content(uri: str, access: Access) -> str:
    """Of what a URI or a glob names."""
    found = ""
    for file in list_shards(uri, access=access):
        data = bytearray(file.size_bytes)
        open_shard(file, access).read_at(0, memoryview(data))
        found += data.decode()
    return found


def test_what_a_glob_lists_can_be_opened(access: Access):
    assert content("folder://shards/*", access) == "".join(sorted(NAMES))
    assert content("folder://shards/a%20*", access) == "a b.rec"


def test_a_uri_is_quoted_as_any_other(access: Access):
    assert content("folder://shards/100%2525.rec", access) == "100%25.rec"
    assert content("folder://shards/a b.rec", access) == "a b.rec"
    with pytest.raises(NoShardsError):
        list_shards("folder://shards/100%25.rec", access=access)


class Web:
    """What pyarrow asks of fsspec's file system for web servers: names are URLs, and a page of links has no sizes."""

    protocol = "https"
    gate: threading.Event | None = None
    """Of a large page, which comes when this is set."""
    is_silent = False

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _at(self, url: str) -> Path:
        return self._root / unquote(url.removeprefix("https://host/"))

    def info(self, url: str) -> dict[str, Any]:
        if self.gate is not None and self.is_silent:
            self.gate.wait(LONG_S)
        at = self._at(url)
        return {"name": url, "size": at.stat().st_size, "type": "directory" if at.is_dir() else "file"}

    def isdir(self, url: str) -> bool:
        return self._at(url).is_dir()

    def isfile(self, url: str) -> bool:
        return self._at(url).is_file()

    def find(self, url: str, **_: Any) -> dict[str, Any]:
        if self.gate is not None:
            self.gate.wait(LONG_S)
        names = [f"{url}/{quote(each.name)}" for each in self._at(url).iterdir()]
        return {name: {"name": name, "size": None, "type": "file"} for name in names}

    def open(self, url: str, mode: str) -> BinaryIO:
        return self._at(url).open("rb")


@pytest.mark.usefixtures("access")
def test_links_of_a_page_can_be_opened(tmp_path: Path):
    web = Access(Storage(filesystem=Web(tmp_path), retry_s=0.0))
    assert content("https://host/shards/*", web) == "".join(sorted(NAMES))
    assert content("https://host/shards/a%20*", web) == "a b.rec"


@pytest.mark.usefixtures("access")
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_long_listing_is_waited_for_while_storage_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool
):
    monkeypatch.setattr("loaderd.storage.listing._ASK_EVERY_S", 0.02)
    monkeypatch.setattr("loaderd.storage.access._GRACE_S", 0.5)
    web, begun_s, heard = Web(tmp_path), time.monotonic(), []
    web.gate, web.is_silent = threading.Event(), is_silent

    def on_wait() -> None:
        heard.append(None)
        if time.monotonic() > begun_s + 2:
            web.gate.set()

    access = Access(Storage(filesystem=web, retry_s=0.0, requests=1), on_wait)
    if is_silent:
        with pytest.raises(StorageError, match="the storage does not answer"):
            list_shards("https://host/shards/*", access=access)
        web.gate.set()
        assert not heard
    else:
        assert len(list_shards("https://host/shards/*", access=access)) == len(NAMES)
        assert len(heard) > 3


def test_the_url_that_a_file_system_takes_stays_as_it_is(tmp_path: Path):
    url = "https://host/a%20b.rec?signature=a%2Fb"
    assert Access(Storage(filesystem=Web(tmp_path))).locate(url)[1] == url


@pytest.mark.parametrize("uri", ["folder://sha*/a.rec", "folder://sha*", "folder://*/*"])
def test_a_bucket_has_no_wildcards(access: Access, uri: str):
    with pytest.raises(ShardReadError, match="a glob may not have wildcards in the bucket's name"):
        list_shards(uri, access=access)


@pytest.mark.parametrize(
    "said", [b"Sat, 01 Jan 2022 00:00:01 GMT", b"2022-01-01T00:00:01Z", b"2022-01-01T01:00:01+01:00"]
)
def test_the_time_that_a_store_tells(said: bytes):
    class Handle:
        def metadata(self) -> dict[str, Any]:
            return {"Last-Modified": said}

    assert _mtime_ns(Handle()) == 1640995201 * 10**9

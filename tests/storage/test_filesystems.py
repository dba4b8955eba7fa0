"""File systems that a user gives."""

from __future__ import annotations

import posixpath
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

import pytest

from loaderd.errors import NoShardsError, ShardReadError
from loaderd.options import Storage
from loaderd.storage.access import Access, _mtime_ns
from loaderd.storage.files import list_shards, open_shard

NAMES = ["a b.rec", "a#b.rec", "100%25.rec", "[a].rec", "é.rec", "a?b.rec"]


class Folder:
    """What pyarrow asks of a file system of ``fsspec``: here of files in ``root``, by URIs ``folder://name``."""

    protocol = "folder"

    def __init__(self, root: Path) -> None:
        self._root = root

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("folder://")

    def info(self, path: str) -> dict[str, Any]:
        at = self._root / path
        kind = "directory" if at.is_dir() else "file"
        return {"name": path, "size": at.stat().st_size, "type": kind, "mtime": at.stat().st_mtime}

    def isdir(self, path: str) -> bool:
        return (self._root / path).is_dir()

    def isfile(self, path: str) -> bool:
        return (self._root / path).is_file()

    def find(self, path: str, **_: Any) -> dict[str, Any]:
        found = [posixpath.join(path, each.name) for each in (self._root / path).iterdir()]
        return {name: self.info(name) for name in found}

    def open(self, path: str, mode: str) -> BinaryIO:
        return (self._root / path).open("rb")


@pytest.fixture
def access(tmp_path: Path) -> Access:
    (tmp_path / "shards").mkdir()
    for name in NAMES:
        (tmp_path / "shards" / name).write_text(name)
    return Access(Storage(filesystem=Folder(tmp_path), retry_s=0.0))


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


class Web(Folder):
    """As fsspec's for web servers: names are URLs, and a page of links says nothing of sizes."""

    protocol = "https"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _path(self, url: str) -> str:
        return unquote(url.removeprefix("https://host/"))

    def info(self, path: str) -> dict[str, Any]:
        return {**super().info(self._path(path)), "name": path}

    def isdir(self, path: str) -> bool:
        return super().isdir(self._path(path))

    def isfile(self, path: str) -> bool:
        return super().isfile(self._path(path))

    def find(self, path: str, **_: Any) -> dict[str, Any]:
        names = [posixpath.join(path, quote(each.name)) for each in (self._root / self._path(path)).iterdir()]
        return {name: {"name": name, "size": None, "type": "file"} for name in names}

    def open(self, path: str, mode: str) -> BinaryIO:
        return super().open(self._path(path), mode)


def test_links_of_a_page_can_be_opened(access: Access, tmp_path: Path):
    web = Access(Storage(filesystem=Web(tmp_path), retry_s=0.0))
    assert content("https://host/shards/*", web) == "".join(sorted(NAMES))
    assert content("https://host/shards/a%20*", web) == "a b.rec"
    assert content("https://host/shards/a%20b.rec", web) == "a b.rec"


def test_a_file_of_unknown_size(access: Access, tmp_path: Path):
    class Silent(Web):
        def info(self, path: str) -> dict[str, Any]:
            return {**super().info(path), "size": None}

    web = Access(Storage(filesystem=Silent(tmp_path), retry_s=0.0))
    for url in ("https://host/shards/*", "https://host/shards/a%20b.rec"):
        with pytest.raises(ShardReadError, match="cannot be read: the storage does not say how large it is"):
            list_shards(url, access=web)


def test_the_url_that_a_file_system_takes_stays_as_it_is(tmp_path: Path):
    filesystems = Access(Storage(filesystem=Web(tmp_path))).filesystems
    url = "https://host/a%20b.rec?signature=a%2Fb"
    assert filesystems.of(url)[1] == url


def test_a_bucket_that_may_not_be_looked_at_hides_nothing(access: Access, tmp_path: Path):
    """As where credentials are for a prefix only."""

    class Narrow(Folder):
        def info(self, path: str) -> dict[str, Any]:
            if path == "shards":
                raise PermissionError(f"{path}: not yours")
            return super().info(path)

    narrow = Access(Storage(filesystem=Narrow(tmp_path), retry_s=0.0))
    with pytest.raises(NoShardsError, match="shards/sub/mispelt does not exist") as caught:
        list_shards("folder://shards/sub/mispelt", access=narrow)
    assert not caught.value.hint


@pytest.mark.parametrize("uri", ["folder://sha*/a.rec", "folder://sha*", "folder://*/*"])
def test_a_bucket_has_no_wildcards(access: Access, uri: str):
    with pytest.raises(ShardReadError, match="a glob may not have wildcards in the bucket's name"):
        list_shards(uri, access=access)


@pytest.mark.parametrize(
    "said", [b"Sat, 01 Jan 2022 00:00:01 GMT", b"2022-01-01T00:00:01Z", b"2022-01-01T01:00:01+01:00"]
)
def test_the_time_that_a_store_tells(said: bytes):
    class Handle:
        def metadata(self) -> dict[str, bytes]:
            return {"Last-Modified": said}

    assert _mtime_ns(Handle()) == 1640995201 * 10**9

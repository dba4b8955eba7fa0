"""File systems that a user gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from loaderd.errors import NoShardsError, ShardReadError
from loaderd.options import Storage
from loaderd.storage.access import Access, _mtime_ns
from loaderd.storage.files import list_shards, open_shard

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
    """As fsspec's for web servers: names are URLs."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path


def test_the_url_that_a_file_system_takes_stays_as_it_is():
    url = "https://host/a%20b.rec?signature=a%2Fb"
    assert Access(Storage(filesystem=Web())).locate(url)[1] == url


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

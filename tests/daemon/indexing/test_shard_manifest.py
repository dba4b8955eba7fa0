"""The folder of manifests stays small."""

from __future__ import annotations

import os
import time
from pathlib import Path

from loaderd.daemon.indexing.shard_manifest import MOST_MANIFESTS, Manifest, Manifests
from loaderd.storage.shard_file import ShardFile


def manifest(number: int, dataset: str = "sets:train") -> Manifest:
    """Of a shard whose name is no Unicode, and whose URI has a secret."""
    files = [ShardFile(f"s3://KEY:SECRET@bucket/{number}\udcff", number, 2)]
    return Manifest.of(dataset, {"shards": f"digest {number}"}, [files, None])


def test_what_nobody_uses_is_deleted(tmp_path: Path):
    manifests = Manifests(str(tmp_path / "state" / "manifests"))
    assert manifests.add(manifest(0, "sets:valid")) is None
    for number in range(MOST_MANIFESTS + 10):
        assert manifests.add(manifest(number)) is None
        manifests.touch("sets:train", {"shards": "digest 0"})
        (path,) = (tmp_path / "state" / "manifests").glob(manifest(number).key + ".json")
        assert b"SECRET" not in path.read_bytes()
        os.utime(path, (time.time(), time.time() + number - 1000))
        manifests.touch("sets:train", {"shards": "digest 0"})
    kept = [
        number
        for number in range(MOST_MANIFESTS + 10)
        if manifests.find("sets:train", {"shards": f"digest {number}"})
    ]
    assert kept == [0, *range(11, MOST_MANIFESTS + 10)]
    assert manifests.find("sets:train", {"shards": "digest 0"}) == manifest(0)
    manifests.close()

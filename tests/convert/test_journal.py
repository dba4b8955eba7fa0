"""The journal of a conversion, in a folder to which others can write: it is no proof of anything."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loaderd import testing
from loaderd.convert.journal import NAME
from tests.helpers import commands

MODULE = """
import loaderd
schema = loaderd.Schema.of_stored({"number": loaderd.Int64()})
"""
OPTIONS = ("from/*", "--schema", "mine:schema", "--records-per-shard", 100, "--processes", 1, "--to", "to")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    testing.write_shards(tmp_path / "from", {"number": np.arange(400)}, num_shards=2)
    (tmp_path / "to").mkdir()
    return tmp_path


def convert(folder: Path) -> Any:
    return commands.run("convert", *OPTIONS, "--json", folder=folder)


def shards_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "to").glob("shard-*")}


def refused(folder: Path, *said: str) -> None:
    done = convert(folder)
    assert done.returncode == 2 and all(text in done.stderr for text in (NAME, *said)), done.stderr
    assert "Traceback" not in done.stderr and not shards_in(folder)


def test_a_link_in_its_place_is_not_followed(folder: Path):
    for content in (b"", b"precious"):
        (folder / "precious").write_bytes(content)
        (folder / "to" / NAME).symlink_to(folder / "precious")
        refused(folder, "is a link")
        assert (folder / "precious").read_bytes() == content
        (folder / "to" / NAME).unlink()
    (folder / "to" / NAME).symlink_to(folder / "none")
    refused(folder, "is a link")
    assert not (folder / "none").exists()


def test_what_is_no_file_is_refused(folder: Path):
    os.mkfifo(folder / "to" / NAME)
    refused(folder, "no regular file")
    (folder / "to" / NAME).unlink()
    (folder / "to" / NAME).mkdir()
    refused(folder, "no regular file")


def test_one_that_is_larger_than_any_is_not_read_whole(folder: Path):
    with (folder / "to" / NAME).open("wb") as journal:
        journal.truncate(300 << 20)
    refused(folder, "larger than 268,435,456 bytes")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_one_of_another_user_is_not_believed(folder: Path):
    assert convert(folder).returncode == 0
    for path in (folder / "to").glob("shard-*"):
        path.unlink()
    os.chown(folder / "to" / NAME, 65534, 65534)
    refused(folder, "a file of user 65534")


BAD_LINES = [
    "null",
    "[]",
    "7",
    "{}",
    "\0\0\0",
    "[" * 100_000,
    '{"kind": "shard"}',
    '{"kind": "job"}',
    '{"kind": "job", "digest": 7}',
    '{"kind": "shard", "shard": 5, "records": 1, "num_bytes": 1, "digest": ""}',
    '{"kind": "shard", "shard": "x", "records": -1, "num_bytes": 1, "digest": ""}',
    '{"kind": "shard", "shard": "x", "records": 1e9, "num_bytes": 1, "digest": ""}',
    '{"kind": "shard", "shard": "x", "records": 1, "num_bytes": 1, "digest": "", "more": 1}',
]


@pytest.mark.parametrize("number", [1, 2])
def test_other_lines_are_named_and_the_file_stays(folder: Path, number: int):
    assert convert(folder).returncode == 0
    for path in (folder / "to").glob("shard-*"):
        path.unlink()
    job = (folder / "to" / NAME).read_text().splitlines()[0]
    for line in BAD_LINES:
        text = "\n".join([job] * (number - 1) + [line, job, ""])
        (folder / "to" / NAME).write_text(text)
        refused(folder, f"line {number} is ")
        assert (folder / "to" / NAME).read_text() == text
    (folder / "to" / NAME).write_text("something else without a line's end")
    refused(folder, "another file")


def test_a_line_that_was_cut_is_written_again(folder: Path):
    assert convert(folder).returncode == 0
    whole, journal = shards_in(folder), (folder / "to" / NAME).read_bytes()
    for size in (len(journal) - 5, 20, 0):
        (folder / "to" / NAME).write_bytes(journal[:size])
        if size < 100:  # in the first line: nothing is known, and shards of others would be in the way
            for path in (folder / "to").glob("shard-*"):
                path.unlink()
        assert convert(folder).returncode == 0
        assert shards_in(folder) == whole
        lines = (folder / "to" / NAME).read_bytes().splitlines()
        assert sorted(lines) == sorted(journal.splitlines())


def test_what_a_forged_line_says_is_looked_at(folder: Path):
    """Each shard that is not what its line says is written again, and no other file is touched."""
    assert convert(folder).returncode == 0
    whole = shards_in(folder)
    job, *lines = (folder / "to" / NAME).read_text().splitlines()
    shards = [json.loads(line) for line in lines]
    names = [each["shard"] for each in shards]
    other = folder / "to" / names[0]
    other.write_bytes(whole[names[1]])  # of the same size, sound, and not what belongs here
    (folder / "to" / names[1]).write_bytes(whole[names[1]][: len(whole[names[1]]) // 2])
    shards[1]["num_bytes"] = len(whole[names[1]]) // 2
    (folder / "to" / names[2]).unlink()
    shards[2] = {**shards[2], "records": 0, "num_bytes": 0}
    outside = {**shards[3], "shard": "../from/00000.tfrecord"}
    text = "\n".join([job, *map(json.dumps, [*shards, outside])]) + "\n"
    (folder / "to" / NAME).write_text(text)
    before = (folder / "to" / names[3]).stat().st_mtime_ns
    done = convert(folder)
    assert done.returncode == 0, done.stderr
    assert shards_in(folder) == whole
    told = {one["shard"]: one["was_there"] for one in map(json.loads, done.stdout.splitlines()[:-1])}
    assert told == {names[0]: False, names[1]: False, names[2]: False, names[3]: True}
    assert (folder / "to" / names[3]).stat().st_mtime_ns == before


def test_a_sound_shard_with_fewer_records_is_written_again(folder: Path):
    """Its line says what is in it, but not what belongs there."""
    assert convert(folder).returncode == 0
    whole = shards_in(folder)
    job, *lines = (folder / "to" / NAME).read_text().splitlines()
    shard = json.loads(lines[0])
    (folder / "less").mkdir()
    (folder / "from").rename(folder / "hidden")
    testing.write_shards(folder / "from", {"number": np.arange(40)})
    less = commands.run("convert", *OPTIONS[:-1], "less", "--json", folder=folder)
    said = json.loads(less.stdout.splitlines()[0])
    (folder / "to" / shard["shard"]).write_bytes((folder / "less" / said["shard"]).read_bytes())
    for path in (folder / "from").iterdir():
        path.unlink()
    (folder / "from").rmdir()
    (folder / "hidden").rename(folder / "from")
    forged = json.dumps({**said, "kind": "shard", "shard": shard["shard"]}).replace(', "was_there": false', "")
    (folder / "to" / NAME).write_text("\n".join([job, forged, *lines[1:], ""]))
    assert convert(folder).returncode == 0
    assert shards_in(folder) == whole

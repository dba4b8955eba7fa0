"""The note that one daemon of a server leaves for the next."""

from __future__ import annotations

import os

from loaderd.daemon.shard_note import ShardNote


def test_what_a_daemon_wrote_in_part_when_it_died_is_not_there():
    fd = os.memfd_create("note")
    first, second = ["file:///a\n", "file:///b\udcff"], ["s3://c/d"]
    ShardNote(os.dup(fd)).add("train", [first, None])
    os.write(fd, b'["valid", [["s3://c')
    note = ShardNote(os.dup(fd))
    assert note.shards == {"train": [first, None]}
    note.add("valid", [second])
    assert ShardNote(fd).shards == {"train": [first, None], "valid": [second]}

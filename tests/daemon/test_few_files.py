"""A server's daemon that can open no more files, while consumers come."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.served import ServedDaemon, serve
from tests.helpers.serving import wait_until

Write = Callable[..., list[Path]]

MODULE = """
import loaderd

features = {"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}
schema = loaderd.Schema(features, {"id": loaderd.Array("id")})
train = loaderd.Dataset("%s/shards/*.tfrecord", schema)
"""


def limit(daemon: ServedDaemon, files: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (files or most, most))


def test_who_cannot_be_accepted_holds_nobody_up_and_is_accepted_later(
    write_numbered: Write, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    write_numbered([100])
    said = ""

    def num_said() -> int:
        nonlocal said
        said += capfd.readouterr().err
        return said.count("cannot accept a consumer: Too many open files. A process may have 3 files open here")

    with serve(tmp_path, "few_files", MODULE % tmp_path, "train") as daemon:
        for times in (1, 2):
            limit(daemon, 3)
            consumer = daemon.connect()
            wait_until(lambda times=times: num_said() == times)
            began_s = time.monotonic()
            for _ in range(30):
                daemon.report()
            assert time.monotonic() - began_s < 3, "each answer waits for 0.1 s"
            time.sleep(2.5)  # it is tried again
            assert num_said() == times
            limit(daemon, 0)
            consumer.hello()
            consumer.close()
        limit(daemon, 3)
        daemon.connect().close()
        wait_until(lambda: num_said() == 3)

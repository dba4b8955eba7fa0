"""Storage that takes a connection and never answers: who waits is told so, and nothing outlives the training."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import loaderd
from loaderd.errors import NoShardsError, StorageError
from tests.reliability.processes import MARK, marked, wait_for_none

SCHEMA = loaderd.Schema({"id": loaderd.Int64()}, {"id": loaderd.Array("id")})


@pytest.fixture
def silent() -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens, and the URI of a shard that is behind it."""
    with socket.create_server(("127.0.0.1", 0), backlog=20) as listener:
        port = listener.getsockname()[1]
        yield listener, f"gs://anonymous@bucket/a.tfrecord?endpoint_override=127.0.0.1:{port}&scheme=http"


@pytest.mark.slow
def test_what_is_waited_for_is_said_and_given_up(silent: tuple[socket.socket, str], caplog: pytest.LogCaptureFixture):
    listener, uri = silent
    with caplog.at_level(logging.WARNING, "loaderd"), pytest.raises(StorageError) as caught:
        loaderd.Loader(uri, SCHEMA, batch_size=10, storage=loaderd.Storage(retry_s=1))
    assert caplog.messages[0].startswith(
        f"{uri} is being listed, and the storage has not answered for 5 s. "
        f"Asked was 127.0.0.1:{listener.getsockname()[1]}, with no credentials"
    )
    assert caught.value.message.startswith(f"{uri}: the storage does not answer (tried for 31 s)")
    assert "Check that this machine reaches it" in caught.value.hint and "retry_s" in caught.value.hint


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_training_that_waits_for_it(
    silent: tuple[socket.socket, str], tmp_path: Path, sign: signal.Signals
):
    """Nor holds its standard output open: ``python train.py | cat`` returns."""
    listener, uri = silent
    script, mark = tmp_path / "train.py", uuid4().hex
    script.write_text(
        textwrap.dedent(f"""
            import signal, loaderd
            signal.signal(signal.SIGINT, signal.default_int_handler)
            schema = loaderd.Schema({{"id": loaderd.Int64()}}, {{"id": loaderd.Array("id")}})
            loaderd.Loader({uri!r}, schema, batch_size=10)
        """)
    )
    read_end, write_end = os.pipe()
    environment = {**os.environ, MARK: mark}
    training = subprocess.Popen([sys.executable, str(script)], stdout=write_end, stderr=write_end, env=environment)
    os.close(write_end)
    try:
        listener.settimeout(60)
        connection, _ = listener.accept()  # a worker has called
        with connection:
            assert len(marked(mark)) >= 4
            training.send_signal(sign)
            # It takes 0.3 s, on a machine that does nothing else; the storage is given 60 s and more.
            until_s = time.monotonic() + 45
            assert training.wait(45) == -sign
            text = b""
            while select.select([read_end], [], [], max(0.0, until_s - time.monotonic()))[0]:
                if not (part := os.read(read_end, 1 << 16)):
                    break
                text += part
            assert text.endswith(b"KeyboardInterrupt\n") == (sign == signal.SIGINT)
            assert wait_for_none(mark, training.pid, until_s) == []
            assert time.monotonic() < until_s, "something holds its standard output open"
    finally:
        training.kill()
        training.wait()
        os.close(read_end)


def test_a_set_that_hangs_does_not_keep_an_error_of_another_one(silent: tuple[socket.socket, str]):
    """Of a mix, each set is listed by itself; what is wrong with one is said at once."""
    _, uri = silent
    sets = [loaderd.Dataset(shards, SCHEMA) for shards in ("/nowhere/*.tfrecord", uri)]
    with pytest.raises(NoShardsError, match="/nowhere/"):
        loaderd.Loader(loaderd.Concat(sets), batch_size=10, workers=2)

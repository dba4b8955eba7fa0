"""A worker and what it is told, in an order that only a busy machine brings about."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from pyarrow.fs import FileSystemHandler, LocalFileSystem, PyFileSystem

import loaderd
from loaderd.daemon.delivery.opened_stream import OpenedStream
from loaderd.daemon.indexing.local_data import LocalData
from loaderd.dataset import StreamDescription
from loaderd.errors import LoaderdError
from loaderd.formats.index_cache import IndexCache
from loaderd.formats.shard_index import build_index
from loaderd.ipc.channel import Channel, ChannelClosed, WorkerChannel
from loaderd.ipc.messages import Message
from loaderd.ipc.worker_messages import (
    ATTACH_TASK,
    CheckTask,
    Detach,
    Ended,
    IndexTask,
    ListTask,
    LoadTask,
    Seat,
    TaskProgress,
    WorkerNotice,
)
from loaderd.options import DEFAULT_STORAGE, MAX_STEP, Storage, StreamOptions
from loaderd.plan.epoch import Slice, WindowOrder
from loaderd.shm.page import Counter, new_bell
from loaderd.storage.access import Access
from loaderd.storage.files import list_shards
from loaderd.worker import worker
from loaderd.worker.worker import Worker


class Daemon:
    """What speaks with one worker, which runs in a thread of this process."""

    def __init__(self, path: Path | str, schema: loaderd.Schema, storage: Storage = DEFAULT_STORAGE) -> None:
        mine, its = socket.socketpair()
        self.channel = WorkerChannel(mine)
        self._heard: deque[Message] = deque()
        self._bell = new_bell()
        self._worker = threading.Thread(target=self._work, args=(WorkerChannel(its),))
        self._worker.start()
        self.failed: BaseException | None = None
        dataset, options = loaderd.Dataset(path, schema), StreamOptions(10, workers=1, storage=storage)
        access = Access(storage)
        files = list_shards(dataset.shards, access=access)
        indexes = {file: build_index(file, 50, access=access) for file in files}
        self.data = LocalData(dataset, options, [files], {None: indexes})
        self._description = StreamDescription(dataset, options)
        self._streams: list[OpenedStream] = []
        self.channel.send(Seat(0), (self._bell,))
        assert self.hear() == Ended(ATTACH_TASK)
        self.opened = self.attach()

    def attach(self) -> OpenedStream:
        """One more stream of the same data."""
        pickled = cloudpickle.dumps(self._description)
        manager: Any = SimpleNamespace(pool=SimpleNamespace(numbers=[]))
        number = len(self._streams)
        opened = OpenedStream(number, self._description, pickled, self.data, manager, 0, lambda *_: None)
        self._streams.append(opened)
        self.channel.send(*opened.attach_message(0))
        assert self.hear() == Ended(ATTACH_TASK, None, number)
        return opened

    def _work(self, channel: Channel) -> None:
        try:
            Worker(channel).run()
        except ChannelClosed:
            pass
        except BaseException as error:
            self.failed = error
        channel.close()

    def hear(self) -> Message:
        """The next message, but for those that only say that it lives."""
        while not self._heard:
            self._heard.extend(one for one in self.channel.receive() if not isinstance(one, TaskProgress))
        return self._heard.popleft()

    def close(self) -> None:
        self.channel.close()
        self._worker.join()
        for opened in self._streams:
            opened.stream_memory.close()
        os.close(self._bell)


@pytest.fixture
def daemon(write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema) -> Iterator[Daemon]:
    daemon = Daemon(*write_numbered([100]), numbered_schema)
    yield daemon
    daemon.close()
    assert daemon.failed is None


FULL = """
import os, resource, socket, sys
from loaderd.worker.worker import main

sock = socket.socket(fileno=int(sys.argv[1]))
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
next_fd = os.dup(0)
os.close(next_fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd, most))
main(sock)
"""


def test_a_worker_that_may_open_too_few_files_says_so_and_ends():
    ours, theirs = socket.socketpair()
    with contextlib.closing(WorkerChannel(ours)) as channel, theirs:
        worker = subprocess.Popen(
            [sys.executable, "-c", FULL, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
        theirs.close()
        channel.send(Seat(0), (0,))
        said: list[Message] = []
        with pytest.raises(ChannelClosed):
            while True:
                said += channel.receive()
        _, stderr = worker.communicate(timeout=60)
    assert (worker.returncode, stderr) == (1, b"")
    _, why = said
    assert isinstance(why, WorkerNotice)
    assert why.text.startswith("a worker cannot take shared memory over: Too many open files. A process may have ")


def test_a_stream_ends_while_a_worker_waits_for_news_of_it(daemon: Daemon):
    part = Slice(0, 0, 50, 0, 0)
    load = LoadTask(0, 0, 0, MAX_STEP, WindowOrder(1, 50, 0, 50), (part,), (*daemon.data.places([part], 0),), 7)
    daemon.opened.page.start_at(0, 0, 0)
    daemon.opened.page.add_news(0)  # so the worker, which has a load that is not due, waits for a Granted
    daemon.channel.send(load)
    time.sleep(0.1)
    daemon.channel.send(Detach(0))
    failed = daemon.hear()
    assert isinstance(failed, Ended) and isinstance(failed.result, LoaderdError) and failed.task == 7
    daemon.channel.send(ListTask([[file.uri for file in daemon.data.files]], pickle.dumps(DEFAULT_STORAGE), 8))
    assert daemon.hear() == Ended(8, [daemon.data.files]), "it goes on"


class _Handler(FileSystemHandler):  # type: ignore[misc]
    """A user's own: two of them are never equal."""


for _name in _Handler.__abstractmethods__:
    setattr(_Handler, _name, lambda *_: "")
_Handler.__abstractmethods__ = frozenset()


def test_storage_is_accessed_in_one_way_by_all_tasks_and_streams(
    write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema, monkeypatch: pytest.MonkeyPatch
):
    """Also where what its bytes are made into is not equal to what they were made into before."""
    storage = Storage(filesystem=PyFileSystem(_Handler()))
    pickled = cloudpickle.dumps(storage)
    assert pickle.loads(pickled) != pickle.loads(pickled)
    made: list[Storage] = []

    class Watched(Access):
        def __init__(self, storage: Storage, *of: Any) -> None:
            made.append(storage)
            super().__init__(storage, *of)

    monkeypatch.setattr(worker, "Access", Watched)
    daemon = Daemon(*write_numbered([100]), numbered_schema, storage)
    others = [pickle.dumps(Storage(retry_s=5), protocol) for protocol in (2, 4)]
    for number, one in enumerate([pickled, pickled, *others], 8):
        daemon.channel.send(ListTask([[file.uri for file in daemon.data.files]], one, number))
        assert daemon.hear() == Ended(number, [daemon.data.files])
    daemon.close()
    assert daemon.failed is None
    assert [each.filesystem is None for each in made] == [False, True]


def test_what_is_asked_of_storage_is_counted_for_who_asked(
    write_numbered: Callable[..., list[Path]], numbered_schema: loaderd.Schema
):
    """Streams and index passes share how storage is accessed, and each has counts of its own."""
    storage = Storage(filesystem=LocalFileSystem())
    (path,) = write_numbered([100])
    with contextlib.closing(Daemon(f"files://{path}", numbered_schema, storage)) as daemon:
        pages = daemon.opened.page, daemon.attach().page
        part = Slice(0, 0, 50, 0, 0)
        (place,) = daemon.data.places([part], 0)
        one = place.block.num_bytes

        def counted(task: Message) -> list[int]:
            """The bytes on both pages, when ``task`` is done."""
            daemon.channel.send(task)
            answer = daemon.hear()
            assert isinstance(answer, Ended) and not isinstance(answer.result, LoaderdError), answer
            return [page.total(Counter.STORAGE_BYTES) for page in pages]

        def load(number: int, stream: int) -> LoadTask:
            return LoadTask(stream, 0, 0, MAX_STEP, WindowOrder(1, 50, 0, 50), (part,), (place,), number)

        assert counted(CheckTask(1, 0, 50, place, False, 7)) == [0, 0], "it is counted with the next load"
        assert counted(load(8, 0)) == [one, 0], "not what was read for the other stream"
        assert [page.total(Counter.LOADS) for page in pages] == [1, 0]
        assert [page.total(Counter.LOAD_NS) > 0 for page in pages] == [True, False]
        file = daemon.data.files[0]
        daemon.channel.send(IndexTask((file,), IndexCache("none", 50), pickle.dumps(storage), task=9))
        indexed = daemon.hear()
        assert isinstance(indexed, Ended) and indexed.result.asked[1] == file.size_bytes
        mine, its = counted(load(10, 1))
        assert mine == one and its > one
    assert daemon.failed is None

"""Channels over real sockets: how messages are cut, what comes along, how they end."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.errors import DaemonError, WorkerError
from loaderd.ipc.channel import Channel, ChannelClosed, WorkerChannel
from loaderd.ipc.messages import AskState, Bye, Message, Notice, Open, Opened, PageSize, ShardsFound, encode
from loaderd.ipc.worker_messages import Ended
from loaderd.options import MAX_WORKERS

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, two = (Channel(end) for end in socket.socketpair())
    yield one, two
    one.close()
    two.close()


def receive(channel: Channel, count: int) -> list[Message]:
    """The next ``count`` messages."""
    found: list[Message] = []
    while len(found) < count:
        found += channel.receive()
    assert len(found) == count
    return found


MESSAGES = [
    Bye("3"),
    Open(bytes(range(256)), None),
    Notice("ü" * 40, 2),
    ShardsFound([["/a\udcff", "/b"], None]),
]
STREAM = b"".join(map(encode, MESSAGES))


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_messages_may_be_cut_and_glued(cuts: list[int]):
    one, two = (Channel(end) for end in socket.socketpair())
    bounds = [0, *sorted(cuts), len(STREAM)]
    found: list[Message] = []
    for start, stop in pairwise(bounds):
        if start < stop:
            one.socket.sendall(STREAM[start:stop])
            found += two.receive()
    assert found == MESSAGES
    one.close()
    two.close()


def test_large_messages(pair: Pair):
    one, two = pair
    large = [Open(os.urandom(10 << 20), None), Bye("1"), Open(os.urandom(3 << 20), None)]
    sender = threading.Thread(target=lambda: [one.send(message) for message in large])
    sender.start()
    assert receive(two, 3) == large
    sender.join()


def test_a_descriptor_is_taken_while_the_channel_is_closed(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """By another thread: it is closed, or taken, and not both; and then there is none."""
    one, two = pair
    ends = [os.memfd_create("end") for _ in range(4)]
    one.send(Bye("1"), tuple(ends))
    assert receive(two, 1) == [Bye("1")]
    close, taken = os.close, list[int]()

    def close_slowly(fd: int) -> None:
        close(fd)
        if not taken:
            taken.append(two.take_fd())

    monkeypatch.setattr(os, "close", close_slowly)
    two.close()
    monkeypatch.undo()
    assert os.readlink(f"/proc/self/fd/{taken[0]}").startswith("/memfd:end")
    with pytest.raises(ChannelClosed):
        two.take_fd()
    for fd in (*ends, *taken):
        os.close(fd)


def test_the_bells_of_as_many_workers_as_there_may_be_come_in_one_message(pair: Pair):
    one, two = pair
    one.post(Opened({}, PageSize(10, MAX_WORKERS, 2, 0)), (0,) * (5 + MAX_WORKERS))
    receive(two, 1)
    for _ in range(5 + MAX_WORKERS):
        os.close(two.take_fd())
    with pytest.raises(ChannelClosed):
        one.post(Opened({}, PageSize(10, MAX_WORKERS + 1, 2, 0)), (0,) * (6 + MAX_WORKERS))


def test_file_descriptors_come_along_in_order(pair: Pair):
    one, two = pair
    stream_memory = [os.memfd_create(f"m{i}") for i in range(5)]
    for number, memory in enumerate(stream_memory):
        os.write(memory, b"memory %d" % number)
    # The second message is larger than one read.
    sender = threading.Thread(
        target=lambda: [
            one.send(Bye("0"), tuple(stream_memory[:2])),
            one.send(Open(bytes(1 << 20), None), tuple(stream_memory[2:4])),
            one.send(Bye("1")),
            one.send(Bye("2"), tuple(stream_memory[4:])),
        ]
    )
    sender.start()
    found = receive(two, 4)
    sender.join()
    assert [message for message in found if isinstance(message, Bye)] == [
        Bye("0"),
        Bye("1"),
        Bye("2"),
    ]
    for number, memory in enumerate(stream_memory):
        os.close(memory)
        taken = two.take_fd()
        assert os.pread(taken, 100, 0) == b"memory %d" % number
        assert not os.get_inheritable(taken)
        os.close(taken)
    with pytest.raises(ChannelClosed):
        two.take_fd()


def test_close_closes_descriptors_that_nobody_took():
    before = os.listdir("/proc/self/fd")
    one, two = (Channel(end) for end in socket.socketpair())
    memory = os.memfd_create("m")
    one.send(Bye("0"), (memory, memory))
    os.close(memory)
    receive(two, 1)
    two.close()
    one.close()
    assert os.listdir("/proc/self/fd") == before


def test_what_was_sent_before_the_end_is_received(pair: Pair):
    one, two = pair
    one.send(Bye("1"))
    one.close()
    assert two.receive() == [Bye("1")]
    for _ in range(2):
        with pytest.raises(ChannelClosed, match="closed"):
            two.receive()
    with pytest.raises(ChannelClosed):
        two.send(Bye("2"))


def test_close_wakes_whoever_waits(pair: Pair):
    one, two = pair
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            two.receive()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.close()
    assert ended.wait(30)
    waiting.join()


def test_small_messages_of_several_threads_are_not_mixed(pair: Pair):
    one, two = pair
    num_threads, num_messages = 8, 400
    together = threading.Barrier(num_threads)

    def send(thread: int) -> None:
        together.wait()
        for number in range(num_messages):
            one.send(Notice(f"{thread} {'x' * (number % 1000)}", number))

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    found = receive(two, num_threads * num_messages)
    for thread in threads:
        thread.join()
    for thread in range(num_threads):
        expected = [Notice(f"{thread} {'x' * (number % 1000)}", number) for number in range(num_messages)]
        assert [m for m in found if isinstance(m, Notice) and m.text.startswith(f"{thread} ")] == expected


def test_a_fork_has_no_part_in_a_channel(pair: Pair):
    one, two = pair
    two.send(Bye("1"))
    child = os.fork()
    if child == 0:  # no assertion here: a failure must not run the rest of the tests in the child
        refused = 0
        for use in (lambda: one.send(Bye("666")), one.receive):
            try:
                use()
            except ChannelClosed:
                refused += 1
        one.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert one.receive() == [Bye("1")]
    one.send(Bye("2"))
    assert two.receive() == [Bye("2")]


def test_a_descriptor_that_this_process_may_not_have_is_an_error(pair: Pair):
    """The kernel drops it, and says so: not to be taken for a message that came without one."""
    one, two = pair
    one.send(Bye("1"), (one.fileno(),))
    lowest = os.dup(one.fileno())
    os.close(lowest)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(DaemonError, match=f"Too many open files\nA process may have {lowest} files open here"):
            two.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_descriptors_that_wait_to_be_sent_may_be_closed_by_who_posted_them():
    here, there = (Channel(end) for end in socket.socketpair(socket.AF_UNIX))
    while not here.has_posted:
        here.post(AskState())
    before = len(os.listdir("/proc/self/fd"))
    for text in (b"first", b"second"):
        fd = os.memfd_create("posted")
        os.write(fd, text)
        here.post(AskState(), (fd,))
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    while here.has_posted:
        there.receive()
        here.flush()
    found = []
    while len(found) < 2:
        there.receive()
        with contextlib.suppress(ChannelClosed):
            found.append(there.take_fd())
            found.append(there.take_fd())
    assert [os.pread(fd, 9, 0) for fd in found] == [b"first", b"second"]
    for fd in found:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    here.close()
    there.close()


class Unreadable:
    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


def test_a_message_to_a_worker_that_is_no_pickle_is_named():
    one, two = (WorkerChannel(end) for end in socket.socketpair())
    with contextlib.closing(one), contextlib.closing(two):
        with pytest.raises(WorkerError, match=r"^Ended, a message .* cannot be pickled or read: .*lambda"):
            one.send(Ended(1, lambda: None))
        one.send(Ended(1, Unreadable()))
        with pytest.raises(WorkerError, match=r"^Ended, a message .* ValueError: invalid literal"):
            two.receive()
        one.send(Ended(1, 5))
        assert two.receive() == [Ended(1, 5)]

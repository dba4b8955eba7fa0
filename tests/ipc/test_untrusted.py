"""What a server takes from a consumer: its messages, of the right types, and nothing else."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loaderd.ipc.channel import Channel
from loaderd.ipc.messages import (
    CLASS_OF,
    AskState,
    AskStatus,
    Bye,
    Hello,
    ListData,
    Message,
    Open,
    StartPass,
    State,
    Subscribe,
    encode,
)
from loaderd.ipc.subscription import Subscription
from loaderd.ipc.untrusted import (
    CONSUMER_MESSAGES,
    MAX_MESSAGE_BYTES,
    MalformedMessage,
    UntrustedChannel,
    decode_strict,
)
from loaderd.plan.passes import Pass
from loaderd.plan.positions import Position

NUMBER_OF = {cls: number for number, cls in CLASS_OF.items()}
LISTING = [["a.tfrecord", "z\udcff.tfrecord", 3, "0" * 16], None]
PASS = [0, 1, [], None]
OPTIONS = Subscription(64, epochs=None, sharing="split", shard=(1, 3), name="trainer ü").to_wire()
VALID = [
    Hello(1, "1.0", "train"),
    Subscribe(OPTIONS, None),
    Subscribe(OPTIONS, Position(3, 7, past=((4, 5), (6, 7)), listing=((*LISTING[0],), None)).to_json()),
    ListData(None),
    ListData(LISTING),
    StartPass(2, Pass(3, None, ((4, 5), (6, 7)), ((*LISTING[0],), None)), 4),
    StartPass(2**40, [0, 1, [], None], -1),
    AskState(),
    AskStatus(),
    Bye(""),
]


def packed(cls: type, *values: Any) -> bytes:
    return msgpack.packb([NUMBER_OF[cls], *values], unicode_errors="surrogatepass")


def as_sent(message: Message) -> list[Any]:
    """Its fields, tuples as lists."""
    return msgpack.unpackb(encode(message), unicode_errors="surrogatepass")[1:]


# ------------------------------------------------------------------------------------------ one message


@pytest.mark.parametrize("message", VALID, ids=lambda message: type(message).__name__)
def test_what_consumers_send_is_taken(message: Message):
    found = decode_strict(encode(message))
    assert type(found) is type(message) and as_sent(found) == as_sent(message)


def test_all_that_consumers_send_is_tried_here():
    assert {type(message) for message in VALID} == set(CONSUMER_MESSAGES)


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


WRONG = [
    (packed(ListData), "ListData must have 1 fields, got 0"),
    (packed(ListData, None, 2), "ListData must have 1 fields, got 2"),
    (packed(StartPass, 1, [0, 1, [], None]), "StartPass must have 3 fields, got 2"),
    (packed(StartPass, True, PASS, 0), "StartPass.generation must be a valid int, got bool"),
    (packed(StartPass, 1.0, PASS, 0), "StartPass.generation must be a valid int, got float"),
    (packed(StartPass, "1", PASS, 0), "StartPass.generation must be a valid int, got str"),
    (packed(StartPass, None, PASS, 0), "StartPass.generation must be a valid int, got NoneType"),
    (packed(StartPass, 2**63, PASS, 0), "StartPass.generation must be a valid int, got int"),
    (packed(Hello, 1, "1.0\nERROR", "train"), "Hello.version must be a valid str, got str"),
    (packed(Hello, 1, "1.0", "tr\udcffain"), "Hello.dataset must be a valid str, got str"),
    (packed(Hello, 1, "1.0", b"train"), "exceeds max_bin_len"),
    (packed(Subscribe, [], None), "Subscribe.options must be a valid dict.str, Any., got list"),
    (packed(Subscribe, {"batch_size": 0.5}, None), "Subscribe.options must be a valid dict"),
    (packed(Subscribe, {"a": nested(5)}, None), "Subscribe.options must be a valid dict"),
    (packed(Subscribe, {"a": {"b": 2**64 - 1}}, None), "Subscribe.options must be a valid dict"),
    (packed(Subscribe, {}, 5), "Subscribe.start must be a valid str | None, got int"),
    (packed(Subscribe, {1: 2}, None), "int is not allowed for map key"),
    (packed(Subscribe, {str(key): 0 for key in range(65)}, None), "exceeds max_map_len"),
    (packed(Subscribe, {}, "x" * 300_000), "exceeds max_str_len"),
    (packed(StartPass, 0, [nested(6)], 0), "StartPass.which must be a valid Pass, got list"),
    (packed(StartPass, 0, [0, 1, []], 0), "StartPass.which must be a valid Pass, got list"),
    (packed(StartPass, 0, [0, 1, [[True]], None], 0), "StartPass.which must be a valid Pass, got list"),
    (packed(StartPass, 0, [0, 1, [], [["a", "b", 1]]], 0), "StartPass.which must be a valid Pass, got list"),
    (packed(StartPass, 0, [0, 1, [], [["a", "b", 1, b"c"]]], 0), "exceeds max_bin_len"),
    (packed(ListData, [5]), "ListData.listing must be a valid .*, got list"),
    (packed(StartPass, 0, [[] for _ in range(5000)], 0), "at most 4,096 lists and dicts"),
    (packed(StartPass, 1, PASS, 0, [0] * 20_000), "exceeds max_array_len"),
    (packed(Open, 1, 2), "Open must not come here"),
    (packed(State, "text"), "State must not come here"),
    (msgpack.packb([len(NUMBER_OF)]), "a message of unknown number must not come here"),
    (msgpack.packb([-1]), "a message of unknown number must not come here"),
    (msgpack.packb([True, 1]), "a message of unknown number must not come here"),
    (msgpack.packb([[1], 1]), "a message of unknown number must not come here"),
    (msgpack.packb([]), "must be an array"),
    (msgpack.packb({}), "must be an array"),
    (msgpack.packb(7), "must be an array"),
    (msgpack.packb([msgpack.ExtType(1, b"x")]), "exceeds max_ext_len"),
    (msgpack.packb([msgpack.Timestamp(0)]), "exceeds max_ext_len"),
    (encode(AskState()) + b"\0", "ExtraData"),
    (encode(Bye("5"))[:-1], "ValueError"),
    (b"", "ValueError"),
    (b"\xc1", "FormatError"),
    (b"\x91" * 3000, "StackError"),
    (b"\x93\xa1\xff", "UnicodeDecodeError"),
    (bytes(MAX_MESSAGE_BYTES + 1), "at most 1,048,576 bytes, got 1,048,577"),
]


@pytest.mark.parametrize(("data", "why"), [pytest.param(*wrong, id=wrong[1][:40]) for wrong in WRONG])
def test_anything_else_is_refused_in_few_words(data: bytes, why: str):
    with pytest.raises(MalformedMessage, match=why) as refused:
        decode_strict(data)
    assert len(str(refused.value)) < 300


@given(data=st.binary(max_size=200))
@example(struct.pack(">BI", 0xDD, 2**32 - 1) * 1000)
@example(struct.pack(">BI", 0xDF, 2**32 - 1) * 1000)
@example(struct.pack(">BI", 0xDB, 2**32 - 1))
def test_no_bytes_are_more_than_refused(data: bytes):
    try:
        assert type(decode_strict(data)) in CONSUMER_MESSAGES
    except MalformedMessage as error:
        assert len(str(error)) < 300


@given(message=st.sampled_from(VALID), changes=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255))))
def test_a_changed_message_is_another_one_or_refused(message: Message, changes: list[tuple[int, int]]):
    data = bytearray(encode(message))
    for place, value in changes:
        data[place % len(data)] = value
    try:
        found = decode_strict(bytes(data))
    except MalformedMessage:
        return
    assert type(found) in CONSUMER_MESSAGES and decode_strict(encode(found)) == found


# ------------------------------------------------------------------------------------------- the channel

Ends = tuple[socket.socket, UntrustedChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = socket.socketpair()
    channel = UntrustedChannel(two)
    yield one, channel
    one.close()
    channel.close()


def test_messages_may_be_cut_at_any_byte(ends: Ends):
    consumer, channel = ends
    stream = b"".join(map(encode, VALID))
    assert len(stream) < 1000  # it comes at once
    for cut in range(1, len(stream)):
        consumer.sendall(stream[:cut])
        found = channel.receive()
        num_bytes = sum(len(encode(message)) for message in VALID[: len(found)])
        assert num_bytes <= cut and (channel.unfinished_since is None) == (num_bytes == cut)
        consumer.sendall(stream[cut:])
        found += channel.receive()
        assert [as_sent(message) for message in found] == [as_sent(message) for message in VALID]
        assert channel.unfinished_since is None


def test_since_when_a_message_is_unfinished(ends: Ends):
    """Since it began, not since the last byte of it: who sends one at a time is slow all the same."""
    consumer, channel = ends
    assert channel.unfinished_since is None
    message = StartPass(1, Pass(0, 1), 1000)
    data = encode(message)
    began = []
    for byte in data[:-1]:
        consumer.sendall(bytes([byte]))
        before = time.monotonic()
        assert channel.receive() == []
        assert channel.unfinished_since is not None
        began.append(channel.unfinished_since)
    assert set(began) == {began[0]} and began[0] < before
    # The end of it, and the beginning of another one.
    consumer.sendall(data[-1:] + data[:2])
    between = time.monotonic()
    assert channel.receive() == [message]
    assert channel.unfinished_since is not None and channel.unfinished_since >= between
    consumer.sendall(data[2:])
    assert channel.receive() == [message]
    assert channel.unfinished_since is None


def test_descriptors_are_refused_and_closed(ends: Ends):
    consumer, channel = ends
    stream_memory = [os.memfd_create("m") for _ in range(3)]
    before = os.listdir("/proc/self/fd")
    socket.send_fds(consumer, [encode(AskState())], stream_memory)
    with pytest.raises(MalformedMessage, match="file descriptors"):
        channel.receive()
    assert os.listdir("/proc/self/fd") == before
    for memory in stream_memory:
        os.close(memory)


def peak_memory() -> int:
    """Of this process, in KiB."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x91" * 2000, "StackError"),
        (encode(AskState()) + b"\xc1", "FormatError"),
        (struct.pack(">BI", 0xDB, 2**32 - 1) + bytes(2 * MAX_MESSAGE_BYTES), "at most 1,048,576 bytes"),
        (struct.pack(">BI", 0xDD, 2**32 - 1) + b"\x80" * 2 * MAX_MESSAGE_BYTES, "at most 1,048,576 bytes"),
        (packed(StartPass, 1, [[]] * (MAX_MESSAGE_BYTES - 100)), "exceeds max_array_len"),
        (packed(StartPass, 0, [[[]] * 16_000] * 64, 0), "at most 4,096 lists and dicts"),
        ((struct.pack(">BI", 0xDD, 2**20) * 1000 + bytes(MAX_MESSAGE_BYTES)), "at most 1,048,576 bytes"),
    ],
    ids=["deep", "garbage behind a message", "long text", "long array", "full array", "many lists", "deep and long"],
)
def test_what_is_malformed_takes_no_memory(ends: Ends, data: bytes, why: str):
    consumer, channel = ends
    consumer.setblocking(False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
    before = peak_memory()
    rest = memoryview(data)
    with pytest.raises(MalformedMessage, match=why):
        while True:
            if rest:
                rest = rest[consumer.send(rest[: 1 << 10]) :]
            channel.receive()
    assert peak_memory() - before < 8 << 10


def test_bytes_that_nobody_reads_are_counted():
    one, two = socket.socketpair()
    channel, consumer = UntrustedChannel(one), Channel(two)
    message = State("x" * 10_000)
    sent = 0
    while not channel.has_posted:
        channel.post(message)
        sent += 1
    in_kernel = sent * len(encode(message)) - channel.posted_bytes
    assert 0 < channel.posted_bytes <= len(encode(message))
    for _ in range(10):
        channel.post(message)
    assert channel.posted_bytes == (sent + 10) * len(encode(message)) - in_kernel
    found = 0
    while found < sent + 10:
        found += len(consumer.receive())
        channel.flush()
    assert channel.posted_bytes == 0 and not channel.has_posted
    channel.close()
    consumer.close()

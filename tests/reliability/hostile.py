"""What no consumer would send to a server: bytes, messages, options and positions, drawn from a ``Random``.

Each maker is called with one and gives bytes; ``WRONG`` holds those that a server must always refuse, ``STRANGE``
those of which some happen to be right, or to be the beginning of something right.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from random import Random
from typing import Any, get_args

import msgpack

from loaderd.ipc.messages import (
    PROTOCOL,
    AskState,
    AskStatus,
    Hello,
    ListData,
    Message,
    Open,
    Serve,
    StartPass,
    Stop,
    Subscribe,
    encode,
)
from loaderd.ipc.subscription import Subscription
from loaderd.plan.passes import Pass
from loaderd.plan.positions import Position
from loaderd.version import VERSION

Maker = Callable[[Random], bytes]

NUMBERS = [0, 1, 2, 3, 7, 50, 100, 20_000, 20_001, 2**31, 2**40, 2**62, 2**63 - 1, -1, -(2**31), -(2**63)]
_NUMBER_OF = {cls: number for number, cls in enumerate(get_args(Message))}
_TEXTS = ["", "train", "../../etc/passwd", "\0", "\x1b[2J", "x" * 300, "ü\u202e", "\udcff", "{}", "null"]
OPTIONS = Subscription(100).to_wire()
VALID = [
    Hello(PROTOCOL, VERSION, "train"),
    Subscribe(OPTIONS, None),
    Subscribe(OPTIONS, Position(1, 2, past=((400, 400),)).to_json()),
    ListData([["a", "b", 3, "c"], None]),
    StartPass(1, Pass(0, 1, ((100, 100),)), 4),
    AskState(),
    AskStatus(),
]


def number(rng: Random) -> int:
    return rng.choice(NUMBERS) if rng.random() < 0.7 else rng.randint(0, 300)


def value(rng: Random, depth: int = 3) -> Any:
    """Anything that JSON can hold, and msgpack."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 2:
        return number(rng)
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 7:
        return {rng.choice(_TEXTS[:-3]): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    if kind == 8:
        return [[number(rng) for _ in range(rng.choice([1, 2, 300]))] for _ in range(rng.randrange(1, 4))]
    return rng.choice([None, True, 0.5, float("nan"), rng.choice(_TEXTS)])


def options(rng: Random) -> dict[str, Any]:
    """Options of a stream, of which some are what they cannot be, or are larger than they can be."""
    found: dict[str, Any] = dict(OPTIONS)
    for _ in range(rng.choice([1, 1, 1, 3])):
        name = rng.choice([*OPTIONS, "batch_size", "held_batches", "shuffle", "__class__"])
        found[name] = rng.choice([number, value])(rng)
    if rng.random() < 0.3:
        found |= {"sharing": "split", "shard": [number(rng), number(rng)]}
    if rng.random() < 0.1:
        found |= {"sharing": "mirrored", "consumers": number(rng), "group": "hostile"}
    return found


def start(rng: Random) -> str:
    """A position as JSON, and what is none."""
    if rng.random() < 0.1:
        return rng.choice(["", "[" * 50_000, "1" * 5_000, '{"version": 1}', "null", "[]"])
    position = json.loads(Position(0, 1).to_json())
    for _ in range(rng.choice([1, 1, 1, 3])):
        position[rng.choice([*position, "more"])] = rng.choice([number, value])(rng)
    return json.dumps(position)


def which(rng: Random) -> Any:
    """The pass of a Start."""
    if rng.random() < 0.2:
        return value(rng)
    past = [[number(rng) for _ in range(rng.choice([1, 2, 3, 300]))] for _ in range(rng.choice([0, 0, 1, 2, 20]))]
    return [number(rng), rng.choice([None, number(rng)]), past, rng.choice([None, None, value(rng)])]


def packed(cls: type[Message], *fields: Any) -> bytes:
    data: bytes = msgpack.packb([_NUMBER_OF[cls], *fields], unicode_errors="surrogatepass")
    return data


# --------------------------------------------------------------------------------------------- always wrong


def no_msgpack(rng: Random) -> bytes:
    return b"\xc1" + rng.randbytes(rng.randrange(100))


def no_message(rng: Random) -> bytes:
    return (
        packed(AskState)[1:] + b"\xc0"
        if rng.random() < 0.2
        else msgpack.packb(rng.choice([None, 7, "x", {}, [], [[1]]]))
    )


def unknown_number(rng: Random) -> bytes:
    data: bytes = msgpack.packb([rng.choice([-1, 200, 2**63, len(_NUMBER_OF), True, "Hello", None]), 1])
    return data


def of_others(rng: Random) -> bytes:
    """A message that consumers do not send; the first holds a pickle that would say if somebody opened it."""
    harmful = pickle.dumps(_Harm())
    return encode(rng.choice([Open(harmful, None), Serve({"targets": ["os:system"]}), Stop("now")]))


class _Harm:
    def __reduce__(self) -> Any:
        return __import__("os")._exit, (66,)


def another_type(rng: Random) -> bytes:
    """A field of another type, too many fields, or too few."""
    message = rng.choice([ListData, Hello, Subscribe])
    wrong = rng.choice([0.5, True, b"x", [[["x"]]], {"a": b"x"}, 2**64 - 1])
    count = {ListData: 1, Hello: 3, Subscribe: 2}[message]
    return packed(message, *[wrong] * rng.choice([count, count, count + 1, 0]))


def too_deep(rng: Random) -> bytes:
    return bytes([rng.choice([0x91, 0x81])]) * rng.randint(1100, 5000)


def too_many(rng: Random) -> bytes:
    """Of something, all of it there: in sum below a MiB."""
    return rng.choice(
        [
            packed(StartPass, 1, [], 0, [0] * 20_000),
            packed(StartPass, 0, [[[]] * 5_000], 0),
            packed(Hello, 1, "", "x" * 300_000),
        ]
    )


def too_large(rng: Random) -> bytes:
    """More than a MiB of what could still become a message."""
    return _declared(rng, 2**32 - 1) + bytes([rng.choice([0x00, 0x80, 0xA0])]) * (1100 << 10)


def protocol_of_others(rng: Random) -> bytes:
    return rng.choice(
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(40),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
            b"SSH-2.0-OpenSSH_9.6\r\n",
            pickle.dumps(_Harm()),
        ]
    )


def hello_of_others(rng: Random) -> bytes:
    """Of another protocol, or for what is not served."""
    data_set = rng.choice(["valid", "sets:train", "/etc/passwd", "os.system", "__init__", "x" * 300])
    later = Hello(PROTOCOL + 1 + abs(number(rng)), "9.9", "train")
    return encode(rng.choice([later, Hello(PROTOCOL, VERSION, data_set)]))


def wrong_state(rng: Random) -> bytes:
    """What may not come at first."""
    return encode(rng.choice([message for message in VALID if not isinstance(message, Hello)]))


WRONG: list[Maker] = [
    no_msgpack,
    no_message,
    unknown_number,
    of_others,
    another_type,
    too_deep,
    too_many,
    protocol_of_others,
    hello_of_others,
    wrong_state,
]

# ------------------------------------------------------------------------------------------ mostly wrong


def _declared(rng: Random, size: int) -> bytes:
    """The head of an array, a map, a text or bytes of that size."""
    return struct.pack(">BI", rng.choice([0xDD, 0xDF, 0xDB, 0xC6]), size)


def noise(rng: Random) -> bytes:
    return rng.randbytes(rng.randint(1, 300))


def declared(rng: Random) -> bytes:
    """Says that it is large, and does not come."""
    return b"".join(_declared(rng, rng.choice([2**32 - 1, 2**31, 2**20, 70_000])) for _ in range(rng.randint(1, 900)))


def mutated(rng: Random) -> bytes:
    """A right message, or a few, with some bytes changed, cut out, put in."""
    data = bytearray(b"".join(encode(rng.choice(VALID)) for _ in range(rng.randint(1, 4))))
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        size = rng.choice([1, 1, 2, 8])
        data[at : at + rng.choice([0, size])] = rng.randbytes(rng.choice([0, size]))
    return bytes(data)


def any_values(rng: Random) -> bytes:
    data: bytes = msgpack.packb(
        [rng.randrange(len(_NUMBER_OF)), *[value(rng) for _ in range(rng.randrange(5))]],
        unicode_errors="surrogatepass",
    )
    return data


STRANGE: list[Maker] = [noise, declared, mutated, any_values]


def subscribe(rng: Random) -> bytes:
    """With wild options, or from a wild position."""
    return packed(
        Subscribe,
        *rng.choice(
            [(options(rng), None), (OPTIONS, start(rng)), (options(rng), start(rng)), (value(rng), value(rng))]
        ),
    )


def in_a_stream(rng: Random) -> bytes:
    """For a consumer that has its stream; and a question, to which there is an answer if that was no wrong."""
    said = rng.choice(
        [
            packed(StartPass, number(rng), which(rng), number(rng)),
            packed(ListData, value(rng)),
            encode(Subscribe(OPTIONS, None)),
            encode(Hello(PROTOCOL, VERSION, "train")),
        ]
    )
    return said + encode(AskState())

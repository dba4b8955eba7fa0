"""Every message comes out of its bytes as it went in."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loaderd.errors import LoaderdError, WorkerError, to_wire
from loaderd.ipc import messages
from loaderd.ipc.messages import PROTOCOL, UNICODE_ERRORS, Message, decode, encode

CLASSES = [*messages.CLASS_OF.values()]

# Names of files and messages of exceptions may hold lone surrogates.
TEXTS = st.text(st.characters(), max_size=20)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
SCALARS = st.none() | st.booleans() | INTEGERS | st.floats(allow_nan=False) | TEXTS | st.binary(max_size=20)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """What a field of that type can hold."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return st.sampled_from(parts)
    if origin is tuple:
        each = st.lists(values_of(parts[0]), max_size=3) if parts[1:] == (...,) else st.tuples(*map(values_of, parts))
        return each.map(tuple)
    if hasattr(kind, "_fields"):
        return instances_of(kind)
    if origin is list:
        return st.lists(values_of(parts[0]), max_size=3)
    if get_origin(kind) is dict:
        return st.dictionaries(values_of(get_args(kind)[0]), values_of(get_args(kind)[1]), max_size=3)
    if get_origin(kind) is UnionType:
        return st.one_of(*map(values_of, get_args(kind)))
    if kind is LoaderdError:
        return st.builds(WorkerError, TEXTS, hint=TEXTS)
    plain = {bool: st.booleans(), int: INTEGERS, str: TEXTS, bytes: st.binary(max_size=20)}
    plain[float] = st.floats(allow_nan=False)
    return {Any: VALUES, type(None): st.none(), **plain}[kind]


def instances_of(cls: Any) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{name: values_of(kind) for name, kind in get_type_hints(cls).items()})


def unpack(data: bytes) -> list[Any]:
    return msgpack.unpackb(data, unicode_errors=UNICODE_ERRORS)


@pytest.mark.parametrize("cls", CLASSES)
@settings(max_examples=settings.default.max_examples // 10)
@given(data=st.data())
def test_a_message_survives_the_way(cls: type[Message], data: st.DataObject):
    message = data.draw(instances_of(cls))
    back = decode(unpack(encode(message)))
    assert type(back) is cls and plain(back) == plain(message) and types_of(back) == types_of(message)


def plain(value: object) -> object:
    """The same, with what errors say in place of the errors, which equal only themselves."""
    if isinstance(value, LoaderdError):
        return to_wire(value)
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def types_of(value: object) -> object:
    """Its type, and those of what is in it."""
    return (type(value), [types_of(each) for each in value]) if isinstance(value, (tuple, list)) else type(value)


def test_the_numbers_of_what_consumers_and_servers_say():
    """Those of other versions with the same PROTOCOL rely on them."""
    text = """
        Hello Failed Welcome Subscribe Bye AskStatus Status Serve Drain Stop Open
        Progress ListData DataListed Opened StartPass BatchFailed AskState State Notice RecordsSkipped
        StorageUnavailable ShardsFound UseServers
    """
    numbers = {name: number for number, name in enumerate(text.split())}
    assert (PROTOCOL, numbers) == (8, {cls.__name__: n for n, cls in messages.CLASS_OF.items()})


def test_messages_are_named_in_the_drawing():
    drawn = str(messages.__doc__).split()
    assert {cls.__name__ for cls in CLASSES} <= {word.strip(",()") for word in drawn}

"""From plain values, as msgpack has them, to the named tuples that messages and their fields are.

msgpack writes a named tuple as an array of its fields, and an error as ``errors.to_wire`` has it. Decoding follows
the annotations. Between a daemon and its own consumer nothing is checked. From strangers (``strict``), each field
must have exactly the type that the class names: integers have 64 bits, and ``Any`` is None, a bool, an integer, text,
or lists and dicts of these, at most five deep.
"""

from __future__ import annotations

from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from loaderd.errors import LoaderdError, from_wire

_MAX_DEPTH = 5


class Malformed(Exception):
    """A stranger sent values that make no message. The text is short, and holds nothing of what came."""


@cache
def _fields_of(cls: Any) -> list[tuple[str, Any]]:
    return list(get_type_hints(cls).items())


def message_of(cls: Any, values: list[Any], strict: bool = False) -> Any:
    """The message of class ``cls`` with these fields. Those with a default may be missing at the end.

    If ``strict``, raises Malformed for another number of fields, and for values of other types.
    """
    fields = _fields_of(cls)
    if strict and not len(fields) - len(cls._field_defaults) <= len(values) <= len(fields):
        raise Malformed(f"{cls.__name__} must have {len(fields)} fields, got {len(values)}")
    decoded = []
    for (name, kind), value in zip(fields, values, strict=False):
        try:
            decoded.append(_value_of(kind, value, strict))
        except Malformed:
            expected = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
            text = f"{cls.__name__}.{name} must be a valid {expected.replace('typing.', '')}"
            raise Malformed(f"{text}, got {type(value).__name__}") from None
    return cls(*decoded)


@cache
def _is_as_it_came(kind: Any) -> bool:
    """Whether msgpack's value of that kind needs no conversion."""
    if get_origin(kind) in (list, Union, UnionType):
        return all(map(_is_as_it_came, get_args(kind)))
    return not (kind is LoaderdError or get_origin(kind) is tuple or hasattr(kind, "_fields"))


def _value_of(kind: Any, value: Any, strict: bool, is_name: bool = False) -> Any:
    """A ``kind`` made of plain values. ``is_name``: text may be the name of a file, which may hold any character."""
    if not strict and _is_as_it_came(kind):
        return value
    origin, parts = get_origin(kind), get_args(kind)
    if kind is LoaderdError:
        return from_wire(value)
    if origin in (Union, UnionType):  # with None
        part = parts[parts[0] is NoneType]
        return None if value is None else _value_of(part, value, strict, is_name)
    if strict and (origin in (list, tuple) or hasattr(kind, "_fields")) and type(value) is not list:
        raise Malformed
    if origin is list or (origin is tuple and parts[1:] == (...,)):
        return origin(_value_of(parts[0], each, strict, is_name or origin is tuple) for each in value)
    if origin is tuple or hasattr(kind, "_fields"):
        kinds = parts or [kind for _, kind in _fields_of(kind)]
        if strict and len(value) != len(kinds):
            raise Malformed
        decoded = (_value_of(part, each, strict, is_name=True) for part, each in zip(kinds, value, strict=True))
        return tuple(decoded) if parts else kind(*decoded)
    if strict and not _is_right(kind, value, is_name):
        raise Malformed
    return value


def _is_right(kind: Any, value: Any, is_name: bool) -> bool:
    if kind is Any or kind == dict[str, Any]:
        return (kind is Any or type(value) is dict) and _is_plain(value, _MAX_DEPTH)
    if kind is int:
        return _is_integer(value)
    if kind is str:  # text that people read has no characters that move a cursor or that a log cannot take
        return type(value) is str and (is_name or value.isprintable())
    return type(value) is kind


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) is list:
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(type(key) is str and _is_plain(each, depth - 1) for key, each in value.items())
    return value is None or type(value) in (bool, str) or _is_integer(value)

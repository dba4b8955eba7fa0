"""From plain values, as msgpack has them, to the named tuples that messages and their fields are.

msgpack writes a named tuple as an array of its fields, and an error as ``errors.to_wire`` has it. Decoding follows
the annotations. Between a daemon and its own processes nothing is checked: values that need no conversion stay as
they came. From strangers (``strict``), each field must have exactly the type that the class names: integers have 64
bits, and ``Any`` is None, a bool, an integer, text, or lists and dicts of these, at most five deep.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from loaderd.errors import LoaderdError, from_wire

Decoder = Callable[[Any], Any]

_MAX_DEPTH = 5


class Malformed(Exception):
    """A stranger sent values that make no message. The text is short, and holds nothing of what came."""


def message_decoder(cls: Any, strict: bool = False) -> Decoder:
    """A function that makes a named tuple of the list of its fields. Those with a default may be missing at the end.

    It raises TypeError for another number of fields, or if ``strict`` Malformed, also for values of other types.
    """
    kinds = get_type_hints(cls)
    num_required = len(cls._fields) - len(cls._field_defaults)
    decoders = [(number, name, decoder_of(kinds[name], strict)) for number, name in enumerate(cls._fields)]
    needed = [(number, name, decode) for number, name, decode in decoders if decode is not None]

    def make(values: list[Any]) -> Any:
        if strict and not num_required <= len(values) <= len(decoders):
            raise Malformed(f"{cls.__name__} must have {len(decoders)} fields, got {len(values)}")
        for number, name, decode in needed:
            if number < len(values):
                try:
                    values[number] = decode(values[number])
                except Malformed:
                    kind, got = _named(kinds[name]), type(values[number]).__name__
                    raise Malformed(f"{cls.__name__}.{name} must be a valid {kind}, got {got}") from None
        return cls(*values)

    return make


def decoder_of(kind: Any, strict: bool, is_name: bool = False) -> Decoder | None:
    """A function that makes a ``kind`` of plain values; None: they are one already.

    ``is_name``: text may be the name of a file, which may hold any character.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is LoaderdError:
        return from_wire
    if hasattr(kind, "_fields"):
        return _of_fields(partial(tuple.__new__, kind), list(get_type_hints(kind).values()), strict)
    if origin is list or (origin is tuple and parts[1:] == (...,)):
        return _of_many(origin, decoder_of(parts[0], strict, is_name or origin is tuple), strict)
    if origin is tuple:
        return _of_fields(tuple, parts, True) if strict else tuple
    if origin in (Union, UnionType):
        return _of_one_of([decoder_of(part, strict, is_name) for part in parts], strict)
    return _strict_value(kind, is_name) if strict else None


def _of_fields(make: Callable[[Any], Any], kinds: Any, strict: bool) -> Decoder:
    """For a part of a message: all of its fields must be there."""
    decoders = [decoder_of(kind, strict, is_name=True) for kind in kinds]
    needed = [(number, decode) for number, decode in enumerate(decoders) if decode is not None]

    def decode(values: list[Any]) -> Any:
        if strict and (type(values) is not list or len(values) != len(decoders)):
            raise Malformed
        for number, decode_field in needed:
            values[number] = decode_field(values[number])
        return make(values)

    return decode if needed else make


def _of_many(make: Any, each: Decoder | None, strict: bool) -> Decoder | None:
    if each is None:
        return None if make is list else tuple

    def decode(values: list[Any]) -> Any:
        if strict and type(values) is not list:
            raise Malformed
        return make(map(each, values))

    return decode


def _of_one_of(decoders: list[Decoder | None], strict: bool) -> Decoder | None:
    """For a union. Unless it is strict, at most one of its kinds comes as an array or a dict that is decoded."""
    needed = [decode for decode in decoders if decode is not None]
    if not strict:
        return (lambda value: needed[0](value) if type(value) in (list, dict) else value) if needed else None

    def decode_one(value: Any) -> Any:
        for decode in needed:
            try:
                return decode(value)
            except Malformed:
                continue
        raise Malformed

    return decode_one


def _strict_value(kind: Any, is_name: bool) -> Decoder:
    def decode(value: Any) -> Any:
        if not is_right(value):
            raise Malformed
        return value

    def is_right(value: Any) -> bool:
        if kind is Any or kind == dict[str, Any]:
            return (kind is Any or type(value) is dict) and _is_plain(value, _MAX_DEPTH)
        if kind is int:
            return _is_integer(value)
        if kind is str:  # text that people read has no characters that move a cursor or that a log cannot take
            return type(value) is str and (is_name or value.isprintable())
        return type(value) is kind

    return decode


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_plain(value: Any, depth: int) -> bool:
    if type(value) is list:
        return depth > 0 and all(_is_plain(each, depth - 1) for each in value)
    if type(value) is dict:
        return depth > 0 and all(type(key) is str and _is_plain(each, depth - 1) for key, each in value.items())
    return value is None or type(value) in (bool, str) or _is_integer(value)


def _named(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")

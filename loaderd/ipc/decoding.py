"""From plain values, as msgpack has them, to the named tuples that messages and their fields are.

msgpack writes a named tuple as an array of its fields. Decoding follows the annotations: named tuples, lists and
tuples of them, and unions with one of these. All other values stay as they came. Nothing is checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

Decoder = Callable[[Any], Any]


def decoder_of(kind: Any) -> Decoder | None:
    """A function that makes a ``kind`` of plain values; None: they are one already."""
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and hasattr(kind, "_fields"):
        return _of_named_tuple(kind)
    if origin is list:
        of_list = decoder_of(parts[0])
        return None if of_list is None else lambda values: list(map(of_list, values))
    if origin is tuple:
        of_tuple = decoder_of(parts[0]) if parts[1:] == (...,) else None
        return tuple if of_tuple is None else lambda values: tuple(map(of_tuple, values))
    if origin in (Union, UnionType):
        return _of_one_of([decoder for part in parts if (decoder := decoder_of(part)) is not None])
    return None


def message_decoder_of(kind: Any) -> Decoder:
    """A function that makes a named tuple of plain values. It raises TypeError for too few of them, or too many."""
    typed = _typed_fields(kind)

    def decode(values: list[Any]) -> Any:
        for number, decoder in typed:
            if number < len(values):
                values[number] = decoder(values[number])
        return kind(*values)

    return decode


def _of_named_tuple(kind: Any) -> Decoder:
    """For a named tuple within a message: all of its fields must be there."""
    typed = _typed_fields(kind)
    new: Decoder = partial(tuple.__new__, kind)  # 0.1 µs; a call of the class takes three times that

    def decode(values: list[Any]) -> Any:
        for number, decoder in typed:
            values[number] = decoder(values[number])
        return new(values)

    return decode if typed else new


def _typed_fields(kind: Any) -> list[tuple[int, Decoder]]:
    """Number and decoder of the fields that need one."""
    kinds = get_type_hints(kind)
    decoders = [decoder_of(kinds[name]) for name in kind._fields]
    return [(number, decoder) for number, decoder in enumerate(decoders) if decoder is not None]


def _of_one_of(decoders: list[Decoder]) -> Decoder | None:
    """For a union, of which at most one kind comes as an array."""
    if not decoders:
        return None
    (decoder,) = decoders
    return lambda value: decoder(value) if type(value) is list else value

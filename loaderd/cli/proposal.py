"""A proposal of a schema, as Python text, from a sample of records; it has decoded them when it is printed."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from loaderd.cli.left_out import IF_NO_TFRECORD, notes_on, problem_of
from loaderd.cli.python_text import as_python, quoted
from loaderd.cli.record_view import decode
from loaderd.cli.sample import FeatureSummary, Sample, range_of
from loaderd.cli.stored_bytes import (
    Tensor,
    Values,
    contradicts,
    dtype_of,
    is_smooth,
    plane_score,
    set_shares,
    tensor_of,
)
from loaderd.cli.stored_records import PADDED, scatter_remarks
from loaderd.errors import OptionError
from loaderd.schema import Array, Bits, Derived, Feature, Field, Float, Int64, Length, PackedBits, Raw, Schema, Sparse
from loaderd.schema.board_shapes import bit_layouts, board_shapes, fields_of, picture_shapes
from loaderd.storage.names import some_of

_SHOWN_SHARDS = 3
_MOST_CHOICES = 5
_MOST_FLAT_BYTES = 4096
_LEAST_SCORE = 0.1
_WIDTH = 66
_MOST_DECODED_BYTES = 16 << 20


@dataclass
class _Part:
    """What is proposed for a feature. ``remarks``: comments on what is stored; ``choices``: on its fields.

    ``code``: the Python of fields that :func:`as_python` cannot write.
    """

    feature: Feature
    fields: dict[str, Field]
    remarks: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    intermediates: dict[str, Field] = field(default_factory=dict)
    code: dict[str, str] = field(default_factory=dict)


def propose(sample: Sample, num_shards: int) -> str:
    """A module with a ``schema``, and comments where the sample leaves a choice.

    A feature that has no place in a row of fixed size is left out, with a comment that says why and what to do.
    Raises OptionError if none is left, and RecordMismatchError if a record of the sample cannot be decoded.
    """
    parts: dict[str, _Part] = {}
    taken = set(sample.features)
    for name, found in sample.features.items():
        if not problem_of(name, sample):
            parts[name] = _part(name, found, sample, taken)
            taken |= {*parts[name].fields, *parts[name].intermediates}
    notes = list(notes_on(sample))
    if not parts:
        why = "\n".join(notes) or ("The records hold no features." if sample.sizes else IF_NO_TFRECORD)
        raise OptionError(f"no feature of the {len(sample.sizes)} records looked at can be read.", hint=why)
    features: dict[str, Feature] = {}
    fields: dict[str, Field] = {}
    for name, part in parts.items():
        features[name] = part.feature
        fields |= part.fields
        if len(sample.features[name].lengths) > 1:
            length = _free(f"{name}_length", taken)
            features[length], fields[length] = Length(name), Array(length)
    intermediates = {name: each for part in parts.values() for name, each in part.intermediates.items()}
    _check(Schema(features, fields, intermediates), sample)
    return _module(sample, num_shards, notes, parts, features, fields, intermediates)


def _check(schema: Schema, sample: Sample) -> None:
    at_once = max(1, _MOST_DECODED_BYTES // (schema.record_bytes + schema.row_bytes))
    for _ in decode(sample.kept, schema, at_once):
        pass


def _module(
    sample: Sample,
    num_shards: int,
    notes: Sequence[str],
    parts: dict[str, _Part],
    features: dict[str, Feature],
    fields: dict[str, Field],
    intermediates: dict[str, Field],
) -> str:
    shards = f"{len(sample.examples_in)} of {num_shards} shards" if num_shards > 1 else "a shard"
    text = [f'"""A schema proposed by loaderd from {len(sample.sizes)} records of {shards}.', ""]
    text += ["It reads these. What bytes hold, and in which shape, is a guess: look at a"]
    text += ["few records. Others may have longer lists, or lack features: check all.", ""]
    text += ["    loaderd inspect SHARD --schema records:schema --record 0"]
    text += ["    loaderd verify 'SHARDS' --schema records:schema", '"""', "", "import loaderd", ""]
    for note in notes:
        text += _comment(note)
    text += ["schema = loaderd.Schema(", "    features={"]
    remarks = {name: part.remarks for name, part in parts.items()}
    text += _lines({name: as_python(each) for name, each in features.items()}, remarks)
    code = {name: each for part in parts.values() for name, each in part.code.items()}
    choices = {name: part.choices for name, part in parts.items()}
    text += ["    },", "    fields={"]
    text += _lines({name: code.get(name) or as_python(each) for name, each in fields.items()}, choices)
    if intermediates:
        text += ["    },", "    intermediates={"]
        text += _lines({name: as_python(each) for name, each in intermediates.items()}, {})
    return "\n".join([*text, "    },", ")"]) + "\n"


def _lines(parts: dict[str, str], comments: dict[str, list[str]]) -> Iterator[str]:
    for name, code in parts.items():
        for comment in comments.get(name, ()):
            for line in _comment(comment):
                yield f"        {line}"
        yield f"        {quoted(name)}: {code},"


def _comment(text: str) -> list[str]:
    """A comment in lines; code, which is indented, stays in one."""
    return [f"# {text}"] if text.startswith(" ") else [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


# ---------------------------------------------------------------------------------------------- what is proposed


def _part(name: str, found: FeatureSummary, sample: Sample, taken: set[str]) -> _Part:
    missing = sample.examples_in.total() - found.records
    (kind,) = found.kinds
    if kind != "bytes":
        part = _of_numbers(name, found, missing > 0)
    elif found.lengths != {1}:
        part = _of_list(name, found, missing > 0)
    elif found.is_text or len(found.byte_lengths) > 1:
        part = _of_text(name, found, missing > 0)
    else:
        part = _of_bytes(name, found, missing > 0, taken)
    if kind == "int64" and found.lengths != {1}:
        places = [each for each, other in sample.features.items() if _goes_with(found, other)]
        part.remarks += [f"{remark}." for remark in scatter_remarks(name, places)]
    if missing:
        lacking = [shard for shard, number in sample.examples_in.items() if found.records_in[shard] < number]
        where = some_of([f"{shard!a}" for shard in lacking], _SHOWN_SHARDS)
        total = sample.examples_in.total()
        part.remarks.append(f"{missing} of {total} records lack it and get the default. They are in {where}.")
    return part


def _goes_with(integers: FeatureSummary, other: FeatureSummary) -> bool:
    return other.kinds == {"float"} and other.lengths == integers.lengths


def _of_numbers(name: str, found: FeatureSummary, needs_default: bool) -> _Part:
    length, varies = max(found.lengths), len(found.lengths) > 1
    is_int = found.kinds == {"int64"}
    feature: type[Int64] | type[Float] = Int64 if is_int else Float
    shape = (length,) if length > 1 or varies else ()
    pad = (-1 if is_int else 0) if varies else None
    stored = feature(shape, default=(() if varies else 0) if needs_default else None, pad=pad)
    part = _Part(stored, fields_of({name: stored}))
    if varies:
        part.remarks.append(f"Its lists have {range_of(found.lengths)} values; {PADDED}.")
    part.choices = _choices(name, shape, [{name: Array(name, shape=each)} for each in _shapes(length)])
    return part


def _of_list(name: str, found: FeatureSummary, needs_default: bool) -> _Part:
    length, num_bytes = max(found.lengths), max(found.byte_lengths)
    varies = len(found.lengths) > 1 or len(found.byte_lengths) > 1
    dtype, shape = (f"S{num_bytes}", (length,)) if found.is_text else ("uint8", (length, num_bytes))
    default = (() if varies else 0) if needs_default else None
    feature = Raw(dtype, shape, default, pad=(found.is_text or 0) if varies else None, as_list=True)
    sizes = f"{range_of(found.lengths)} values of {range_of(found.byte_lengths)} bytes"
    return _Part(feature, fields_of({name: feature}), [f"Its lists have {sizes}; {PADDED}."])


def _of_text(name: str, found: FeatureSummary, needs_default: bool) -> _Part:
    num_bytes, varies = max(found.byte_lengths), len(found.byte_lengths) > 1
    if found.is_text:
        feature = Raw(f"S{num_bytes}", default=b"" if needs_default else None, pad=True if varies else None)
    else:
        feature = Raw("uint8", (num_bytes,), default=0 if needs_default else None, pad=0)
    sizes = f"Its values have {range_of(found.byte_lengths)} bytes; shorter ones are padded."
    return _Part(feature, fields_of({name: feature}), [sizes] if varies else [])


def _of_bytes(name: str, found: FeatureSummary, needs_default: bool, taken: set[str]) -> _Part:
    """For bytes of one length: a tensor, numbers or bits."""
    (num_bytes,) = found.byte_lengths
    tensor = tensor_of(found.values)
    if tensor is not None:
        return _of_tensor(name, tensor, num_bytes, needs_default, taken)
    values = np.frombuffer(b"".join(found.values), np.uint8).reshape(-1, num_bytes)
    dtype = dtype_of(values)
    if dtype == "bits" and num_bytes > _MOST_FLAT_BYTES and not bit_layouts(name, 8 * num_bytes):
        dtype = "uint8"
    if dtype == "bits":
        return _of_bits(name, values, needs_default, taken)
    count = num_bytes // np.dtype(dtype).itemsize
    shapes = _shapes(count)
    if is_smooth(values):
        shapes = [*picture_shapes(count), *board_shapes(count)]
    # Bytes have no shape of their own. Numbers are as often a list (a policy of 361) as a board.
    shape = shapes[0] if shapes and dtype in ("uint8", "int8") else (count,) if count > 1 else ()
    feature = Raw(dtype, shape, default=0 if needs_default else None)
    remarks = [
        f"{num_bytes:,} bytes, which look like {dtype}. As bits, with Bits below:",
        f" {quoted(name)}: {as_python(PackedBits(8 * num_bytes))},",
    ]
    others = [{name: Array(name, shape=each)} for each in [*shapes, (count,)] if each != shape]
    why = "from the number of values" if shape in shapes else ""
    return _Part(feature, fields_of({name: feature}), remarks, _choices(name, shape, others, why))


def _of_tensor(name: str, tensor: Tensor, num_bytes: int, needs_default: bool, taken: set[str]) -> _Part:
    stored = _free(f"{name}_bytes", taken)
    offset, dtype, shape = tensor.offset, tensor.dtype, tensor.shape
    made = (
        f"lambda stored: stored[:, {offset}:].copy().view({quoted(dtype)}).reshape(-1, {', '.join(map(str, shape))})"
    )
    make: Callable[[Values], Values] = lambda stored: stored[:, offset:].copy().view(dtype).reshape(-1, *shape)  # noqa: E731
    return _Part(
        Raw("uint8", (num_bytes,), default=0 if needs_default else None),
        {name: Derived(make, [stored])},
        [f"A tensor of {tensor.made_by}: {dtype} {shape} behind a header of {offset} bytes."],
        intermediates={stored: Array(name)},
        code={name: f"loaderd.Derived({made}, {quoted(stored)})"},
    )


def _of_bits(name: str, values: Values, needs_default: bool, taken: set[str]) -> _Part:
    num_bytes = values.shape[1]
    num_bits = 8 * num_bytes
    feature = PackedBits(num_bits, bytes(num_bytes) if needs_default else None)
    usual = (_shaped(name, num_bits),)
    both = [
        tuple(replace(each, bit_order=order) for each in layout)
        for order in ("big", "little")
        for layout in bit_layouts(name, num_bits)
    ]
    shares = {order: set_shares(values, order) for order in ("big", "little")}
    layouts = [each for each in both if len(each) > 1 or not contradicts(shares[each[0].bit_order], each)]
    scores = [plane_score(shares[each[0].bit_order], each[0]) for each in layouts]
    score, chosen = max(zip(scores, layouts, strict=True), key=lambda each: each[0], default=(0.0, usual))
    why = "as planes differ most in it"
    usual_score = plane_score(shares["big"], usual[0])
    if score < usual_score + _LEAST_SCORE:  # it may be the same
        chosen, score = usual, usual_score
    if score < _LEAST_SCORE:
        padded = [each for each in layouts if len(each) == 1] if usual[0].shape == (num_bits,) else []
        chosen, why = (padded or [usual])[0], "from the number of bits"
    rest = _free(f"{name}_rest", taken) if len(chosen) > 1 else f"{name}_rest"
    big = [each for each in layouts if each[0].bit_order == chosen[0].bit_order]
    others = [*big, tuple(replace(each, bit_order="little") for each in chosen), (Bits(name, (num_bits,)),)]
    few = int(np.bitwise_count(values).sum(axis=1, dtype=np.int64).max(initial=0))
    named: list[dict[str, Field]] = [
        dict(zip((name, rest), each, strict=False)) for each in dict.fromkeys(others) if each != chosen
    ]
    if few < num_bits // 8 and score < _LEAST_SCORE:
        named.insert(0, {name: Sparse(name, max(1, few))})
    remarks = [
        f"{num_bytes:,} bytes, which look like bits. As numbers, with Array below:",
        f" {quoted(name)}: {as_python(Raw('uint8', (num_bytes,)))},",
    ]
    choices = _choices(name, chosen[0].shape, named[:_MOST_CHOICES], why)
    return _Part(feature, dict(zip((name, rest), chosen, strict=False)), remarks, choices)


def _shaped(name: str, num_bits: int) -> Bits:
    (made,) = fields_of({name: PackedBits(num_bits)}).values()
    assert isinstance(made, Bits)
    return made


def _shapes(number: int) -> list[tuple[int, ...]]:
    return list(dict.fromkeys([*board_shapes(number), *picture_shapes(number)]))


def _choices(name: str, shape: tuple[int, ...], others: Sequence[Mapping[str, Field]], why: str = "") -> list[str]:
    """Comments that say which shape is chosen, and the lines that may stand in its place."""
    if not others:
        return []
    lines = [", ".join(f"{quoted(key)}: {as_python(each)}" for key, each in fields.items()) for fields in others]
    return [
        f"Chosen: {shape}, {why or 'as it is stored'}. In its place:",
        *(f" {line}," for line in lines),
    ]

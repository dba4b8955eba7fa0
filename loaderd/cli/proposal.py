"""A proposal of a schema, as Python text, from a sample of records."""

from __future__ import annotations

from collections.abc import Iterator

from loaderd.cli.sample import FeatureSummary, Sample, range_of
from loaderd.cli.stored_records import PADDED, quoted, scatter_remarks, sparse_remarks
from loaderd.errors import OptionError
from loaderd.redaction import readable_line
from loaderd.storage.names import some_of

_SIDES = (8, 9, 10, 13, 19, 28, 32)
"""Of boards and small pictures."""
_MOST_PLANES = 1024
_SHOWN_SHARDS = 3
_MOST_OTHERS = 10


def propose(sample: Sample, num_shards: int) -> str:
    """A module with a ``schema``, and comments where the sample leaves a choice.

    A feature that has no place in a row of fixed size is left out, with a comment that says why. Raises OptionError
    if none is left.
    """
    features, fields, left_out = [], [], []
    parsed = sample.examples_in.total()
    float_lengths = {
        length for found in sample.features.values() if found.kinds == {"float"} for length in found.lengths
    }
    for name, found in sample.features.items():
        problem = _problem(found)
        if problem:
            left_out.append(f"# {name!a} is left out: {problem}.")
            continue
        missing = parsed - found.records
        stored, delivered, remarks = _lines(name, found, missing > 0, float_lengths)
        if found.kinds == {"int64"} and found.lengths != {1}:
            remarks += scatter_remarks(
                name, [each for each, other in sample.features.items() if _goes_with(found, other)]
            )
        if missing:
            lacking = [shard for shard, examples in sample.examples_in.items() if found.records_in[shard] < examples]
            where = some_of([f"{shard!a}" for shard in lacking], _SHOWN_SHARDS)
            remarks.append(f"{missing} of {parsed} records lack it and get the default. They are in {where}")
        features += [f"        # {remark}." for remark in remarks]
        features.append(f"        {quoted(name)}: {stored},")
        fields.append(f"        {quoted(name)}: {delivered},")
        if len(found.lengths) > 1:
            length = f"{name}_length"
            while length in sample.features:
                length += "_"
            features.append(f"        {quoted(length)}: loaderd.Length({quoted(name)}),")
            fields.append(f"        {quoted(length)}: loaderd.Array({quoted(length)}),")
    notes = [*_notes(sample), *left_out]
    if not features:
        why = " ".join(note.removeprefix("# ") for note in notes) or "the records hold no features."
        raise OptionError(f"no feature of the {len(sample.sizes)} records looked at can be read: {why}")
    shards = f"{len(sample.examples_in)} of {num_shards} shards" if num_shards > 1 else "a shard"
    text = [f'"""A schema proposed by loaderd from {len(sample.sizes)} records of {shards}.', ""]
    text += ["It has not seen the other records: their lists may be longer, and they may lack features.", '"""']
    text += ["", "import loaderd", "", *notes, "schema = loaderd.Schema(", "    features={", *features, "    },"]
    return "\n".join([*text, "    fields={", *fields, "    },", ")"]) + "\n"


def _notes(sample: Sample) -> Iterator[str]:
    """Comments on what is not in the schema."""
    for shard, why in list(sample.others.items())[:_MOST_OTHERS]:
        yield f"# {shard!a} is of another kind, or cannot be read: {readable_line(why).rstrip('.')}."
    if len(sample.others) > _MOST_OTHERS:
        yield f"# So are {len(sample.others) - _MOST_OTHERS} more shards."
    if sample.faults:
        yield f"# {len(sample.faults)} of {len(sample.sizes)} records are no tf.train.Example."
    if sample.lists:
        lists = some_of([f"{name!a}" for name in sorted(sample.lists)], _SHOWN_SHARDS)
        yield f"# Feature lists of a tf.train.SequenceExample are not read: {lists}."


def _goes_with(integers: FeatureSummary, other: FeatureSummary) -> bool:
    return other.kinds == {"float"} and other.lengths == integers.lengths


def _problem(found: FeatureSummary) -> str:
    """Why a feature has no place in a row of fixed size; "" if it has one."""
    if len(found.kinds) > 1:
        return f"it is of several types, {' and '.join(sorted(found.kinds))}"
    if found.lengths == {0}:
        return "its lists are empty"
    return "its values are empty" if found.byte_lengths == {0} else ""


def _lines(
    name: str, found: FeatureSummary, needs_default: bool, float_lengths: set[int]
) -> tuple[str, str, list[str]]:
    """(stored feature, field, remarks) of a feature."""
    (kind,) = found.kinds
    array = f"loaderd.Array({quoted(name)})"
    if kind != "bytes":
        length, varies = max(found.lengths), len(found.lengths) > 1
        remarks = [f"Its lists have {range_of(found.lengths)} values; {PADDED}"] if varies else []
        remarks += _of_shapes(length, "values")
        options = [f"({length},)"] * (length > 1 or varies)
        options += [f"default={'()' if varies else 0}"] * needs_default
        options += [f"pad={-1 if kind == 'int64' else 0}"] * varies
        return f"loaderd.{'Int64' if kind == 'int64' else 'Float'}({', '.join(options)})", array, remarks
    num_bytes, varies = max(found.byte_lengths), len(found.byte_lengths) > 1
    if found.lengths != {1}:
        return _list_of_bytes(found, needs_default), array, [_said_of_list(found)]
    remarks = [f"Its values have {range_of(found.byte_lengths)} bytes; shorter ones are padded"] if varies else []
    if found.is_text:
        options = [f'"S{num_bytes}"', *['default=b""'] * needs_default, *["pad=True"] * varies]
        return f"loaderd.Raw({', '.join(options)})", array, remarks
    if varies:
        options = ['"uint8"', f"({num_bytes},)", *["default=0"] * needs_default, "pad=0"]
        return f"loaderd.Raw({', '.join(options)})", array, remarks
    bits = 8 * num_bytes
    field = f"loaderd.Bits({quoted(name)}, shape=({bits},)"
    remarks.append(f'Are these bits, the most significant one of a byte first? Else {field}, bit_order="little")')
    remarks += sparse_remarks(name, bits)
    remarks += _of_shapes(bits, "bits")
    remarks.append(f'Or bytes? Then loaderd.Raw("uint8", ({num_bytes},)) and {array}')
    remarks += _of_shapes(num_bytes, "bytes")
    halves = num_bytes // 2
    if num_bytes % 2 == 0 and halves > 1 and (halves in float_lengths or shapes_of(halves)):
        remarks.append(f'Or float16? Then loaderd.Raw("float16", ({halves},)) and {array}')
        remarks += _of_shapes(halves, "float16")
    default = f", default=bytes({num_bytes})" if needs_default else ""
    return f"loaderd.PackedBits({bits}{default})", f"{field})", remarks


def _list_of_bytes(found: FeatureSummary, needs_default: bool) -> str:
    """The stored feature of lists of bytes values."""
    length, num_bytes = max(found.lengths), max(found.byte_lengths)
    options = [f'"S{num_bytes}", ({length},)'] if found.is_text else [f'"uint8", ({length}, {num_bytes})']
    varies = len(found.lengths) > 1 or len(found.byte_lengths) > 1
    options += [f"default={'()' if varies else 0}"] * needs_default
    options += [f"pad={found.is_text or 0}"] * varies
    return f"loaderd.Raw({', '.join(options)}, as_list=True)"


def _said_of_list(found: FeatureSummary) -> str:
    return f"Its lists have {range_of(found.lengths)} values of {range_of(found.byte_lengths)} bytes; {PADDED}"


def shapes_of(number: int) -> list[tuple[int, ...]]:
    """Shapes of boards, or of stacks of planes, that have so many values."""
    found: list[tuple[int, ...]] = []
    for side in _SIDES:
        planes, rest = divmod(number, side * side)
        if not rest and 0 < planes <= _MOST_PLANES:
            found += [(side, side)] if planes == 1 else [(side, side, planes), (planes, side, side)]
    return found


def _of_shapes(number: int, unit: str) -> list[str]:
    shapes = shapes_of(number)
    return [f"{number} {unit} can have the shape {' or '.join(map(str, shapes))}"] if shapes else []

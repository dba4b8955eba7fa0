"""What no schema can hold of the records of a sample: why, and what to do."""

from __future__ import annotations

from collections.abc import Iterator

from loaderd.cli.python_text import quoted
from loaderd.cli.sample import Sample, range_of
from loaderd.cli.stored_bytes import no_array, tensor_of
from loaderd.decode.example import REMEDY_NO_EXAMPLE
from loaderd.redaction import readable_line
from loaderd.storage.names import some_of

IF_NO_TFRECORD = (
    "If this is no TFRecord file: --schema says what records of a fixed size are, "
    "loaderd.Schema(loaderd.FixedRecords(dtype), …)."
)
_SHOWN_SHARDS = 3
_MOST_OTHERS = 10
_MOST_TEXT_BYTES = 256
_MOST_PADDED_BYTES = {"bytes": 4096, "int64": 1 << 16, "float": 1 << 16}
"""Each record takes as many bytes as the longest, and a shuffle window holds 262,144 records."""


def notes_on(sample: Sample) -> Iterator[str]:
    """Sentences on what no schema reads of these records, and what to do."""
    for shard, why in list(sample.others.items())[:_MOST_OTHERS]:
        yield f"{shard!a} is of another kind, or cannot be read: {readable_line(why).rstrip('.')}."
    if len(sample.others) > _MOST_OTHERS:
        yield f"So are {len(sample.others) - _MOST_OTHERS} more shards."
    if sample.faults:
        number, fault = sample.faults[0]
        first = f"the first is record {number}: {readable_line(fault.found)}"
        yield f"{len(sample.faults)} of {len(sample.sizes)} records are no tf.train.Example; {first}."
    if sample.bare and (sample.faults or not (sample.features or sample.lists)):
        yield _no_examples(sample)
    if sample.lists:
        lists = some_of([f"{name!a}" for name in sorted(sample.lists)], _SHOWN_SHARDS)
        yield (
            f"Feature lists of a tf.train.SequenceExample are not read: {lists}. Write each step as a "
            "tf.train.Example of its own, or each list as one feature of it."
        )
    for name in sample.features:
        if problem := problem_of(name, sample):
            yield f"{name!a} is left out: {problem}."


def _no_examples(sample: Sample) -> str:
    """What records that are no examples are, and how to read them."""
    sizes, tensor = range_of({*map(len, sample.bare)}), tensor_of(sample.bare)
    if tensor is not None:
        columns = f'[("header", "V{tensor.offset}"), ("x", {quoted(tensor.dtype)}, {tensor.shape})]'
        return f"They are tensors of {tensor.made_by}, for FixedRecords({columns}). {REMEDY_NO_EXAMPLE}"
    return f"They have {sizes} bytes. {REMEDY_NO_EXAMPLE}"


def problem_of(name: str, sample: Sample) -> str:
    """Why a feature has no place in a row of fixed size, and what to do; "" if it has one."""
    found = sample.features[name]
    if len(found.kinds) > 1:
        return f"it is of several types, {' and '.join(sorted(found.kinds))}"
    if name in sample.lists:
        return "some records have it as a feature list"
    if found.lengths == {0}:
        return "its lists are empty"
    if found.byte_lengths == {0}:
        return "its values are empty"
    what = no_array(found.values)
    if what:
        return (
            f"its values are {what}, which loaderd does not decode. Store what they hold as bytes of a fixed size, "
            'such as loaderd.Raw("uint8", (32, 32, 3)) reads; or read these shards with tf.data'
        )
    (kind,) = found.kinds
    longest = max(found.lengths) * (max(found.byte_lengths) if kind == "bytes" else 8 if kind == "int64" else 4)
    varies = len(found.lengths) > 1 or len(found.byte_lengths) > 1
    if varies and kind == "bytes" and found.is_text and longest > _MOST_TEXT_BYTES:
        return (
            f"it is text of {range_of(found.byte_lengths)} bytes, and each record has the same room. Store the "
            f'numbers of its words as an int64 list, which is padded; or loaderd.Raw("S{_MOST_TEXT_BYTES}", '
            "pad=True, cut=True) reads where it begins"
        )
    if varies and longest > _MOST_PADDED_BYTES[kind]:
        counts = found.byte_lengths if kind == "bytes" and found.lengths == {1} else found.lengths
        unit = "bytes" if counts is found.byte_lengths else "values"
        room = f'Raw("uint8", ({max(counts)},), pad=0)'
        if unit == "values":
            room = f"{'Int64' if kind == 'int64' else 'Float'}((1000,), pad=0, cut=True)"
        return (
            f"it has {range_of(counts)} {unit}, and each record would take as many as the longest. "
            f"loaderd.{room} reads it so; or cut it into several records"
        )
    return ""

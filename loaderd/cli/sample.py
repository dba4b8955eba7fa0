"""The first records of a shard, and what their features are like."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field

from loaderd.decode.example import Listed, RecordFault, list_features
from loaderd.errors import Damage, OptionError
from loaderd.shards.access import Access
from loaderd.shards.compression import OnRead, detect_compression, open_stream, tell_nobody
from loaderd.shards.files import open_shard
from loaderd.shards.framing import scan
from loaderd.shards.shard_file import ShardFile


@dataclass
class FeatureSummary:
    """One feature in the records of a sample.

    ``lengths``: the different numbers of values that records hold; ``byte_lengths``: the different sizes of values,
    in bytes; ``is_text``: whether each value is printable ASCII, maybe followed by zeros.
    """

    kinds: set[str] = field(default_factory=set)
    records: int = 0
    lengths: set[int] = field(default_factory=set)
    byte_lengths: set[int] = field(default_factory=set)
    is_text: bool = True

    def add(self, listed: Listed) -> None:
        self.kinds.add(listed.kind)
        self.records += 1
        self.lengths.add(len(listed.values))
        for value in listed.values:
            if isinstance(value, bytes):
                self.byte_lengths.add(len(value))
                text = value.rstrip(b"\0")
                self.is_text = self.is_text and bool(text) and text.isascii() and text.decode().isprintable()


@dataclass
class Sample:
    """The first healthy records of a shard. ``faults``: those that are no ``tf.train.Example``, by number."""

    sizes: list[int] = field(default_factory=list)
    features: dict[str, FeatureSummary] = field(default_factory=dict)
    faults: list[tuple[int, RecordFault]] = field(default_factory=list)


def records_of(file: ShardFile, on_read: OnRead = tell_nobody) -> Iterator[tuple[int, bytes] | Damage]:
    """Number and bytes of each healthy record, and each damage, in order. Raises ShardReadError, StorageError."""
    with closing(open_shard(file, Access())) as opened:
        stream = open_stream(file.uri, opened, detect_compression(file.uri, opened, file.size_bytes), on_read)
        for found in scan(file.uri, stream.read_into):
            if isinstance(found, Damage):
                yield found
                continue
            spans = zip(found.payload_starts.tolist(), found.payload_lengths.tolist(), strict=True)
            for place, (start, length) in enumerate(spans):
                if place not in found.bad:
                    yield found.first_record + place, found.buffer[start : start + length].tobytes()
        if stream.damage is not None:
            yield stream.damage


def take_sample(file: ShardFile, num_records: int, on_read: OnRead) -> Sample:
    """What the first records are like. Raises ShardReadError, StorageError."""
    sample = Sample()
    for found in records_of(file, on_read):
        if isinstance(found, Damage):
            continue
        if len(sample.sizes) == num_records:
            break
        number, record = found
        sample.sizes.append(len(record))
        features = list_features(record)
        if isinstance(features, RecordFault):
            sample.faults.append((number, features))
            continue
        for name, listed in features.items():
            sample.features.setdefault(name, FeatureSummary()).add(listed)
    return sample


def find_record(file: ShardFile, wanted: int | None, on_read: OnRead) -> tuple[int, bytes]:
    """(number, bytes) of record ``wanted``; None: the first healthy one. Raises OptionError if it is not healthy."""
    last = -1
    healthy = (found for found in records_of(file, on_read) if not isinstance(found, Damage))
    for number, record in itertools.takewhile(lambda found: wanted is None or found[0] <= wanted, healthy):
        if wanted in (None, number):
            return number, record
        last = number
    if wanted is None:
        raise OptionError(f"{file.name} has no healthy record", hint="loaderd verify names the damage.")
    before = f"The last healthy one before it is {last}" if last >= 0 else "No record before it is healthy"
    raise OptionError(
        f"--record must be a healthy record of {file.name}, got {wanted}",
        hint=f"{before}; loaderd verify names damaged ones.",
    )

"""The first records of shards, and what their features are like."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from loaderd.cli.fixed_shard import stored_in
from loaderd.decode.example import Listed, RecordFault, feature_lists, list_features
from loaderd.errors import Damage, OptionError, ShardReadError
from loaderd.formats.compression import OnRead, detect_compression, no_callback, open_stream
from loaderd.formats.framing import scan
from loaderd.progress import ProgressDisplay
from loaderd.snapshots import Progress
from loaderd.storage.access import Access
from loaderd.storage.files import open_shard
from loaderd.storage.shard_file import ShardFile

_LEAST_RECORDS = 3
_LEAST_BYTES, _MOST_BYTES = 64 << 10, 256 << 20
"""What is read of a shard, if there are many, and at most."""
_MOST_S = 60.0


@dataclass
class FeatureSummary:
    """One feature in the records of a sample.

    ``missing_in``: the shards in which records lack it, and how many do. ``lengths``: the different numbers of values
    that records hold; ``byte_lengths``: the different sizes of values, in bytes; ``is_text``: whether each value is
    printable ASCII, maybe followed by zeros.
    """

    kinds: set[str] = field(default_factory=set)
    records: int = 0
    missing_in: dict[str, int] = field(default_factory=dict)
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
    """The first healthy records of shards. ``faults``: those that are no ``tf.train.Example``, by number.

    ``others``: the shards that are of another kind, or cannot be read, each with why. ``lists``: the feature lists of
    a ``tf.train.SequenceExample``, which are not read.
    """

    sizes: list[int] = field(default_factory=list)
    features: dict[str, FeatureSummary] = field(default_factory=dict)
    faults: list[tuple[int, RecordFault]] = field(default_factory=list)
    shards: list[str] = field(default_factory=list)
    num_shards: int = 1
    others: dict[str, str] = field(default_factory=dict)
    lists: set[str] = field(default_factory=set)
    parsed_in: dict[str, int] = field(default_factory=dict)


def range_of(numbers: Collection[int]) -> str:
    """Such as "7" or "3 to 1,024"."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def records_of(
    file: ShardFile, on_read: OnRead = no_callback, most_bytes: int | None = None
) -> Iterator[tuple[int, bytes] | Damage]:
    """Number and bytes of each healthy record, and each damage, in order. Raises ShardReadError, StorageError.

    ``most_bytes``: the shard is taken to end after so many bytes, inflated ones where it is compressed.
    """
    with closing(open_shard(file, Access())) as opened:
        stream = open_stream(file.uri, opened, detect_compression(file.uri, opened, file.size_bytes), on_read)
        left = most_bytes

        def read_into(view: memoryview) -> int:
            nonlocal left
            if left is None:
                return stream.read_into(view)
            got = stream.read_into(view[:left]) if left else 0
            left -= got
            return got

        for found in scan(file.uri, read_into):
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
    _add(sample, file, records_of(file, on_read), num_records)
    return sample


def sample_shards(files: Sequence[ShardFile], num_records: int, display: ProgressDisplay) -> Sample:
    """What the first records of each shard are like: of all shards together, ``num_records`` or a few more.

    Of many shards, little of each is read. What takes longer than a minute is left out; the shards that are looked at
    are spread evenly over all of them. Raises StorageError.
    """
    sample = Sample(num_shards=len(files))
    each = max(_LEAST_RECORDS, num_records // len(files))
    most_bytes = max(_LEAST_BYTES, _MOST_BYTES // len(files))
    until_s = time.monotonic() + _MOST_S
    for done, file in enumerate(_spread(files)):
        if time.monotonic() > until_s and sample.sizes:
            break
        display(Progress("looking into shards", done, len(files)))
        try:
            stored = stored_in(file)
            if stored is not None:
                sample.others[file.name] = f"its schema is {stored.named}"
                continue
            added = 0
            for limit in (most_bytes, _MOST_BYTES):  # a record may be larger than what is read of each shard
                added = _add(sample, file, records_of(file, most_bytes=limit), each)
                if added or limit >= file.size_bytes:
                    break
            if file.size_bytes and not added:
                sample.others[file.name] = f"no healthy record is in its first {_MOST_BYTES:,} bytes"
        except ShardReadError as error:
            sample.others[file.name] = error.message
    return sample


def _spread(files: Sequence[ShardFile]) -> Iterator[ShardFile]:
    """All files: first some that are far apart, then those between them."""
    step = 1 << (len(files) - 1).bit_length()
    yield files[0]
    while step > 1:
        yield from files[step // 2 :: step]
        step //= 2


def _add(sample: Sample, file: ShardFile, records: Iterator[tuple[int, bytes] | Damage], num_records: int) -> int:
    """Add up to ``num_records`` healthy records of a shard; returns how many."""
    parsed = added = 0
    here: Counter[str] = Counter()
    for found in itertools.islice((one for one in records if not isinstance(one, Damage)), num_records):
        number, record = found
        added += 1
        sample.sizes.append(len(record))
        sample.lists.update(feature_lists(record))
        features = list_features(record)
        if isinstance(features, RecordFault):
            sample.faults.append((number, features))
            continue
        parsed += 1
        here.update(list(features))
        for name, listed in features.items():
            if name not in sample.features:
                sample.features[name] = FeatureSummary(missing_in=dict(sample.parsed_in))
            sample.features[name].add(listed)
    if added:
        sample.shards.append(file.name)
    if parsed:
        sample.parsed_in[file.name] = parsed
        for name, summary in sample.features.items():
            if here[name] < parsed:
                summary.missing_in[file.name] = parsed - here[name]
    return added


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

"""The first records of TFRecord shards, and what their features are like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice

from loaderd.cli.stored_records import stored_in
from loaderd.decode.example import Listed, RecordFault, feature_lists, list_features
from loaderd.errors import Damage, ShardReadError
from loaderd.formats.compression import OnRead, detect_compression, no_callback, open_stream
from loaderd.formats.framing import scan
from loaderd.progress import ProgressDisplay
from loaderd.snapshots import Progress
from loaderd.storage.access import Access
from loaderd.storage.files import open_shard
from loaderd.storage.shard_file import ShardFile

_LEAST_RECORDS = 3
_MOST_SHARDS = 2000
_LINE_ENDS = dict.fromkeys(map(ord, "\t\n\r"))


@dataclass
class FeatureSummary:
    """One feature in the records of a sample.

    ``records_in``: how many records of each shard have it. ``lengths``: the different numbers of values that records
    hold; ``byte_lengths``: the different sizes of values, in bytes; ``is_text``: whether each value is UTF-8 that can
    be printed, maybe followed by zeros. ``values``: the bytes values of the records that the sample keeps.
    """

    kinds: set[str] = field(default_factory=set)
    records_in: Counter[str] = field(default_factory=Counter)
    lengths: set[int] = field(default_factory=set)
    byte_lengths: set[int] = field(default_factory=set)
    is_text: bool = True
    values: list[bytes] = field(default_factory=list)

    @property
    def records(self) -> int:
        return self.records_in.total()

    def add(self, shard: str, listed: Listed, keep: bool) -> None:
        self.kinds.add(listed.kind)
        self.records_in[shard] += 1
        self.lengths.add(len(listed.values))
        for value in listed.values:
            if isinstance(value, bytes):
                self.byte_lengths.add(len(value))
                self.is_text = self.is_text and _is_text(value.rstrip(b"\0"))
                if keep:
                    self.values.append(value)


def _is_text(value: bytes) -> bool:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return False
    return bool(text) and text.translate(_LINE_ENDS).isprintable()


@dataclass
class Sample:
    """The first healthy records of shards. ``faults``: those that are no ``tf.train.Example``, by number.

    ``kept``: the examples among them, each with its shard and its number there, up to a number of bytes; ``bare``:
    the records that hold no feature, likewise.

    ``examples_in``: how many of each shard are one. ``others``: the shards that are of another kind, or cannot be
    read, each with why. ``lists``: the feature lists of a ``tf.train.SequenceExample``, which are not read.
    """

    sizes: list[int] = field(default_factory=list)
    kept: list[tuple[ShardFile, int, bytes]] = field(default_factory=list)
    bare: list[bytes] = field(default_factory=list)
    features: dict[str, FeatureSummary] = field(default_factory=dict)
    faults: list[tuple[int, RecordFault]] = field(default_factory=list)
    examples_in: Counter[str] = field(default_factory=Counter)
    others: dict[str, str] = field(default_factory=dict)
    lists: set[str] = field(default_factory=set)
    _room_bytes: int = 32 << 20

    def add(self, file: ShardFile, num_records: int, on_read: OnRead = no_callback) -> None:
        """Add the first records of a shard. Raises ShardReadError, StorageError."""
        for number, record in islice(_records_of(file, on_read), num_records):
            self.sizes.append(len(record))
            self.lists.update(feature_lists(record))
            features = list_features(record)
            self._room_bytes -= len(record)
            keep = self._room_bytes >= 0 or not (self.kept or self.bare)
            if keep and (isinstance(features, RecordFault) or not features):
                self.bare.append(record)
            if isinstance(features, RecordFault):
                self.faults.append((number, features))
                continue
            if keep:
                self.kept.append((file, number, record))
            self.examples_in[file.name] += 1
            for name, listed in features.items():
                self.features.setdefault(name, FeatureSummary()).add(file.name, listed, keep)


def sample_shards(files: Sequence[ShardFile], num_records: int, display: ProgressDisplay) -> Sample:
    """What the first records of each shard are like: of all shards together, ``num_records`` or a few more.

    Of very many shards, some are looked at that are spread evenly over all of them. Raises StorageError.
    """
    sample = Sample()
    some = files[:: -(-len(files) // _MOST_SHARDS)]
    for done, file in enumerate(some):
        display(Progress("looking into shards", done, len(some)))
        try:
            stored = stored_in(file)
            if stored is None:
                sample.add(file, max(_LEAST_RECORDS, num_records // len(some)))
            else:
                sample.others[file.name] = f"its schema is {stored.named}"
        except ShardReadError as error:
            sample.others[file.name] = error.message
    return sample


def _records_of(file: ShardFile, on_read: OnRead) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each healthy record, in order."""
    with closing(open_shard(file, Access())) as opened:
        compression = detect_compression(file.uri, opened.read_at, file.size_bytes)
        stream = open_stream(file.uri, opened.read_at, compression, on_read)
        for piece in scan(file.uri, stream.read_into):
            if isinstance(piece, Damage):
                continue
            spans = zip(piece.payload_starts.tolist(), piece.payload_lengths.tolist(), strict=True)
            for place, (start, length) in enumerate(spans):
                if place not in piece.bad:
                    yield piece.first_record + place, piece.buffer[start : start + length].tobytes()


def range_of(numbers: Collection[int]) -> str:
    """Such as "7" or "3 to 1,024"."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

"""The index of a shard: where its blocks of consecutive, healthy records are, and what of it is damaged.

A block is up to ``block_records`` consecutive records; a damaged record ends one block, and the next begins behind
it, so a block holds no damage that was there when the index was made. A compressed shard can be entered at its
restart points alone (``restart_points``): a block of it is the records from one point to the next. Where it has none,
each healthy stretch of it is one block.

::

    offsets        (blocks,)  where the block starts, in bytes of the (decompressed) stream
    num_bytes      (blocks,)  bytes of the block, frames included
    counts         (blocks,)  records
    first_records  (blocks,)  number of the block's first record in the shard
    runs           (…)        for each block, one behind the other: 0, then the bytes of each run of 32 records but
                              the last (modulo 2**32: of a block that is too large to be in memory, none is
                              used); none for a compressed shard without restart points
    crcs           (blocks,)  CRC32C of what the block's records hold; none for a TFRecord shard on this machine, nor
                              for one whose blocks are not read together
    passing        (bytes,)   a bit for each record by its number, the lowest of a byte first: whether it meets the
                              ``where=`` of the data set; none where there is no such condition
    weights        (records,) the float16 of each record by its number that ``sample=`` of the data set gives it, its
                              bits as an integer; none where records have no weights

Each is an array of the smallest unsigned integers that hold it: the daemon keeps the indexes of all shards.

Where a record starts is known only from the one before, so a reader would have to go from one to the next. The
**anchors** of a block are the offsets in it of every 32nd record; they are the sums of its runs. A reader goes on
from all anchors of a block (or of several blocks) at once, and so takes 32 times fewer steps.

The **CRCs** show that a block which was fetched is the one that was indexed. On this machine, size and time are
looked at after each read. For an object in a bucket, that would take a request; and its time is in whole seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Protocol, get_args

import msgpack
import numpy as np
import numpy.typing as npt

from loaderd.errors import Damage, LoaderdError, ShardReadError
from loaderd.formats.compression import (
    OnRead,
    compression_of_head,
    detect_compression,
    most_record_bytes,
    no_callback,
    open_stream,
)
from loaderd.formats.framing import RecordChunk, scan
from loaderd.formats.inflate import MAX_WHOLE_BYTES, MOST_INFLATED, inflate_member
from loaderd.formats.kinds import is_frame
from loaderd.formats.point_finder import SPAN_BYTES
from loaderd.formats.restart_points import RestartPoints
from loaderd.kernels.crc import (
    HEADER_BYTES,
    Bytes1D,
    chain_crcs,
    check_data_crcs,
    crc32c,
    masked_crc,
    stored_crcs,
)
from loaderd.kernels.frames import Ends, walk
from loaderd.redaction import redacted
from loaderd.schema.record_values import RecordValues
from loaderd.storage.access import Access
from loaderd.storage.files import open_shard, read_shard
from loaderd.storage.shard_file import PLAIN, Compression, RestartPoint, ShardFile, is_remote

INDEX_VERSION = 9
ANCHOR_RECORDS = 32
MAX_BLOCK_BYTES = 8 << 20
_MOST_TOGETHER_BYTES = 64 << 20
"""Of small shards that are in memory together, inflated."""
# A damage takes some 300 bytes of memory, and may be of 16 bytes in the shard.
MOST_DAMAGES = 250_000
_HINT_DAMAGES = "Restore the file, or write it anew if what wrote it left out the CRCs."
# The name of a file may be no valid Unicode.
_UNICODE_ERRORS = "surrogatepass"
_ANCHORS = np.dtype("<u4")
_ANCHOR = bytes(_ANCHORS.itemsize)
"""The anchors of a block that has but one, its own start."""
# What a damage takes beside its texts: the names of its fields, and its numbers.
_DAMAGE_BYTES = 100
_DAMAGE_NUMBERS = ("record", "offset", "lost_bytes", "other_records")
_COMPRESSIONS = get_args(Compression)
_MOST_NUMBER, _ANY_COUNT = 1 << 53, 512 << 20
_ARRAYS = ("offsets", "num_bytes", "counts", "first_records", "runs", "crcs", "passing", "weights")
_LENGTHS = ("blocks", "num_runs", "num_crcs", "num_passing", "num_weights")
"""The names of how many items each shard has in them: of the first four arrays, and of each of the others."""
_DTYPES = {item_bytes: np.dtype(f"<u{item_bytes}") for item_bytes in (1, 2, 4, 8)}

LEAST_WEIGHT, MOST_WEIGHT = 2.0**-14, 65504.0
"""Of the weights that are not 0: float16 holds those below with fewer digits, or not at all, and none above."""

Uints = npt.NDArray[np.unsignedinteger[Any]]

_NONE: Uints = np.zeros(0, dtype=np.uint8)


@dataclass(eq=False)  # not frozen, which takes twice the time to make: shards may be many
class ShardIndex:
    """Blocks and damage of one shard; the arrays are drawn in the module's docstring.

    ``digest``: a CRC32C of what its records hold; the same for the same records, however they are compressed.
    ``points``: where it can be entered, if it is compressed and can; then all of its blocks are in what is inflated.
    ``error``: why the shard could not be indexed; then it has no blocks. Never encoded.
    """

    file: ShardFile
    compression: Compression
    digest: int
    damages: tuple[Damage, ...]
    offsets: Uints
    num_bytes: Uints
    counts: Uints
    first_records: Uints
    runs: Uints
    crcs: Uints = field(default_factory=_NONE.copy)
    passing: Uints = field(default_factory=_NONE.copy)
    weights: Uints = field(default_factory=_NONE.copy)
    points: RestartPoints | None = field(default=None, kw_only=True)
    error: LoaderdError | None = field(default=None, kw_only=True)

    @classmethod
    def of_unreadable(cls, file: ShardFile, error: LoaderdError) -> ShardIndex:
        """What stands in for the index of a shard that cannot be indexed: one damage, and nothing else."""
        damage = error.damage or Damage(file.uri, 0, 0, "a shard that can be indexed", error.message, lost_bytes=-1)
        return cls(file, "none", 0, (damage,), _NONE, _NONE, _NONE, _NONE, _NONE, error=error)

    @property
    def num_records(self) -> int:
        """Healthy records."""
        return int(self.counts.sum())

    @property
    def end(self) -> int:
        """The number behind that of the last healthy record."""
        return int(self.first_records[-1]) + int(self.counts[-1]) if len(self.counts) else 0

    @property
    def num_damaged_members(self) -> int:
        """How many of its damages are members of a tar, each of which counts as one, whatever it holds."""
        return len(self.damages) if self.compression == "tar" else 0

    @property
    def value_arrays(self) -> tuple[str, ...]:
        """Which of ``passing`` and ``weights`` it has."""
        return ("passing",) * bool(len(self.passing)) + ("weights",) * bool(len(self.weights))

    @property
    def without_values(self) -> ShardIndex:
        """The same, without ``passing`` and ``weights``."""
        return replace(self, passing=_NONE, weights=_NONE)

    @property
    def num_passing(self) -> int:
        """Healthy records whose bit is set; 0 where there are no bits."""
        return int(self._sum_of_passing(np.ones(self.end, dtype=np.int64))) if len(self.passing) else 0

    @property
    def total_weight(self) -> float:
        """The sum of the weights of healthy records whose bit is set, if there are bits; 0 where there are none."""
        weights = self.weights.astype(np.uint16).view(np.float16).astype(np.float64)
        return float(self._sum_of_passing(weights)) if len(weights) else 0.0

    def _sum_of_passing(self, values: npt.NDArray[Any]) -> Any:
        if len(self.passing):
            values = values * np.unpackbits(self.passing, count=len(values), bitorder="little")
        ends = np.append(0, np.cumsum(values))
        first = self.first_records.astype(np.int64)
        return (ends[first + self.counts] - ends[first]).sum()

    @cached_property
    def _run_ends(self) -> Uints:
        """(blocks,): where in ``runs`` those of each block end."""
        return shrunk(np.cumsum(-(-self.counts.astype(np.int64) // ANCHOR_RECORDS)))

    def block(self, number: int) -> tuple[int, int, int, int, bytes, int | None, RestartPoint | None]:
        """(offset, num_bytes, count, first_record, anchors, CRC, point) of a block, as ``Block`` has them. 2 µs."""
        anchors = b""
        if len(self.runs) == 1:
            anchors = _ANCHOR
        elif len(self.runs) and (self.points is None or self.num_bytes.item(number) <= MAX_WHOLE_BYTES):
            ends = self._run_ends
            start = ends.item(number - 1) if number else 0
            # As np.cumsum, in half the time.
            anchors = np.add.accumulate(self.runs[start : ends.item(number)], dtype=_ANCHORS).tobytes()
        return (
            self.offsets.item(number),
            self.num_bytes.item(number),
            self.counts.item(number),
            self.first_records.item(number),
            anchors,
            self.crcs.item(number) if len(self.crcs) else None,
            None if self.points is None else self.points.at(self.offsets.item(number)),
        )

    @property
    def damage_bytes(self) -> int:
        """How many bytes the damages take in :func:`encode_indexes`, at most."""
        texts = (f"{damage.shard}{damage.expected}{damage.found}" for damage in self.damages)
        return sum(len(text.encode(errors=_UNICODE_ERRORS)) + _DAMAGE_BYTES for text in texts)


class ValueSink(Protocol):
    """Computes values of the records of a group of shards, while their indexes are made."""

    def begin(self, first: int) -> None:
        """The records that come next are those of a shard behind the ``first`` healthy ones of the group.

        Nothing that was added behind those counts: with 0, nothing at all.
        """

    def add(self, piece: RecordChunk) -> None:
        """Take in the healthy records of a piece."""

    def drop(self, record: int) -> None:
        """What was added of the shard from this record on does not count: it cannot be read."""

    def put_into(self, indexes: Sequence[ShardIndex]) -> list[ShardIndex]:
        """The indexes of the group with the values; that of an unreadable shard as it is.

        Raises an error where the values could not be computed of a record that counts.
        """
        ...


Indexes = Mapping[RecordValues | None, Mapping[ShardFile, ShardIndex]]
"""The index of each shard, by what it holds of each record; None: nothing."""


def encode_indexes(indexes: Sequence[ShardIndex]) -> bytes:
    """Indexes as bytes, with a version in front and a CRC behind; without the secrets of their URIs.

    Arrays of all are joined: small shards are many, and each array costs more than what is in it.
    """
    columns = [list(map(attrgetter(name), indexes)) for name in _ARRAYS]
    joined = [shrunk(column[0] if len(column) == 1 else np.concatenate(column)) for column in columns]
    body: bytes = msgpack.packb(
        {
            "version": INDEX_VERSION,
            "files": [_identity(index.file) for index in indexes],
            "compressions": [index.compression for index in indexes],
            "digests": [index.digest for index in indexes],
            "damages": [[damage.to_wire() for damage in index.damages] for index in indexes],
            "blocks": [len(index.counts) for index in indexes],
            "num_runs": [len(index.runs) for index in indexes],
            "num_crcs": [len(index.crcs) for index in indexes],
            "num_passing": [len(index.passing) for index in indexes],
            "num_weights": [len(index.weights) for index in indexes],
            "points": [None if index.points is None else index.points.to_wire() for index in indexes],
            **{name: _array_to_wire(array) for name, array in zip(_ARRAYS, joined, strict=True)},
        },
        unicode_errors=_UNICODE_ERRORS,
    )
    return body + masked_crc(body).to_bytes(4, "little")


def decode_indexes(data: bytes, files: Sequence[ShardFile] | None = None) -> list[ShardIndex]:
    """The indexes that ``encode_indexes`` wrote; raises ValueError where they are of another version, or damaged.

    ``files``: those of which they must be, whose URIs have their secrets; None: of any.
    """
    body = data[:-4]
    if len(data) < 5 or masked_crc(body) != int.from_bytes(data[-4:], "little"):
        raise ValueError("its CRC does not match")
    try:
        fields: dict[str, Any] = msgpack.unpackb(body, unicode_errors=_UNICODE_ERRORS)
        if fields["version"] != INDEX_VERSION:
            raise ValueError(f"it is of version {fields['version']}, not {INDEX_VERSION}")
        if files is None:
            files = [ShardFile(file[0], file[1], file[2], tuple(map(tuple, file[3]))) for file in fields["files"]]
        elif fields["files"] != list(map(_identity, files)):
            raise ValueError("it is of other files")
        arrays = [np.frombuffer(items, _DTYPES[size]) for size, items in map(fields.__getitem__, _ARRAYS)]
        bounds = [list(accumulate(fields[name], initial=0)) for name in _LENGTHS]
        if [*map(len, arrays)] != [bounds[0][-1]] * 3 + [of_kind[-1] for of_kind in bounds]:
            raise ValueError("its arrays are of other lengths")
        if not all(
            number in (0, of_shard) for number, of_shard in zip(fields["num_crcs"], fields["blocks"], strict=True)
        ):
            raise ValueError("it has no CRC of some blocks")
        times = [
            (1 if points is None else 1 << 20) if compression not in ("gzip", "zlib") else MOST_INFLATED
            for compression, points in zip(fields["compressions"], fields["points"], strict=True)
        ]
        sizes = [file.size_bytes * factor for file, factor in zip(files, times, strict=True)]
        _check_blocks(fields["compressions"], sizes, np.diff(bounds[0]), *arrays[:4])
        indexes = [
            ShardIndex(
                file,
                compression,
                digest,
                tuple(map(_damage_of, damages)) if damages else (),
                *[array[slice(*own)] for array, own in zip(arrays, owns, strict=True)],
                points=None if points is None else RestartPoints.from_wire(points, file.size_bytes),
            )
            for file, compression, digest, damages, points, *owns in zip(
                files,
                *[fields[name] for name in ("compressions", "digests", "damages", "points")],
                *map(pairwise, [bounds[0]] * 3 + bounds),
                strict=True,
            )
        ]
        if any(len(index.passing) and len(index.passing) != -(-index.end // 8) for index in indexes):
            raise ValueError("it has no bit of some records")
        if any(len(index.weights) not in (0, index.end) for index in indexes):
            raise ValueError("it has no weight of some records")
        # As integers, infinity, what is no number and what is below 0 are above.
        if arrays[-1].max(initial=0) > np.float16(MOST_WEIGHT).view(np.uint16):
            raise ValueError("its weights are none")
        return indexes
    except (LookupError, TypeError) as error:  # of another version, whatever number it has
        raise ValueError(f"it is no index: {error!r}") from None


def _damage_of(wire: dict[str, Any]) -> Damage:
    kinds = [*[(name, str) for name in ("shard", "expected", "found")], *[(name, int) for name in _DAMAGE_NUMBERS]]
    if not all(type(wire[name]) is kind for name, kind in kinds):
        raise ValueError("a damage of it is none")
    return Damage(**wire)


def _check_blocks(
    compressions: Sequence[Any], most_bytes: Sequence[int], blocks: npt.NDArray[Any], *of_blocks: Uints
) -> None:
    """Raise ValueError where blocks lie outside of their shards, or hold more records than there can be.

    ``most_bytes``: of each shard, inflated. An index may be forged: memory is taken for the numbers in it.
    """
    if not all(isinstance(each, str) and each in _COMPRESSIONS for each in compressions):
        raise ValueError("its compressions are unknown")
    if any(len(column) and column.max() > _MOST_NUMBER for column in of_blocks):
        raise ValueError("its numbers are too large")
    offsets, num_bytes, counts, _ = (column.astype(np.int64) for column in of_blocks)
    sizes = np.repeat(most_bytes, blocks)
    # A block of zstd, of a tar and of an npz holds more than its bytes in the file.
    is_plain = np.repeat([compression in PLAIN for compression in compressions], blocks)
    most = np.where(is_plain, num_bytes, _ANY_COUNT + 1000 * np.minimum(sizes, 1 << 50))
    if (offsets + num_bytes > sizes).any() or (counts > most).any() or not counts.all():
        raise ValueError("its blocks are not of these files")


def _identity(file: ShardFile) -> list[Any]:
    """What tells a shard from others."""
    columns = [[name, redacted(uri), size_bytes, mtime_ns] for name, uri, size_bytes, mtime_ns in file.columns]
    return [redacted(file.uri), file.size_bytes, file.mtime_ns, columns]


_ZERO: Uints = np.zeros(1, dtype=np.uint8)


def shrunk(numbers: npt.NDArray[Any]) -> Uints:
    """The same numbers (none below 0) as the smallest unsigned integers that hold them."""
    return numbers.astype(np.min_scalar_type(numbers.max(initial=0)))


def _array_to_wire(numbers: Uints) -> list[Any]:
    """[bytes of an item, the items, little-endian]."""
    return [numbers.itemsize, numbers.astype(_DTYPES[numbers.itemsize], copy=False).tobytes()]


def build_index(
    file: ShardFile,
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: ValueSink | None = None,
) -> ShardIndex:
    """Read a shard from front to back, check both CRCs of every record, and note its blocks and damage.

    ``values``: what its records are added to.
    Raises ShardReadError where the file is not there, or changes meanwhile, and StorageError.
    """
    with closing(open_shard(file, access)) as opened:
        compression = detect_compression(file.uri, opened.read_at, file.size_bytes)
        damages: list[Damage] = []
        next_record = digest = 0
        stream = open_stream(file.uri, opened.read_at, compression, on_read, finds_points=True)
        blocks = _Blocks(block_records if compression == "none" else None, is_remote(file.uri), stream.point_offsets)
        most_bytes = most_record_bytes(compression, file.size_bytes)
        for piece in scan(file.uri, stream.read_into, most_bytes=most_bytes, jump_to=stream.jump_to):
            if isinstance(piece, Damage):
                add_damage(damages, piece)
                next_record = piece.record + 1
            else:
                blocks.add(piece)
                digest = chain_crcs(piece.buffer, piece.ends, digest)
                if values is not None:
                    values.add(piece)
                next_record = piece.first_record + piece.num_records
        if stream.damage is not None:
            damages.append(_place(stream.damage, next_record, damages))
        opened.check_unchanged()
    return ShardIndex(file, compression, digest, tuple(damages), *blocks.arrays(), points=stream.points())


def add_damage(damages: list[Damage], damage: Damage) -> None:
    """Raise ShardReadError where a shard has more damages than are named one by one: it is useless as a whole."""
    if len(damages) == MOST_DAMAGES:
        first = damages[0]
        text = f"{first.shard} has more than {MOST_DAMAGES:,} damages. The first: {first}"
        raise ShardReadError(text, hint=_HINT_DAMAGES, damage=replace(first, lost_bytes=-1))
    damages.append(damage)


def build_indexes(
    files: Sequence[ShardFile],
    block_records: int,
    on_read: OnRead = no_callback,
    access: Access | None = None,
    values: ValueSink | None = None,
) -> list[ShardIndex] | None:
    """As :func:`build_index`, of small shards that are read into memory together: most steps are one call for all.

    None where any of them is damaged, has several gzip members, or holds more than a restart point does. ``on_read``
    is called with the bytes of all so far.
    """
    found = contents_of(files, lambda data, _: not data or is_frame(data), on_read, access)
    if found is None:
        return None
    contents, compressions = found
    bounds = [0, *accumulate(map(len, contents))]
    buffer: Bytes1D = np.frombuffer(bytearray().join(contents), dtype=np.uint8)
    ends = walk(buffer, 0, len(buffer))
    firsts = np.searchsorted(ends, bounds)
    if ends[-1] != len(buffer) or not np.array_equal(ends[firsts], bounds):
        return None
    if check_data_crcs(buffer, ends):
        return None
    if values is not None:
        values.add(RecordChunk(buffer, ends, 0, 0))
    crcs = stored_crcs(buffer, ends)
    sizes, counts = (shrunk(np.diff(column)[:, np.newaxis]) for column in (np.array(bounds), firsts))
    indexes = []
    for file, compression, size, count, (first, stop) in zip(
        files, compressions, sizes, counts, pairwise(firsts.tolist()), strict=True
    ):
        digest = crc32c(crcs[first:stop])
        points = None if compression == "none" else RestartPoints.of_start(file.size_bytes)
        of_block = block_records if points is None else ANCHOR_RECORDS
        if first < stop <= first + min(of_block, ANCHOR_RECORDS):  # as below, in a tenth of the time
            of_block_crc = np.array([digest], dtype=np.uint32) if is_remote(file.uri) else _NONE
            arrays: Sequence[Uints] = (_ZERO, size, count, _ZERO, _ZERO, of_block_crc)
        else:
            blocks = _Blocks(
                block_records if points is None else None, is_remote(file.uri), None if points is None else [0]
            )
            blocks.add(RecordChunk(buffer, ends[first : stop + 1], 0, 0))
            arrays = blocks.arrays()
        indexes.append(ShardIndex(file, compression, digest, (), *arrays, points=points))
    return indexes


def contents_of(
    files: Sequence[ShardFile],
    is_right: Callable[[bytes, Compression], bool],
    on_read: OnRead = no_callback,
    access: Access | None = None,
) -> tuple[list[bytes], list[Compression]] | None:
    """What small shards hold, without their compression, and that.

    None where any of them is damaged, is not ``is_right``, has several gzip members, or holds more than a restart
    point does. ``on_read``: as of :func:`build_indexes`.
    """
    access = access or Access()  # for all: to make one takes longer than all else
    contents, compressions, left_bytes = list[bytes](), list[Compression](), _MOST_TOGETHER_BYTES
    stored = memoryview(bytearray(max(file.size_bytes for file in files) + 1))
    begin = 0
    for file in files:
        if not read_shard(file, stored[: file.size_bytes + 1], access):  # a byte is asked for even of an empty one
            return None
        compression = compression_of_head(bytes(stored[: min(file.size_bytes, HEADER_BYTES)]))
        data: bytes | None = bytes(stored[: file.size_bytes])
        if compression != "none":
            data = inflate_member(stored[: file.size_bytes], compression, min(SPAN_BYTES, left_bytes))
        if data is None or not is_right(data, compression):  # then the others need not be read
            return None
        contents.append(data)
        compressions.append(compression)
        left_bytes -= len(data)
        begin += file.size_bytes
        on_read(begin)
    return contents, compressions


def _place(ended: Damage, next_record: int, damages: list[Damage]) -> Damage:
    """The damage that ends a compressed stream, with its record: the one that is cut, or the next."""
    if damages and damages[-1].offset + damages[-1].lost_bytes == ended.offset:
        cut = damages.pop()
        return replace(ended, record=cut.record, offset=cut.offset)
    return replace(ended, record=next_record)


class _Blocks:
    """Cuts healthy stretches of records into blocks."""

    def __init__(self, block_records: int | None, has_crcs: bool, cuts: list[int] | None = None) -> None:
        """``block_records``: None: compressed. ``cuts``: where that can be entered, as far as it was read."""
        self._block_records, self._cuts = block_records, cuts
        self._has_anchors = block_records is not None or cuts is not None
        self._crcs: list[int] | None = [] if has_crcs and self._has_anchors else None
        self._rows: list[tuple[int, int, int, int]] = []
        self._anchors: list[npt.NDArray[np.uint32]] = []

    def add(self, piece: RecordChunk) -> None:
        """Take in the healthy records of ``piece``."""
        begin = 0
        for bad in (*piece.bad, piece.num_records):
            if bad > begin:
                self._add_stretch(piece, begin, bad)
            begin = bad + 1

    def _add_stretch(self, piece: RecordChunk, begin: int, end: int) -> None:
        ends: Ends = piece.ends
        base = piece.offset - int(ends[0])
        while begin < end:
            offset, record = base + int(ends[begin]), piece.first_record + begin
            room = self._room(offset)
            if room == 0:
                self._rows.append((offset, 0, 0, record))
                if self._crcs is not None:
                    self._crcs.append(0)
                room = self._room(offset)
            take = min(end - begin, room)
            if self._cuts is not None:
                take = min(take, 1 + self._starts_before_cut(base + ends[begin + 1 : begin + take]))
            start, num_bytes, count, first = self._rows[-1]
            if self._has_anchors:
                due = ends[begin + -count % ANCHOR_RECORDS : begin + take : ANCHOR_RECORDS]
                self._anchors.append((due - (start - base)).astype(np.uint32))
            if self._crcs is not None:
                self._crcs[-1] = chain_crcs(piece.buffer, ends[begin : begin + take + 1], self._crcs[-1])
            num_bytes += int(ends[begin + take] - ends[begin])
            self._rows[-1] = (start, num_bytes, count + take, first)
            begin += take

    def _room(self, offset: int) -> int:
        """How many records the last block can still take, the next one being at ``offset``."""
        if not self._rows:
            return 0
        start, num_bytes, count, _ = self._rows[-1]
        if start + num_bytes != offset:
            return 0
        if self._block_records is not None:
            return self._block_records - count if num_bytes < MAX_BLOCK_BYTES else 0
        # Between two points, every block would be inflated from the first of them: so there is one.
        return 1 << 62 if self._cuts is None or self._next_cut() > offset else 0

    def _next_cut(self) -> int:
        """The first cut behind the start of the last block."""
        assert self._cuts is not None
        number = bisect_right(self._cuts, self._rows[-1][0])
        return self._cuts[number] if number < len(self._cuts) else 1 << 62

    def _starts_before_cut(self, starts: Ends) -> int:
        """How many of the records that begin there still belong to the last block."""
        return int(np.searchsorted(starts, self._next_cut()))

    def arrays(self) -> tuple[Uints, ...]:
        """The arrays of :class:`ShardIndex`, in its order."""
        table = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        anchors = np.concatenate([*self._anchors, np.zeros(0, dtype=np.uint32)])
        runs = np.diff(anchors, prepend=np.uint32(0))
        runs[anchors == 0] = 0  # a block's first
        crcs = np.array(self._crcs or (), dtype=np.uint32)
        return *(shrunk(column) for column in table.T), shrunk(runs), shrunk(crcs)

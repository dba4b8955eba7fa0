"""What is promised of damaged and of evil shards of records of a fixed size.

As of TFRecord (``mutations``), a case is read twice. Nothing but a LoaderdError is raised. Each number is a record or
named, and not both. Where CRCs tell, a record is one of the original ones. What a tar has in front of the change is
delivered. And no bomb takes more memory than is allowed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from loaderd.errors import Damage, ShardReadError
from loaderd.formats.fixed_blocks import FixedBlockReader
from loaderd.formats.fixed_index import build_fixed_index
from loaderd.formats.indexer import make_index
from loaderd.formats.shard_index import ShardIndex, decode_indexes, encode_indexes
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import Block, ShardFile
from loaderd.worker.window_loader import BlockPlacement, WindowLoader
from tests.helpers.fixed_files import RECORDS, SCHEMA
from tests.reliability.evil import EVIL, RECORD_BYTES, FixedShard, bomb, other_members
from tests.reliability.mutate import BYTES
from tests.reliability.plain_frames import common_prefix

MOST_MIB = 250
"""What a bomb may add to the memory of a process: zstd takes 128 MiB for the largest window that it accepts."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)


@dataclass(frozen=True)
class FixedCase:
    """A shard, and what became of it."""

    kind: str
    shard: FixedShard
    data: bytes
    block_records: int

    @property
    def is_checked(self) -> bool:
        """Whether CRCs tell each record that is another one, as they do where a disk fails.

        Who makes a shard anew makes its right CRCs, too, or leaves out the end, where they are. A gzip whose end is
        changed is taken for one that is cut, if the size there cannot be: what is in front of a cut has no CRC.
        """
        is_made = EVIL[self.shard.wrapping].get(self.kind) is other_members
        ends = {"gzip": [len(self.shard.data)], "tar": [end for _, end, _ in self.shard.members]}
        ends_alike = all(
            self.data[end - 4 : end] == self.shard.data[end - 4 : end] for end in ends.get(self.shard.wrapping, [])
        )
        return self.shard.is_checked and ends_alike and not is_made


def make_case(rng: Random, shards: list[FixedShard]) -> FixedCase:
    shard, other = rng.choice(shards), rng.choice(shards)
    if EVIL[shard.wrapping] and rng.randrange(10) < 7:
        kind, make = rng.choice(list(EVIL[shard.wrapping].items()))
        data = make(shard, rng)
    else:
        kind, change = rng.choice(list(BYTES.items()))
        kind, data = f"{shard.wrapping}, {kind}", change(shard.data, rng, other.data)
    return FixedCase(kind, shard, data, rng.choice([7, 1024]))


def check_case(case: FixedCase, path: Path, rng: Random, counts: Counter[str]) -> None:
    _check_found(case, path, rng, counts)
    _check_late(case, path, rng, counts)


def _check_found(case: FixedCase, path: Path, rng: Random, counts: Counter[str]) -> None:
    """Index the damaged file and read it."""
    path.write_bytes(case.data)
    (file,) = list_shards(path)
    prefix = common_prefix(case.shard.data, case.data)
    in_front = sum(count for _, end, count in case.shard.members if end + -end % 512 <= prefix)
    try:
        index = build_fixed_index(file, RECORDS, case.block_records)
    except ShardReadError as error:
        check(error.damage is not None and len(str(error)) < 3000, f"{error} is no reason")
        check(not in_front, f"{in_front} records in front of the change are lost: {error}")
        counts["fixed: shards refused"] += 1
        return
    records, late = _read(file, index)
    check(not late, f"damage that the index did not see: {late[:3]}")
    named = [damage.record for damage in index.damages]
    check(sorted([*records, *named]) == list(range(len(records) + len(named))), "numbers are missing, or come twice")
    check(index.num_records == len(records), "the index counts other records")
    # A file whose first bytes are no gzip's any more is one of plain records, which have no CRC.
    if case.is_checked and index.compression == case.shard.wrapping:
        check(set(records.values()) <= set(case.shard.records), "a record that is none of the original ones")
    check([records.get(number) for number in range(in_front)] == list(case.shard.records[:in_front]), "lost in front")
    for damage in index.damages:
        check(bool(damage.expected and damage.found) and len(str(damage)) < 2000, f"{damage} is no reason")
    (kept,) = decode_indexes(encode_indexes([index]), [file])
    check((kept.num_records, kept.damages) == (index.num_records, index.damages), "an index that is kept as another")
    _check_rows(file, index, records, rng)
    counts["fixed: records delivered"] += len(records)
    counts["fixed: damages found"] += len(named)


def _check_late(case: FixedCase, path: Path, rng: Random, counts: Counter[str]) -> None:
    """Index the healthy file, change it, and read it."""
    path.write_bytes(case.shard.data)
    (file,) = list_shards(path)
    index = build_fixed_index(file, RECORDS, case.block_records)
    check(index.num_records == len(case.shard.records) and not index.damages, "a healthy shard is damaged")
    path.write_bytes((case.data + bytes(file.size_bytes))[: file.size_bytes])
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    records, named = _read(file, index)
    check(sorted([*records, *named]) == list(range(index.num_records)), "a number is not named, or named twice")
    if case.is_checked and len(case.data) <= file.size_bytes:  # else the CRC of what was changed may be cut off
        check(set(records.values()) <= set(case.shard.records), "late, a record that is none of the original ones")
    _check_rows(file, index, records, rng)
    counts["fixed: records of healthy shards"] += index.num_records
    counts["fixed: records lost late"] += len(named)


def _read(file: ShardFile, index: ShardIndex) -> tuple[dict[int, bytes], list[int]]:
    """The records by number, and the numbers of those that are damaged."""
    reader = FixedBlockReader(RECORDS, [file], [index.compression])
    records: dict[int, bytes] = {}
    named: list[int] = []
    for block in _blocks(index):
        numbers = range(block.first_record, block.first_record + block.num_records)
        of_block: dict[int, bytes] = {}
        lost: list[int] = []
        try:
            for found in reader.read(block, 0, block.num_records):
                if isinstance(found, Damage):
                    lost.append(found.record)
                    continue
                data = found.buffer.tobytes()
                for place in range(found.num_records):
                    record = data[place * RECORD_BYTES : (place + 1) * RECORD_BYTES]
                    check(found.first_record + place not in of_block, "a record comes twice")
                    of_block[found.first_record + place] = record
        except ShardReadError as error:
            check(error.damage is not None, f"{error} names no damage")
            of_block, lost = {}, list(numbers)
        check(set(of_block) | set(lost) <= set(numbers), "records that the block does not have")
        records |= of_block
        named += lost
        run = reader.read_together([block]) if reader.can_read_together(block) else None
        if run is not None:
            fast = run[0][: block.num_records * RECORD_BYTES].tobytes()
            check(not lost and fast == b"".join(of_block.values()), "read together, the records are others")
    reader.close()
    return records, named


def _check_rows(file: ShardFile, index: ShardIndex, records: dict[int, bytes], rng: Random) -> None:
    """What a worker makes of the blocks: each place has the row of its record, or a fault."""
    places = list(range(index.num_records))
    rng.shuffle(places)
    parts, number_of = [], {}
    for block in _blocks(index):
        of_block = places[len(number_of) :][: block.num_records]
        number_of |= {place: block.first_record + number for number, place in enumerate(of_block)}
        parts.append(BlockPlacement(block, np.array(of_block)))
    window = np.zeros((len(places), SCHEMA.row_bytes), np.uint8)
    loader = WindowLoader(SCHEMA, [file], [index.compression])
    bad = [place for of_fault, _ in loader.load(parts, window) for place in of_fault]
    loader.close()
    check(len(set(bad)) == len(bad), "a place has two faults")
    found = window.view(SCHEMA.row_dtype)["number"].reshape(-1)
    for place in set(places) - set(bad):
        record = np.frombuffer(records.get(number_of[place], b""), RECORDS.dtype)
        check(record["number"].tolist() == [found[place]], f"the row of record {number_of[place]} is another")


def _blocks(index: ShardIndex) -> list[Block]:
    return [Block(0, *index.block(number)) for number in range(len(index.counts))]


def check_bomb(path: Path, rng: Random, counts: Counter[str]) -> str:
    """Index a bomb, and read its last record; returns what it was."""
    what, data, is_tfrecord = bomb(rng)
    path.write_bytes(data)
    del data
    (file,) = list_shards(path)
    _forget_peak()
    before_mib = _peak_mib()
    try:
        index = make_index(file, None if is_tfrecord else RECORDS, 1024)
        check(bool(index.num_records or index.damages), "nothing is said of it")
        counts["bombs: records"] += index.num_records
        counts["bombs: damages"] += len(index.damages)
        for block in _blocks(index)[:1] if not is_tfrecord else []:
            reader = FixedBlockReader(RECORDS, [file], [index.compression])
            for _ in reader.read(block, block.num_records - 1, block.num_records):
                pass
            reader.close()
    except ShardReadError as error:
        check(error.damage is not None, f"{error} names no damage")
        counts["bombs: refused"] += 1
    took_mib = _peak_mib() - before_mib
    check(took_mib < MOST_MIB, f"{what} took {took_mib} MiB")
    counts["bombs: most MiB"] = max(counts["bombs: most MiB"], took_mib)
    return f"a bomb: {what}"


def _forget_peak() -> None:
    """Have the kernel count the peak anew; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) >> 10

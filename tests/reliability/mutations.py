"""The mutation test: shards are damaged in every way, and held to what is promised of them.

``python -m tests.reliability.mutations --count 200000`` runs the long one. Each case follows from ``--seed`` and its
number alone; ``--first 4711 --count 1`` does one again.

A case is read twice. **Found**: the damaged file is indexed and read. **Late**: the healthy file is indexed, then
damaged (its size and time forced to what they were) and read. Of both:

- nothing but a LoaderdError is raised, and no case takes longer than ``LIMIT_S`` seconds;
- a record that is delivered is one of the original ones, or stands in the damaged file with both CRCs right;
- what is decoded of it is what the plain parser reads (looked at in a quarter of the cases, and wherever Examples are
  malformed: it takes longer than all the rest);
- every byte (found) and every number (late) is either delivered or named in a damage, and not twice;
- records in front of and behind what was changed are delivered, unless a frame whose length has the right CRC
  spans them (counted as ``swallowed``); late, those that stand between two damaged ones of one run of 32 may be lost,
  and those of a compressed shard behind the damage (counted by kind).

Every second case is a shard of records of a fixed size (``fixed_cases`` says what is promised of it): damaged, or
made by somebody who means ill (``evil``). Every fortieth is a bomb. In every fortieth, it is the index that somebody
has changed and given a right CRC: the bits of ``where=``, or the restart points. It is refused; or each number is the
record that the healthy index has, or named as damage.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import msgpack
import numpy as np

import loaderd
from loaderd.decode.example import RecordFault, parse_example
from loaderd.errors import CorruptRecordError, Damage, RecordMismatchError
from loaderd.formats import point_finder
from loaderd.formats.blocks import Block, BlockReader
from loaderd.formats.shard_index import ANCHOR_RECORDS, ShardIndex, build_index, decode_indexes, encode_indexes
from loaderd.kernels.crc import masked_crc
from loaderd.plan.selection import BitCondition
from loaderd.storage.files import list_shards
from loaderd.worker.window_loader import BlockPlacement, WindowLoader
from tests.reliability import evil, fixed_cases
from tests.reliability.mutate import BYTES, COMPRESS, HOSTILE, STREAM, Shard, healthy_shards
from tests.reliability.plain_frames import common_prefix, headers_in, valid_payloads
from tests.reliability.tensorflows_reader import TensorFlowsReader

BOMB_EVERY = 40
FORGED = 20
LIMIT_S = 60  # of the clock, on a machine that may be busy; a case takes milliseconds
SCHEMA = loaderd.Schema(
    features={"bits": loaderd.PackedBits(32), "id": loaderd.Int64(), "f": loaderd.Float((2,), default=0.5)},
    fields={"bits": loaderd.Packed("bits"), "id": loaderd.Array("id"), "f": loaderd.Array("f")},
)
_OFFSETS = {name: offset for name, (_, offset, *_) in (SCHEMA.row_dtype.fields or {}).items()}

Records = dict[int, bytes]


class Violation(AssertionError):
    """Something that is promised does not hold."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True)
class Case:
    """A shard and what became of it: ``data``; ``stream``: what there is of it without compression."""

    kind: str
    shard: Shard
    data: bytes
    stream: bytes
    block_records: int

    @property
    def name(self) -> str:
        """The kind, and whether the shard is compressed."""
        return f"{self.kind} (compressed)" if self.shard.compression != "none" else self.kind


def make_case(seed: int, number: int, shards: list[Shard]) -> Case:
    rng = Random(f"{seed}/{number}")
    shard = rng.choice(shards)
    compress = COMPRESS[shard.compression]
    where = rng.randrange(10)
    if where < 4:
        kind, mutate = rng.choice(list(STREAM.items()))
        data = compress(mutate(shard, rng))
    else:
        kind, change = rng.choice(list(BYTES.items()))
        other = rng.choice(shards)
        if shard.compression != "none" and where < 8:
            kind = f"compressed bytes, {kind}"
            data = change(compress(shard.stream), rng, COMPRESS[other.compression](other.stream))
        else:
            data = compress(change(shard.stream, rng, other.stream))
    return Case(kind, shard, data, inflated(data, shard.compression), rng.choice([7, 32, 40, 1024, 1024]))


def inflated(data: bytes, compression: str) -> bytes:
    """All that can be had of ``data``."""
    if compression == "none":
        return data
    bits = 15 if compression == "zlib" else 31
    for step in (len(data), 1):  # up to an error, an inflater gives everything if it is fed byte by byte
        out, inflater, rest = bytearray(), zlib.decompressobj(bits), data
        try:
            while rest:
                if inflater.eof:
                    inflater = zlib.decompressobj(bits)
                out += inflater.decompress(rest[:step])
                rest = inflater.unused_data + rest[step:]
        except zlib.error:
            continue
        break
    return bytes(out)


_rows: dict[bytes, bytes | None] = {}


def row_of(payload: bytes) -> bytes | None:
    """The row of a record by the plain parser; None where it does not fit the schema."""
    if payload not in _rows:
        if len(_rows) > 20_000:
            _rows.clear()
        parsed, row = parse_example(payload, SCHEMA.features), bytearray(SCHEMA.row_bytes)
        if not isinstance(parsed, RecordFault):
            for name, value in parsed.values.items():
                offset = _OFFSETS[name]
                row[offset : offset + len(value.data)] = value.data
        _rows[payload] = None if isinstance(parsed, RecordFault) else bytes(row)
    return _rows[payload]


# --------------------------------------------------------------------------------------------------- reading


def read_all(path: Path, index: ShardIndex) -> tuple[list[Block], Records, list[Damage]]:
    """The blocks of an index, what is in them by number, and the damage."""
    blocks = [Block(0, *index.block(number)) for number in range(len(index.counts))]
    reader = BlockReader([index.file], [index.compression])
    records: Records = {}
    damages = []
    for block in blocks:
        for found in reader.read(block, 0, block.num_records):
            if isinstance(found, Damage):
                damages.append(found)
                continue
            first = found.first_record
            for place, (start, length) in enumerate(zip(found.payload_starts, found.payload_lengths, strict=True)):
                if place not in found.bad:
                    check(first + place not in records, f"record {first + place} comes twice")
                    records[first + place] = found.buffer[start : start + length].tobytes()
    together = [block for block in blocks if reader.can_read_together(block)]
    run = reader.read_together(together) if together else None
    if run is not None:
        fast = [run[0][start + 12 : stop - 4].tobytes() for start, stop in itertools.pairwise(run[1].tolist())]
        numbers = [n for block in together for n in range(block.first_record, block.first_record + block.num_records)]
        check(fast == [records.get(number) for number in numbers], "read together, the records are others")
    reader.close()
    return blocks, records, damages


def check_rows(blocks: list[Block], index: ShardIndex, records: Records, rng: Random) -> None:
    """What a worker makes of the blocks: the rows of ``records`` in their places, a fault for each of the others."""
    numbers = [n for block in blocks for n in range(block.first_record, block.first_record + block.num_records)]
    places = list(range(len(numbers)))
    rng.shuffle(places)
    place_of = dict(zip(numbers, places, strict=True))
    parts, at = [], 0
    for block in blocks:
        parts.append(BlockPlacement(block, np.array(places[at : at + block.num_records])))
        at += block.num_records
    window = np.full((len(numbers), SCHEMA.row_bytes), 0xEE, dtype=np.uint8)
    with contextlib.closing(WindowLoader(SCHEMA, [index.file], [index.compression])) as loader:
        faults = loader.load(parts, window)
    bad = [place for of_fault, _ in faults for place in of_fault]
    check(len(set(bad)) == len(bad), "a place has two faults")
    for of_fault, error in faults:
        check(isinstance(error, CorruptRecordError | RecordMismatchError), f"{error!r} for damage")
        named = error.damage.record if error.damage is not None else None
        check(of_fault == [place_of.get(named)] if named is not None else False, f"{error} names another record")
    for number in numbers:
        row = row_of(records[number]) if number in records else None
        place = place_of[number]
        check(
            (row is None) == (place in set(bad)), f"record {number} should be {'a fault' if row is None else 'fine'}"
        )
        check(row is None or window[place].tobytes() == row, f"the row of record {number} is another")


# ---------------------------------------------------------------------------------------------------- checks


def _is_decoded(case: Case, rng: Random) -> bool:
    return "Examples" in case.kind or rng.randrange(4) == 0


def check_found(case: Case, path: Path, rng: Random, counts: Counter[str]) -> int:
    """Index the damaged file and read it; returns how many records were delivered."""
    path.write_bytes(case.data)
    (file,) = list_shards(path)
    index = build_index(file, case.block_records)
    blocks, records, late = read_all(path, index)
    check(not late, f"damage that the index did not see: {late[:1]}")
    stream = case.data if index.compression == "none" else case.stream
    headers = headers_in(stream)
    allowed = valid_payloads(stream, headers)
    delivered = [records[number] for number in sorted(records)]
    check(set(delivered) <= allowed, "a record that is nowhere in the file")
    check(index.num_records == len(delivered), "the index counts other records")
    damaged = [damage.record for damage in index.damages]
    check(len(set(damaged)) == len(damaged) and not set(damaged) & set(records), "a number is named twice")
    known = sum(len(payload) + 16 for payload in delivered) + sum(max(d.lost_bytes, 0) for d in index.damages)
    ends_early = any(damage.lost_bytes < 0 for damage in index.damages)
    check(known <= len(stream) if ends_early else known == len(stream), f"{known} of {len(stream)} bytes are named")
    for damage in index.damages:
        check(bool(damage.expected and damage.found) and len(str(damage)) < 2000, f"{damage} is no reason")
    check_ends(case, stream, headers, delivered, counts)
    if _is_decoded(case, rng):
        check_rows(blocks, index, records, rng)
    counts["damages found"] += len(index.damages)
    return len(delivered)


def check_ends(
    case: Case, stream: bytes, headers: dict[int, int], delivered: list[bytes], counts: Counter[str]
) -> None:
    """What lies in front of and behind the change is there."""
    original, starts, payloads = case.shard.stream, case.shard.starts, case.shard.payloads
    prefix = common_prefix(original, stream)
    front = sum(stop <= prefix for stop in starts[1:])
    check(delivered[:front] == list(payloads[:front]), "a record in front of the damage is lost")
    suffix = common_prefix(original[::-1], stream[::-1])
    behind = [number for number in range(front, len(payloads)) if starts[number] >= len(original) - suffix]
    shift = len(stream) - len(original)
    while behind:
        found = delivered[-len(behind) :] if len(behind) <= len(delivered) - front else []
        if found == [payloads[number] for number in behind]:
            break
        at = starts[behind[0]] + shift
        check(any(start < at < stop for start, stop in headers.items()), "a record behind the damage is lost")
        counts["swallowed"] += 1
        behind.pop(0)


def check_late(case: Case, path: Path, rng: Random, counts: Counter[str]) -> None:
    """Index the healthy file, damage it, and read it."""
    healthy = COMPRESS[case.shard.compression](case.shard.stream)
    path.write_bytes(healthy)
    (file,) = list_shards(path)
    index = build_index(file, case.block_records)
    data = (case.data + bytes(len(healthy)))[: len(healthy)]
    path.write_bytes(data)
    os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
    blocks, records, damages = read_all(path, index)
    stream, starts, payloads = inflated(data, case.shard.compression), case.shard.starts, case.shard.payloads
    headers = headers_in(stream)
    allowed = valid_payloads(stream, headers)
    named = [damage.record for damage in damages]
    check(sorted([*named, *records]) == list(range(len(payloads))), "a number is not named, or named twice")
    for number, payload in records.items():
        check(payload == payloads[number] or payload in allowed, f"record {number} is another")
        counts["other valid frames, late"] += payload != payloads[number]
    intact = {
        number
        for number, (start, stop) in enumerate(itertools.pairwise(starts))
        if stream[start:stop] == case.shard.stream[start:stop] and stop <= len(stream)
    }
    for number in intact - set(records):
        check(_may_be_lost(number, intact, index, case, headers, stream), f"record {number} is intact, and lost")
        counts[f"intact, but lost late: {case.name}"] += 1
    if _is_decoded(case, rng):
        check_rows(blocks, index, records, rng)


def _may_be_lost(
    number: int, intact: set[int], index: ShardIndex, case: Case, headers: dict[int, int], stream: bytes
) -> bool:
    """Whether an intact record may be lost late: between two damaged ones of the run that its anchor begins.

    So may be the rest of the run where damage looks like a frame: where lengths with right CRCs stand at other places
    than before, nobody can count the records.
    """
    first, run = 0, len(case.shard.payloads)
    if index.compression == "none":
        start = (number // case.block_records) * case.block_records if case.block_records else 0
        first = start + (number - start) // ANCHOR_RECORDS * ANCHOR_RECORDS
        run = min(first + ANCHOR_RECORDS, start + case.block_records, run)
    begin, end = case.shard.starts[first], case.shard.starts[run]
    hit = [other for other in range(first, run) if other not in intact]
    if hit and hit[0] < number < hit[-1]:
        return True
    if index.compression != "none" and len(stream) < end:
        return bool(hit) and number > hit[0]
    others = {start for start in headers if begin <= start < end} - set(case.shard.starts)
    return bool(others) or any(
        start in headers and headers[start] != stop
        for start, stop in itertools.pairwise(case.shard.starts[first : run + 1])
    )


FORGED_PAYLOADS = tuple(Random("forged").randbytes(60) for _ in range(1500))


def check_forged(path: Path, rng: Random, counts: Counter[str]) -> str:
    """Change what an index says of bits and restart points, and read by it; returns what was changed."""
    compression = rng.choice(["gzip", "zlib", "members"])
    path.write_bytes(COMPRESS[compression](Shard(FORGED_PAYLOADS).stream))
    (file,) = list_shards(path)
    with mock.patch.object(point_finder, "SPAN_BYTES", 20_000):
        index = build_index(file, 64)
    index.passing = np.frombuffer(rng.randbytes(-(-index.end // 8)), np.uint8)
    index.weights = np.arange(index.end, dtype=np.float16).view(np.uint16)
    fields = msgpack.unpackb(encode_indexes([index])[:-4])
    what, (mutation, change) = (
        rng.choice(["bits", "number of bits", "weights", "number of weights", "points", "windows"]),
        rng.choice([*BYTES.items()]),
    )
    points = fields["points"][0]
    if what == "bits":
        fields["passing"][1] = change(fields["passing"][1], rng, fields["weights"][1])
    elif what == "number of bits":
        size, bits = fields["passing"]
        fields["passing"][1] = bits[: rng.randrange(len(bits))]
        fields["num_passing"] = [rng.choice([*HOSTILE, len(fields["passing"][1]) // size])]
    elif what == "weights":
        fields["weights"][1] = change(fields["weights"][1], rng, fields["passing"][1])
    elif what == "number of weights":
        fields["num_weights"] = [rng.choice([*HOSTILE, index.end - 1])]
    elif isinstance(points, int):  # it has none but its start
        fields["points"] = [rng.choice([*HOSTILE, points + 1, points - 1])]
    elif what == "points":
        column = rng.randrange(3)
        points[column] = change(points[column], rng, points[rng.randrange(3)])
    else:
        number = rng.randrange(len(points[3]))
        bomb = zlib.compress(bytes(1 << 20))
        points[3][number] = rng.choice([b"", bomb, change(points[3][number] or b"x", rng, points[1])])
    body = msgpack.packb(fields)
    try:
        (forged,) = decode_indexes(body + masked_crc(body).to_bytes(4, "little"), [file])
    except ValueError:
        counts["forged: refused"] += 1
        return f"an index, {what}, {mutation}"
    numbers = list(range(len(FORGED_PAYLOADS)))
    passing = BitCondition(forged.passing)
    left = [bool(met) for block in range(len(forged.counts)) for met in passing.met_by(*_range_of(forged, block))]
    check(not len(forged.passing) or (len(left), sum(left)) == (len(numbers), forged.num_passing), "others are left")
    check(len(forged.weights) in (0, len(numbers)) and 0 <= forged.total_weight <= 65504 * len(numbers), "weights")
    _, records, damages = read_all(path, forged)
    check(sorted([*records, *(damage.record for damage in damages)]) == numbers, "a number is not named, or twice")
    check(all(payload == FORGED_PAYLOADS[number] for number, payload in records.items()), "a record is another")
    counts["forged: records"] += len(records)
    counts["forged: damages"] += len(damages)
    return f"an index, {what}, {mutation}"


def _range_of(index: ShardIndex, block: int) -> tuple[int, int]:
    first, count = int(index.first_records[block]), int(index.counts[block])
    return first, first + count


# ------------------------------------------------------------------------------------------------------- runs


def ask_tensorflow(reader: TensorFlowsReader, case: Case, path: Path, delivered: int, counts: Counter[str]) -> None:
    """Count what TensorFlow's reader makes of the file, of which loaderd delivered so many records."""
    found, end = reader.read(path)
    allowed = valid_payloads(case.stream, headers_in(case.stream))
    counts["TensorFlow: shards"] += 1
    counts["TensorFlow: records of the healthy shards"] += len(case.shard.payloads)
    counts["TensorFlow: records"] += len(found)
    counts["TensorFlow: records that are nowhere"] += sum(one not in allowed for one in found)
    counts["TensorFlow: more than loaderd"] += len(found) > delivered
    counts[f"TensorFlow: {end}"] += 1
    counts["loaderd: records of the same"] += delivered


def _too_long(*_: Any) -> None:
    raise Violation(f"it takes longer than {LIMIT_S} s")


def run(seed: int, first: int, count: int, tensorflow: int = 0) -> dict[str, Any]:
    """Cases ``first`` to ``first + count - 1``; of the first ``tensorflow`` plain ones, TensorFlow's reader is asked.

    Raises Violation, with the number of the case, where anything does not hold.
    """
    shards, fixed_shards = healthy_shards(), evil.healthy_shards()
    kinds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    reader = TensorFlowsReader() if tensorflow else None
    slowest_s, began_s = 0.0, time.perf_counter()
    signal.signal(signal.SIGALRM, _too_long)
    # In memory where there is such a folder: a disk takes longer to write a shard than all the rest.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        path = Path(folder, "shard")
        for number in range(first, first + count):
            rng, of_case, kind, case_began_s = (
                Random(number),
                Random(f"{seed}/{number}"),
                "a bomb",
                time.perf_counter(),
            )
            signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
            try:
                if number % BOMB_EVERY == BOMB_EVERY - 1:
                    kind = fixed_cases.check_bomb(path, of_case, counts)
                elif number % BOMB_EVERY == FORGED:
                    kind = check_forged(path, of_case, counts)
                elif number % 2:
                    fixed = fixed_cases.make_case(of_case, fixed_shards)
                    kind = fixed.kind
                    fixed_cases.check_case(fixed, path, rng, counts)
                else:
                    case = make_case(seed, number, shards)
                    kind = case.name
                    delivered = check_found(case, path, rng, counts)
                    if reader and case.shard.compression == "none" and counts["TensorFlow: shards"] < tensorflow:
                        ask_tensorflow(reader, case, path, delivered, counts)
                    check_late(case, path, rng, counts)
                    counts["records of healthy shards"] += len(case.shard.payloads)
                    counts["records delivered"] += delivered
            except Exception as error:
                raise Violation(f"case {number} of seed {seed} ({kind}): {error!r}") from error
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            kinds[kind] += 1
            slowest_s = max(slowest_s, time.perf_counter() - case_began_s)
    return {
        "cases": count,
        "seconds": round(time.perf_counter() - began_s, 1),
        "slowest_s": round(slowest_s, 3),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "kinds": dict(sorted(kinds.items())),
        "counts": dict(sorted(counts.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensorflow", type=int, default=5000, help="plain shards that TensorFlow's reader gets too")
    arguments = parser.parse_args()
    found = run(arguments.seed, arguments.first, arguments.count, arguments.tensorflow)
    json.dump(found, sys.stdout, indent=2)


if __name__ == "__main__":
    main()

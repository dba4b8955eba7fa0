"""Coverage-guided fuzzing of what parses bytes that anybody may have written. Needs the extra ``fuzz``.

``python -m tests.reliability.fuzz_parsers scan|inflate|index|rows [a folder for the corpus] [-max_total_time=600]``
(more: ``-help=1``). An exception that is none of ours, or a broken promise, ends it and leaves the input in a file.
"""

from __future__ import annotations

import io
import itertools
import sys
import zlib
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["loaderd.formats", "loaderd.decode"]):
    from loaderd.decode.example import RecordFault, parse_example
    from loaderd.decode.example_rows import RowParser
    from loaderd.errors import Damage
    from loaderd.formats.compression import InflatedStream
    from loaderd.formats.framing import scan
    from loaderd.formats.inflate import read_at_of
    from loaderd.formats.shard_index import decode_indexes, encode_indexes
    from loaderd.kernels.crc import framed, masked_crc

import numpy as np

from tests.helpers.record_bytes import field, header, varint
from tests.reliability.mutate import COMPRESS, HOSTILE, example, healthy_shards, nest
from tests.reliability.mutations import SCHEMA, headers_in, row_of, valid_payloads


def fuzz_scan(data: bytes) -> None:
    """The first byte says how much is read at a time. Each ``CRC!`` becomes the CRC of the 8 bytes before it."""
    most, stream = 1 + (data[0] if data else 0), bytearray(data[1:])
    at = stream.find(b"CRC!")
    while at >= 0:
        stream[at : at + 4] = masked_crc(bytes(stream[max(0, at - 8) : at])).to_bytes(4, "little")
        at = stream.find(b"CRC!", at + 1)
    source = io.BytesIO(bytes(stream))
    named, numbers = 0, []
    allowed = valid_payloads(bytes(stream), headers_in(bytes(stream)))
    for found in scan("shard", lambda view: source.readinto(view[:most])):
        if isinstance(found, Damage):
            named += found.lost_bytes
            numbers.append(found.record)
            continue
        for index, (start, stop) in enumerate(itertools.pairwise(found.ends.tolist())):
            if index not in found.bad:
                assert found.buffer[start + 12 : stop - 4].tobytes() in allowed
                named += stop - start
                numbers.append(found.first_record + index)
    assert named == len(stream), "every byte is in a record or in a damage"
    assert sorted(numbers) == list(range(len(numbers)))


def fuzz_inflate(data: bytes) -> None:
    """What comes of a stream is what zlib makes of it byte by byte, in any steps."""
    if not data:
        return
    gzip, step = data[0] & 1, 1 + (data[0] >> 1)
    stream = InflatedStream("shard", read_at_of(memoryview(data[1:])), "gzip" if gzip else "zlib")
    out, view = bytearray(), memoryview(bytearray(step))
    while (got := stream.read_into(view)) and len(out) < 1 << 20:
        out += view[:got]
    expected, inflater = bytearray(), zlib.decompressobj(31 if gzip else 15)
    started = broken = False
    for byte in data[1:]:
        if inflater.eof:
            inflater, started = zlib.decompressobj(31 if gzip else 15), False
        try:
            expected += inflater.decompress(bytes([byte]))
            started = True
        except zlib.error:
            broken = True
            break
    if len(out) < 1 << 20:
        assert out == expected, (len(out), len(expected))
        assert (stream.damage is not None) == (broken or (started and not inflater.eof))


def fuzz_index(data: bytes) -> None:
    """Behind the bytes comes their right CRC, or nothing would get past it."""
    try:
        indexes = decode_indexes(data + masked_crc(data).to_bytes(4, "little"))
    except ValueError:
        return
    assert encode_indexes(decode_indexes(encode_indexes(indexes))) == encode_indexes(indexes)


def fuzz_rows(data: bytes) -> None:
    """Records, each behind a byte that counts it, several times over, so that layouts are learnt from them."""
    records, at = [], 0
    while at < len(data) and len(records) < 40:
        records += [data[at + 1 : at + 1 + data[at]]] * (1 + len(records) % 4)
        at += 1 + data[at]
    if not records:
        return
    lengths = np.array([len(record) for record in records])
    window = np.zeros((len(records), SCHEMA.row_bytes), dtype=np.uint8)
    buffer = np.frombuffer(b"".join(records) + bytes(8), dtype=np.uint8)
    starts = np.cumsum(lengths) - lengths
    parser = RowParser(SCHEMA)
    for _ in range(2):
        faults = parser.parse(buffer, starts, lengths, window, np.arange(len(records)))
        bad = {fault.record for fault in faults}
        for number, record in enumerate(records):
            row = row_of(record)
            assert (row is None) == (number in bad) == isinstance(parse_example(record, SCHEMA.features), RecordFault)
            assert row is None or window[number].tobytes() == row


FUZZERS = {"scan": fuzz_scan, "inflate": fuzz_inflate, "index": fuzz_index, "rows": fuzz_rows}


def seeds(name: str) -> list[bytes]:
    """Healthy inputs to begin with."""
    shards = [shard for shard in healthy_shards() if len(shard.payloads) < 40]
    if name == "scan":
        forged = [header(length)[:8] + b"CRC!" + framed(b"x") for length in HOSTILE]
        return [bytes([7]) + shard.stream[:2000] for shard in shards] + [b"\xff" + one for one in forged]
    if name == "inflate":
        return [
            bytes([2 * 50 + (kind != "zlib")]) + COMPRESS[kind](shard.stream[:600])
            for shard in shards
            for kind in COMPRESS
        ]
    if name == "index":
        import tempfile

        from loaderd.formats.shard_index import build_index
        from loaderd.storage.files import list_shards

        with tempfile.NamedTemporaryFile() as file:
            found = []
            for shard in shards:
                Path(file.name).write_bytes(shard.stream[:-3])
                found.append(encode_indexes([build_index(list_shards(file.name)[0], 7)])[:-4])
        return found
    from random import Random

    rng = Random(0)
    one = example(5)
    odd = [field(0x0A, one), nest(one, rng, one), one + one, *[one[:20] + varint(n) + one[22:] for n in HOSTILE]]
    return [b"".join(bytes([len(r)]) + r for r in (one, example(7), other)) for other in odd if len(other) < 256]


def main() -> None:
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in FUZZERS:
        sys.exit(f"give one of {', '.join(FUZZERS)}")
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in folders[:1]:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds(name)):
            Path(folder, f"seed-{number}").write_bytes(seed)
    atheris.Setup(sys.argv, FUZZERS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()

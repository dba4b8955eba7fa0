"""What is compared: as much of the user's shards as is asked for, and few of their records to check."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.inputs import CHECK_RECORDS, CHECK_SHARDS, from_user, synthetic
from harness.interface import Config
from harness.reference import read
from harness.synthetic import write_shards

from loaderd.errors import NoShardsError
from loaderd.storage.files import list_shards

GIB = 1 << 30


def records_of(config: Config) -> list[bytes]:
    return [record for file in list_shards(list(config.shards)) for record in read(file)]


@pytest.mark.one_variant
@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_the_first_records_of_the_first_shards_are_checked(tmp_path: Path, compression: str) -> None:
    paths = write_shards(tmp_path / "mine", 28_000, num_shards=4, compression=compression)
    inputs = from_user(Config(()), [str(tmp_path / "mine" / "*")], tmp_path, GIB)
    assert inputs.timed.shards == tuple(map(str, paths))
    assert inputs.timed.compression == inputs.checked.compression == compression
    assert inputs.checked.epochs == 1 and inputs.timed.epochs is None
    checked = records_of(inputs.checked)
    assert CHECK_RECORDS - CHECK_SHARDS < len(checked) < CHECK_RECORDS + CHECK_SHARDS
    assert set(checked) < set(records_of(inputs.timed))
    assert len(inputs.checked.shards) == CHECK_SHARDS


def test_large_records_are_checked_in_smaller_number(tmp_path: Path) -> None:
    base = Config((), schema="harness.reference:bits", record_size=1 << 16)
    inputs = synthetic(base, tmp_path / "work", tmp_path, 200, 2)
    assert len(records_of(inputs.checked)) == 63  # of 2 MiB each, as float32
    assert len(records_of(inputs.timed)) == 200


def test_whole_shards_up_to_a_size_are_taken_and_one_at_least(tmp_path: Path) -> None:
    paths = write_shards(tmp_path / "mine", 400, num_shards=4)
    names = [str(path) for path in paths]
    two = paths[0].stat().st_size + paths[1].stat().st_size
    assert from_user(Config(()), names, tmp_path, two).timed.shards == tuple(names[:2])
    assert from_user(Config(()), names, tmp_path, two - 1).timed.shards == tuple(names[:1])
    assert from_user(Config(()), names, tmp_path, 0).about.startswith("1 shard of 4")


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (plain,) = write_shards(tmp_path / "plain", 10, num_shards=1)
    (packed,) = write_shards(tmp_path / "packed", 10, num_shards=1, compression="GZIP")
    with pytest.raises(ValueError, match=r"compressed alike, got \['GZIP', 'none'\]"):
        from_user(Config(()), [str(plain), str(packed)], tmp_path, GIB)
    with pytest.raises(NoShardsError, match="does not exist"):
        from_user(Config(()), [str(tmp_path / "absent")], tmp_path, GIB)
    damaged = bytearray(plain.read_bytes())
    damaged[40] ^= 1
    plain.write_bytes(damaged)
    with pytest.raises(ValueError, match="record 0 at byte 0: expected data with CRC32C"):
        from_user(Config(()), [str(plain)], tmp_path, GIB)
    damaged = bytearray(packed.read_bytes())
    damaged[-6] ^= 1  # of GZIP's own checksum, behind all records
    packed.write_bytes(damaged)
    with pytest.raises(ValueError, match="expected valid compressed data"):
        from_user(Config(()), [str(packed)], tmp_path, GIB)

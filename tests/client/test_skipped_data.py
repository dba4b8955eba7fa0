"""The report of damaged records: each once, as it is learned, in a file that survives runs."""

from __future__ import annotations

import json
import logging
import os
import resource
from pathlib import Path

import pytest

from loaderd.client.skipped_data import MAX_NAMED, SkippedData
from loaderd.errors import CorruptRecordError, Damage, OptionError
from tests.client.damage import damage_data, damage_unseen
from tests.helpers.numbered import Numbered


def damage(record: int, shard: str = "a", found: str = "another") -> Damage:
    return Damage(shard, record, 100 * record, "one thing", found, 17)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def named(path: Path) -> list[tuple[object, object, object]]:
    return [(Path(str(line["shard"])).name, line["record"], line["when"]) for line in lines(path)]


# -------------------------------------------------------------------------------------------------- the file


def test_a_line_for_each_record_once_in_this_run_and_the_next(tmp_path: Path):
    path = tmp_path / "report.jsonl"
    report = SkippedData(str(path))
    assert path.read_text() == "", "that it can be written is found out at the start"
    report.add_damages("index", [damage(1), damage(2)])
    assert lines(path) == [{**damage(n).to_wire(), "when": "index"} for n in (1, 2)]
    report.add_damages("epoch", [damage(2, found="something else"), damage(3), damage(2, shard="b")])
    assert [(line["shard"], line["record"]) for line in lines(path)] == [("a", 1), ("a", 2), ("a", 3), ("b", 2)]
    again = SkippedData(str(path))
    again.add_damages("index", [damage(3), damage(4)])
    assert [line["record"] for line in lines(path)] == [1, 2, 3, 2, 4]
    assert [one.record for one in again.damages] == [3, 4], "the statistics are of this run"


@pytest.mark.parametrize(
    "line", ['{"shard": [], "record": 0, "offset": 0}', '{"shard": "a", "record": {}, "offset": 0}', "[]", "text"]
)
def test_a_line_that_somebody_else_wrote_is_passed_over(tmp_path: Path, line: str):
    path = tmp_path / "report.jsonl"
    path.write_text(f"{line}\n")
    SkippedData(str(path)).add_damages("index", [damage(1)])
    first, second = path.read_text().splitlines()
    assert first == line and json.loads(second)["record"] == 1


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_is_written_again(tmp_path: Path, cut: int):
    path = tmp_path / "report.jsonl"
    SkippedData(str(path)).add_damages("index", [damage(1), damage(2)])
    os.truncate(path, path.stat().st_size - cut)
    SkippedData(str(path)).add_damages("index", [damage(1), damage(2)])
    whole = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [line["record"] for line in whole] == [1, 2]


def test_a_path_that_cannot_be_written(tmp_path: Path):
    for path in (tmp_path, tmp_path / "no" / "such" / "folder", Path("/proc/version"), Path("/dev/full")):
        with pytest.raises(OptionError, match="report must be a file that can be written, got /"):
            SkippedData(str(path))


def test_a_full_disk_ends_the_report_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A file that must not grow: the same to whoever writes it as a disk without room."""
    path = tmp_path / "report.jsonl"
    report = SkippedData(str(path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with caplog.at_level(logging.WARNING, "loaderd"):
            for number in range(5):
                report.add_damages("epoch", [damage(number)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = f"cannot write to the damage report {path} any more; later damage is not in it: File too large"
    assert [record.getMessage() for record in caplog.records] == [said]
    assert len(report.damages) == 5
    SkippedData(str(path)).add_damages("epoch", [damage(number) for number in range(5)])
    whole = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert [line["record"] for line in whole] == list(range(5)), "the next run goes on with it"


# ---------------------------------------------------------------------------------------------- of a loader


def test_what_the_index_found_and_what_came_later(numbered: Numbered, tmp_path: Path):
    shards, path = numbered.write([100, 100]), tmp_path / "report.jsonl"
    damage_data(shards[0], 42)
    for _ in range(2):
        with numbered.loader(shards, epochs=2, on_corrupt="skip_record", report=path) as loader:
            damage_unseen(shards[1], 7)
            assert named(path)[:1] == [("000.tfrecord", 42, "index")], "before the first batch"
            numbers = numbered.records(loader)
            assert sorted(numbers) == sorted([n for n in range(200) if n not in (42, 107)] * 2)
            statistics = loader.statistics()
            assert statistics.records_skipped == 2, "in each epoch once"
            assert [(Path(d.shard).name, d.record) for d in statistics.damages] == [
                ("000.tfrecord", 42),
                ("001.tfrecord", 7),
            ]
            damage_unseen(shards[1], 7)  # the same bit again: it is as it was
        assert named(path) == [("000.tfrecord", 42, "index"), ("001.tfrecord", 7, "epoch")]


def test_more_than_the_statistics_hold(numbered: Numbered, tmp_path: Path):
    (shard,), path = numbered.write([3000]), tmp_path / "report.jsonl"
    data = bytearray(shard.read_bytes())
    offset, hit = 0, []
    for number in range(3000):
        size = int.from_bytes(data[offset : offset + 8], "little") + 16
        if number % 2:
            data[offset + 20] ^= 1
            hit.append(number)
        offset += size
    shard.write_bytes(data)
    with pytest.raises(CorruptRecordError, match="1,500 damaged records in 1 of 1 shards") as caught:
        numbered.loader(shard, report=path)
    assert [line["record"] for line in lines(path)] == hit, "with raise, too"
    assert [one.record for one in caught.value.damages] == hit
    path.unlink()
    with numbered.loader(shard, on_corrupt="skip_record", report=str(path)) as loader:
        assert [line["record"] for line in lines(path)] == hit
        assert len(loader.statistics().damages) == MAX_NAMED


def test_with_raise_what_breaks_a_batch_is_written(numbered: Numbered, tmp_path: Path):
    (shard,), path = numbered.write([100]), tmp_path / "report.jsonl"
    with numbered.loader(shard, shuffle=False, report=path) as loader:
        damage_unseen(shard, 33)
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        assert lines(path) == [], "not before its turn"
        with pytest.raises(CorruptRecordError):
            next(batches)
        assert named(path) == [("000.tfrecord", 33, "epoch")]
        next(batches)

"""What ``on_corrupt`` leaves out is said once; and where many records do not match the schema, they are an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import loaderd
from loaderd.errors import RecordMismatchError, SkippedDataWarning
from loaderd.kernels.crc import framed
from tests.client.damage import damage_data, damage_unseen
from tests.helpers import restarted
from tests.helpers.numbered import Numbered
from tests.helpers.restarted import MODULE, Restarted

Write = Callable[..., list[Path]]
OTHER = framed(b"")


def with_others(write_numbered: Write, counts: list[int], others: dict[int, int]) -> list[Path]:
    """Shards of numbered records; ``others``: how many records of a shard, its first ones, lack all features."""
    shards = write_numbered(counts)
    for number, count in others.items():
        data = shards[number].read_bytes()
        at = 0
        for _ in range(count):
            at += int.from_bytes(data[at : at + 8], "little") + 16
        shards[number].write_bytes(count * OTHER + data[at:])
    return shards


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", SkippedDataWarning)
        yield found


def texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(each.message) for each in caught if each.category is SkippedDataWarning]


@pytest.mark.parametrize("policy", ["skip_record", "skip_shard"])
@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": False}, {"workers": 2}, {"shard": (1, 2), "shuffle": loaderd.Shuffle(block_records=5)}],
)
def test_a_shard_that_does_not_match_is_an_error_before_the_first_batch(
    numbered: Numbered, policy: Any, options: dict[str, Any]
):
    shards = with_others(numbered.write, [50, 50, 50, 50], {2: 50})
    options = {"workers": 1, "on_corrupt": policy, **options}
    with numbered.loader(shards, **options) as loader:
        batches = iter(loader)
        messages = set()
        for _ in range(len(loader)):  # it comes again in place of each batch
            with pytest.raises(RecordMismatchError) as found:
                next(batches)
            messages.add(str(found.value))
        assert next(batches, None) is None
    (message,) = messages
    assert "records do not match the schema, and only one in a hundred may be left out: " in message
    assert f"in {shards[2]}. The first: {shards[2]}: record " in message
    assert "expected feature 'bits', found no features\n" in message and '"skip_any"' in message
    if "shard" not in options:
        assert message.startswith("50 of 200 records do not match") and "record 0 at byte 0" in message


def test_with_a_filter_mismatches_are_judged_against_all_records(
    numbered: Numbered, caught: list[warnings.WarningMessage]
):
    shards = with_others(numbered.write, [1000, 1000], {1: 18})
    where = loaderd.Derived(lambda id: id % 10 == 3, "id")
    options: dict[str, Any] = {"on_corrupt": "skip_record", "where": where}
    with numbered.loader(shards, **options) as loader:
        assert loader.statistics().num_records == 216 and len(numbered.records(loader)) == 198
    shards = with_others(numbered.write, [1000, 1000], {1: 30})
    with numbered.loader(shards, **options) as loader, pytest.raises(RecordMismatchError, match=r"^30 of 2,000 rec"):
        next(iter(loader))


def test_batches_in_front_of_too_many_mismatches_come(numbered: Numbered):
    """Without shuffling, a window says nothing of those behind it. Here the last of three begins at record 26,667."""
    shards = with_others(numbered.write, [39_000, 1_000], {1: 500})
    for workers in (1, 3):
        with numbered.loader(
            shards, batch_size=1024, shuffle=False, workers=workers, on_corrupt="skip_record"
        ) as loader:
            batches = iter(loader)
            assert sum(len(next(batches)["id"]) for _ in range(26)) == 26 * 1024
            with pytest.raises(RecordMismatchError, match=f"500 of 40,000 records .*: 500 in {shards[1]}. The first"):
                next(batches)


@pytest.mark.parametrize("policy", ["skip_record", "skip_any"])
def test_one_record_in_a_hundred_may_be_left_out(
    numbered: Numbered, caught: list[warnings.WarningMessage], policy: Any
):
    shards = with_others(numbered.write, [100, 100], {1: 2 if policy == "skip_record" else 60})
    left = [*range(100), *range(102 if policy == "skip_record" else 160, 200)]
    options: dict[str, Any] = {"batch_size": 10, "workers": 1, "shuffle": False, "on_corrupt": policy, "epochs": 2}
    with numbered.loader(shards, **options) as loader:
        assert sorted([number for batch in loader for number in numbered.check(batch)]) == sorted(2 * left)
        if policy == "skip_record":
            (text,) = texts(caught)
            assert text == (
                '2 records are left out of batches so far (on_corrupt="skip_record"). The first reason: '
                f"{shards[1]}: record 0 at byte 0: expected feature 'bits', found no features. "
                "loader.statistics() counts the records (records_skipped) and names them (damages)."
            )
        else:  # a batch of which nothing is left
            (text,) = texts(caught)
            assert "none of the 10 records of batch 10 is left" in text
        assert caught[0].filename == __file__


def test_each_kind_is_warned_of_once(numbered: Numbered, caught: list[warnings.WarningMessage]):
    shards = with_others(numbered.write, [200, 200], {1: 2})
    damage_data(shards[0], 150)
    with numbered.loader(shards, batch_size=20, shuffle=False, on_corrupt="skip_record", epochs=2) as loader:
        assert len(texts(caught)) == 1, "what the index pass found"
        damage_unseen(shards[0], 30)
        damage_unseen(shards[0], 90)
        assert sum(len(batch["id"]) for batch in loader) == 2 * (400 - 5)
    of_index, damaged, mismatch = texts(caught)
    assert of_index.startswith('on_corrupt="skip_record": 1 damaged record in 1 of 2 shards is left out; the first')
    assert "1 record is left out of batches so far" in damaged and f"{shards[0]}: record 30 at byte" in damaged
    assert "3 records are left out of batches so far" in mismatch and f"{shards[1]}: record 0" in mismatch


def test_a_warning_that_is_an_error_costs_no_batch(numbered: Numbered):
    shards = with_others(numbered.write, [300], {0: 1})
    options: dict[str, Any] = {"batch_size": 10, "workers": 1, "shuffle": False, "on_corrupt": "skip_record"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SkippedDataWarning)
        with numbered.loader(shards, **options) as loader:
            batches = iter(loader)
            with pytest.raises(SkippedDataWarning, match="1 record is left out"):
                next(batches)
            assert sorted(numbered.records(batches)) == list(range(1, 300))
        damage_data(shards[0], 200)
        with pytest.raises(SkippedDataWarning, match="1 damaged record in 1 of 1 shards is left out"):
            numbered.loader(shards, **options)


@pytest.mark.parametrize("sharing", ["independent", "mirrored"])
def test_consumers_of_a_server_are_told_as_well(
    tmp_path: Path,
    numbered: Numbered,
    monkeypatch: pytest.MonkeyPatch,
    caught: list[warnings.WarningMessage],
    sharing: Any,
):
    shards = with_others(numbered.write, [300], {0: 1})
    damage_data(shards[0], 200)
    order = "loaderd.Shuffle(window_records=60, block_records=10), seed=3"
    monkeypatch.setattr(restarted, "MODULE", MODULE.replace(order, 'on_corrupt="skip_record"'))
    server = Restarted(tmp_path)
    try:
        with server.connect(10, sharing=sharing) as loader:
            assert sum(len(batch["id"]) for batch in loader) == 298
        of_index, mismatch = texts(caught)
        assert "1 damaged record in 1 of 1 shards is left out; the first damage: " in of_index
        assert "1 record is left out of batches so far" in mismatch
        assert server.now.wait_line("1 damaged record in 1 of 1 shards")
        server.kill()
        with_others(numbered.write, [300], {0: 4})
        server.start()
        with server.connect(10, sharing=sharing) as loader, pytest.raises(RecordMismatchError, match="4 of 300 "):
            next(iter(loader))
    finally:
        server.kill()

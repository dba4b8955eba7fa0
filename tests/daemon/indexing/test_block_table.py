"""The table of all blocks: what indexes hold, less what a selection leaves out; and the digest of that."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loaderd.daemon.indexing import block_table
from loaderd.daemon.indexing.block_table import BlockTable
from loaderd.errors import NoShardsError, OptionError
from loaderd.formats.shard_index import ANCHOR_RECORDS, ShardIndex, build_index, shrunk
from loaderd.ipc.worker_messages import BlockSelection
from loaderd.plan.sampling import Sample
from loaderd.plan.selection import HASHES, HashSplit, NewestShards, Operation, Range, numbers_that
from loaderd.randomness import key_of
from loaderd.storage.files import list_shards
from loaderd.storage.shard_file import ShardFile

Write = Callable[..., list[Path]]
Record = tuple[int, int]  # shard, number in it
Passes = Callable[[int], bool] | None


def files_of(paths: list[Path]) -> list[ShardFile]:
    return list_shards([str(path) for path in paths])


@pytest.fixture
def indexes(write_numbered: Write) -> list[ShardIndex]:
    """Of 100 records, none, 40 of which number 13 is damaged, and 70; in blocks of up to 33."""
    paths = write_numbered([100, 0, 40, 70])
    data = bytearray(paths[2].read_bytes())
    offset = 0
    for _ in range(13):
        offset += int.from_bytes(data[offset : offset + 8], "little") + 16
    data[offset + 20] ^= 1
    paths[2].write_bytes(data)
    return [build_index(file, 33) for file in files_of(paths)]


def check_table(table: BlockTable, indexes: list[ShardIndex], kept: list[int]) -> None:
    """Each block of the table is that of an index, in order, with the anchors of its own records."""
    number = 0
    for shard in kept:
        index = indexes[shard]
        data = Path(index.file.uri).read_bytes()
        for offset, num_bytes, count, first in zip(
            index.offsets, index.num_bytes, index.counts, index.first_records, strict=True
        ):
            (*place, anchors, _, _), left, _ = table.place(number)
            assert left is None
            assert place == [shard, offset, num_bytes, count, first]
            assert all(type(value) is int for value in place), "as msgpack wants it"
            starts = [int(offset)]
            for _ in range(count):
                starts.append(starts[-1] + int.from_bytes(data[starts[-1] : starts[-1] + 8], "little") + 16)
            assert starts[-1] == offset + num_bytes
            expected = [start - offset for start in starts[:-1:ANCHOR_RECORDS]]
            assert np.frombuffer(anchors, "<u4").tolist() == expected
            number += 1
    assert number == len(table.counts)


def test_the_table_holds_the_blocks_of_all_shards(indexes: list[ShardIndex]):
    table = BlockTable(indexes, "skip_record")
    assert table.counts.tolist() == [33, 33, 33, 1, 13, 26, 33, 33, 4]
    assert table.num_records == 209 and table.compressions == ["none"] * 4
    check_table(table, indexes, [0, 1, 2, 3])
    key = key_of("record", 11, 2, "002.tfrecord")
    assert table.place(5, seed=11, epoch=2) == (table.place(5).block, None, key)


def test_damaged_shards_can_be_left_out_whole(indexes: list[ShardIndex]):
    table = BlockTable(indexes, "skip_shard")
    assert table.num_records == 170 and len(table.compressions) == 4
    check_table(table, indexes, [0, 1, 3])
    nothing = BlockTable(indexes[2:3], "skip_shard")
    assert nothing.num_records == 0 and len(nothing.counts) == 0


# ---------------------------------------------------------------------------------------------- selections


def made_up(name: str, blocks: list[tuple[int, int]], digest: int = 0, passing: Passes = None) -> ShardIndex:
    """An index of blocks of so many records, each behind so many damaged ones; a record takes 10 bytes."""
    counts = np.array([count for count, _ in blocks], dtype=np.int64)
    firsts = np.cumsum([count + gap for count, gap in blocks], dtype=np.int64) - counts
    # 0 in front of each block's, a run for every 32 records but the last ones
    runs = [10 * ANCHOR_RECORDS * (run > 0) for count, _ in blocks for run in range(-(-count // ANCHOR_RECORDS))]
    columns = (10 * firsts, 10 * counts, counts, firsts, np.array(runs, dtype=np.int64))
    index = ShardIndex(ShardFile(f"/data/{name}", 0, 0), "none", digest, (), *map(shrunk, columns))
    if passing is not None:
        index.passing = np.packbits(np.array([*map(passing, range(index.end))], bool), bitorder="little")
    return index


def records_of(table: BlockTable) -> list[Record]:
    """What the blocks of a table hold, as a worker finds it."""
    found = []
    for number, expected in enumerate(table.counts):
        (shard, offset, num_bytes, count, first, anchors, *_), left, _ = table.place(number)
        assert (offset, num_bytes) == (10 * first, 10 * count)
        assert np.frombuffer(anchors, "<u4").tolist() == list(range(0, num_bytes, 10 * ANCHOR_RECORDS))
        left = left or BlockSelection(first, first + count, [])
        assert first <= left.low < left.high <= first + count
        of_block = [(shard, n) for n in left.numbers().tolist()]
        assert len(of_block) == expected > 0
        found += of_block
    return found


def plainly(records: list[Record], names: list[str], selection: list[Operation]) -> list[Record]:
    """What a selection leaves of a list."""
    for operation in selection:
        if isinstance(operation, Range) and operation.kind == "take":
            records = records[: operation.count]
        elif isinstance(operation, Range) and operation.kind == "skip":
            records = records[operation.count :]
        elif isinstance(operation, Range) and operation.kind == "newest":
            records = records[max(0, len(records) - operation.count) :]
        elif operation.by == "shard":
            records = [(shard, n) for shard, n in records if operation.has_shard(names[shard])]
        else:
            conditions = [operation.condition(name) for name in names]
            records = [(shard, n) for shard, n in records if len(numbers_that([conditions[shard]], n, n + 1))]
    return records


counts_to_cut = st.integers(0, 400)
operations = st.one_of(
    st.builds(Range, st.just("take"), counts_to_cut),
    st.builds(Range, st.just("skip"), st.integers(0, 100)),
    st.builds(Range, st.just("newest"), counts_to_cut),
    st.builds(
        lambda by, seed, level, edges: HashSplit(by, seed, level, *sorted(edges)),
        st.sampled_from(["record", "shard"]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.tuples(st.integers(0, HASHES // 2), st.integers(HASHES // 2, HASHES)),
    ),
)
shards_of_blocks = st.lists(
    st.lists(st.tuples(st.integers(1, 70), st.sampled_from([0, 0, 3])), max_size=4), max_size=6
)


@given(
    shards=shards_of_blocks,
    selection=st.lists(operations, max_size=4),
    one_in=st.sampled_from([None, None, 1, 2, 10, 1000]),
)
def test_a_selection_leaves_what_it_leaves_of_the_list_of_records(
    shards: list[list[tuple[int, int]]], selection: list[Operation], one_in: int | None
):
    """``where`` comes before it: of each shard, one record in ``one_in`` passes."""
    names = [f"{number}.tfrecord" for number in range(len(shards))]
    passes: Passes = None if one_in is None else lambda number: key_of("passes", number) % one_in == 0
    indexes = [made_up(name, blocks, 0, passes) for name, blocks in zip(names, shards, strict=True)]
    every = records_of(BlockTable(indexes, "raise"))
    assert len(every) == sum(count for blocks in shards for count, _ in blocks)
    expected = plainly([record for record in every if passes is None or passes(record[1])], names, selection)
    where = "" if passes is None else "passes"
    if every and not expected:
        with pytest.raises(NoShardsError, match=r"holds no (record|shard), of|no record passes where=passes, of"):
            BlockTable(indexes, "raise", tuple(selection), where=where)
        return
    table = BlockTable(indexes, "raise", tuple(selection), where=where)
    assert records_of(table) == expected
    assert table.num_records == len(expected) and table.num_shards == len({shard for shard, _ in expected})
    assert len(table.compressions) == len(shards)


@given(
    shards=shards_of_blocks,
    edges=st.lists(st.integers(0, HASHES), max_size=2),
    by=st.sampled_from(["record", "shard"]),
    data=st.data(),
)
def test_parts_are_disjoint_and_cover_and_stay_when_shards_are_added(
    shards: list[list[tuple[int, int]]], edges: list[int], by: Literal["record", "shard"], data: st.DataObject
):
    """Before, between or behind those that were there first."""
    indexes = [made_up(f"{number}.tfrecord", blocks) for number, blocks in enumerate(shards)]
    there_first = data.draw(st.lists(st.sampled_from(range(len(shards))), unique=True).map(sorted)) if shards else []

    def part_of(numbers: Sequence[int], part: HashSplit) -> list[Record]:
        try:
            table = BlockTable([indexes[number] for number in numbers], "raise", (part,))
        except NoShardsError:
            return []
        return [(numbers[shard], n) for shard, n in records_of(table)]

    everything = []
    for ends in itertools.pairwise([0, *sorted(edges), HASHES]):
        part = HashSplit(by, 3, 0, *ends)
        found = part_of(range(len(shards)), part)
        assert part_of(there_first, part) == [(shard, n) for shard, n in found if shard in there_first]
        everything += found
    assert sorted(everything) == records_of(BlockTable(indexes, "raise"))


def test_the_error_says_which_operation_leaves_nothing():
    indexes = [made_up(f"{number}.tfrecord", [(10, 0)]) for number in range(3)]
    nothing = HashSplit("shard", 5, 0, HASHES - 1, HASHES)
    with pytest.raises(NoShardsError) as caught:
        BlockTable(indexes, "raise", (Range("take", 25), nothing, Range("take", 3)))
    assert str(caught.value).startswith(
        'the part from 1 to 1 of split(by="shard", seed=5) holds no shard, of 25 records in 3 shards'
    )
    assert 'by="record"' in caught.value.hint
    with pytest.raises(NoShardsError, match=r"^skip\(30\) holds no record, of 30 records in 3 shards"):
        BlockTable(indexes, "raise", (Range("skip", 30),))
    with pytest.raises(NoShardsError, match=r"^newest\(tests\.daemon\.indexing\..*<lambda>\) holds no"):
        BlockTable(indexes, "raise", (Range("newest", lambda total: 0),))


# ---------------------------------------------------------------------------------------------- the digest

HALF = HashSplit("record", 0, 0, 0, HASHES // 2)


def digest(shards: list[ShardIndex], *selection: Operation) -> str:
    found = BlockTable(shards, "skip_record", selection).digest
    assert len(found) == 8 and int(found, 16) >= 0
    return found


def test_the_digest_never_changes():
    """A position that was saved by one version must be taken by the next."""
    shards = [made_up("a", [(40, 0), (30, 2)], 7), made_up("b", [(20, 0)], 8)]
    assert [digest(shards), digest(shards, HALF), digest(shards, Range("take", 50))] == [
        "dd0e1bb9",
        "1b589c2b",
        "a34b16b1",
    ]


def test_what_changes_the_digest():
    blocks = [(40, 0), (30, 2)]
    shards = [made_up("a", blocks, 7), made_up("b", blocks, 8)]
    different = [
        digest(shards),
        digest(shards[::-1]),
        digest(shards[:1]),
        digest([*shards, made_up("c", [(1, 0)], 9)]),
        digest([made_up("a", blocks, 6), shards[1]]),
        digest([made_up("a", [(40, 0), (30, 3)], 7), shards[1]]),
        digest([made_up("a", [(30, 0), (40, 2)], 7), shards[1]]),
        digest(shards, HALF),
        digest(shards, HashSplit("record", 1, 0, 0, HASHES // 2)),
        digest(shards, HashSplit("record", 0, 0, HASHES // 2, HASHES)),
        digest([made_up("z", blocks, 7), shards[1]], HALF),
        digest(shards, Range("take", 100)),
        digest(shards, Range("skip", 1)),
        *(
            BlockTable([made_up("a", blocks, 7, passes), made_up("b", blocks, 8, passes)], "raise", where="f").digest
            for passes in (lambda number: number % 2 == 0, lambda number: number % 2 == 1)
        ),
    ]
    assert len(set(different)) == len(different)


def test_what_does_not_change_the_digest():
    blocks = [(40, 0), (30, 2)]
    shards = [made_up("a", blocks, 7), made_up("b", blocks, 8)]
    assert digest([made_up("elsewhere/x", blocks, 7), shards[1]]) == digest(shards), "names, where no hash uses them"
    assert digest([made_up("elsewhere/a", blocks, 7), shards[1]], HALF) == digest(shards, HALF), "folders"
    assert digest(shards, Range("take", 140)) == digest(shards), "what leaves everything"
    assert digest(shards, Range("take", 70)) == digest(shards[:1]), "what is not in the data set"


def test_a_split_by_member_keeps_each_together():
    """Of tars: other shards stay whole."""
    tars = [made_up(f"{number}.tar", [(7, 0)] * 40) for number in range(3)]
    for index in tars:
        index.compression = "tar"
    indexes = [*tars, made_up("plain", [(50, 0)] * 4)]
    sides = [
        BlockTable(indexes, "raise", (HashSplit("member", 0, 0, start, stop),))
        for start, stop in ((0, HASHES // 4), (HASHES // 4, HASHES))
    ]
    blocks = [
        {(place.block.shard, place.block.first_record) for place in map(side.place, range(len(side.counts)))}
        for side in sides
    ]
    everything = {(shard, int(first)) for shard, index in enumerate(indexes) for first in index.first_records}
    assert not blocks[0] & blocks[1] and blocks[0] | blocks[1] == everything
    assert 15 < len([block for block in blocks[0] if block[0] < 3]) < 45, "a quarter of 120 games"
    assert len({3 in {shard for shard, _ in side} for side in blocks}) == 2, "the plain one is on one side"
    assert BlockTable(indexes[:2], "raise", (HashSplit("member", 0, 0, 0, HASHES // 4),)).num_records == 7 * len(
        [block for block in blocks[0] if block[0] < 2]
    ), "also when a shard comes or goes"


def test_the_newest_shards_are_those_with_records():
    indexes = [made_up(str(number), [(number % 3, 0)] * (number % 3 > 0)) for number in range(9)]  # 3 and 6 are empty

    def shards_of(*operations: Operation) -> list[int]:
        table = BlockTable(indexes, "raise", operations)
        return [table.place(number).block.shard for number in range(len(table.counts))]

    assert shards_of(NewestShards(3)) == [5, 7, 8] and shards_of(NewestShards(100)) == shards_of()
    assert shards_of(Range("take", 4), NewestShards(1)) == [4], "of what is left"
    assert str(NewestShards(3)) == "newest(shards=3)"
    for wrong in (0, -1, 1.5):
        with pytest.raises(OptionError, match="shards of newest"):
            NewestShards(wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- samples


@given(
    shards=shards_of_blocks,
    selection=st.lists(operations, max_size=2),
    one_in=st.sampled_from([None, 2, 10]),
    share=st.sampled_from([1, 0.5, 0.03, 1 / 3]),
    is_weighed=st.booleans(),
    per_member=st.sampled_from([None, 1, 7, 1 << 62]),
    is_tar=st.booleans(),
)
def test_each_epoch_draws_from_what_is_left(
    shards: list[list[tuple[int, int]]],
    selection: list[Operation],
    one_in: int | None,
    share: float,
    is_weighed: bool,
    per_member: int | None,
    is_tar: bool,
):
    """Against a loop over all records: their weights, and what a member may give."""
    passes: Passes = None if one_in is None else lambda number: key_of("passes", number) % one_in == 0
    where = "" if passes is None else "passes"
    indexes = [made_up(f"{number}.tar", blocks, 0, passes) for number, blocks in enumerate(shards)]
    for index in indexes:
        index.compression = "tar" if is_tar else "none"
        weights = np.arange(index.end) % 9 / 4 if is_weighed else np.ones(index.end)
        index.weights = weights.astype(np.float16).view(np.uint16)
    sample = Sample(share, "weight" if is_weighed else None, per_member)

    def table_of(sample: Sample | None) -> BlockTable:
        return BlockTable(indexes, "raise", tuple(selection), where=where, sample=sample)

    try:
        left = records_of(table_of(None))
    except NoShardsError:
        return
    probabilities: dict[tuple[int, int], Fraction] = {}
    for shard, number in left:
        ends = np.add(indexes[shard].first_records, indexes[shard].counts, dtype=np.int64)
        member = int(np.searchsorted(ends, number, side="right")) if is_tar else 0
        weight = Fraction(number % 9, 4) if is_weighed else Fraction(1)
        probability = min(Fraction(1), Fraction(share).limit_denominator(10**9) * weight)
        probabilities[shard, member] = probabilities.get((shard, member), Fraction(0)) + probability
    most = Fraction(len(left) + 1 if per_member is None else per_member)
    expected = int(sum((min(most, each) for each in probabilities.values()), Fraction(0)) + Fraction(1, 10**5))
    if not expected:
        if left:
            with pytest.raises(NoShardsError, match="draws no record of"):
                table_of(sample)
        return
    table = table_of(sample)
    assert table.drawing is not None and table.num_records == expected
    assert table.digest != table_of(None).digest and table.num_shards == len({shard for shard, _ in left})
    for epoch in range(2):
        found: list[Record] = []
        for number, count in enumerate(table.drawing.counts(5, epoch).tolist()):
            block, selected, _ = table.place(number, 5, epoch)
            assert selected is not None
            numbers = selected.numbers().tolist()
            assert len(numbers) == count and numbers == sorted({*numbers})
            found += [(block.shard, each) for each in numbers]
        assert len(found) == expected and {*found} <= {*left}
        if per_member is not None and not is_tar:
            assert max(np.bincount([shard for shard, _ in found])) <= per_member


def test_weights_that_cannot_be_summed_or_sent_are_refused(monkeypatch: pytest.MonkeyPatch):
    index = made_up("a", [(1 << 20, 0)])
    index.weights = np.full(1 << 20, 65504, np.float16).view(np.uint16)
    with pytest.raises(OptionError, match=r"the weights of Sample.* are too large: the largest is 65504"):
        BlockTable([index] * 8, "raise", sample=Sample(1e-6, "weight"))
    index.weights = np.ones(1 << 20, np.float16).view(np.uint16)
    monkeypatch.setattr(block_table, "_MOST_WEIGHTS", 1 << 20)
    assert BlockTable([index], "raise", sample=Sample(0.5, "weight")).num_records == 1 << 19
    monkeypatch.setattr(block_table, "_MOST_WEIGHTS", (1 << 20) - 1)
    with pytest.raises(OptionError, match="a shard has a block of 1,048,576 records, and weights are for up to"):
        BlockTable([index], "raise", sample=Sample(0.5, "weight"))

"""Which records go into which shard, and which shards one process writes: pure arithmetic over indexes.

::

    sources     [ a.gz: 700 records ][ b.gz: 300 ]        healthy records, in the order of the paths
    shards      [ 0: 250 ][ 1: 250 ][ 2: 250 ][ 3: 250 ]  of ``records_per_shard``
    units       [ 0, 1, 2                   ][ 3     ]    what one process does

A shard may begin anywhere in a plain source, and in a compressed one that has restart points. Any other compressed
block, and one of more than 32 MiB, cannot be entered in the middle; so shards that lie in one make one **unit**, are
written one after the other, and the block is inflated once. Only where a shard ends in another block than it began
in, as shard 2 does, does the unit end too, and this block is inflated twice: files seldom end where a shard does, and
otherwise one process would write everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loaderd.formats.inflate import MAX_WHOLE_BYTES
from loaderd.formats.shard_index import ShardIndex
from loaderd.storage.shard_file import PLAIN, Block


@dataclass(frozen=True)
class BlockSpan:
    """Records ``first`` to ``stop - 1`` of a block; ``block.shard`` counts the sources."""

    block: Block
    first: int
    stop: int


@dataclass(frozen=True)
class WorkUnit:
    """Shards ``first_shard``, … of ``sizes`` records each, from the records of ``parts``."""

    first_shard: int
    sizes: tuple[int, ...]
    parts: tuple[BlockSpan, ...]

    @property
    def num_records(self) -> int:
        return sum(self.sizes)


def spans_of(number: int, index: ShardIndex) -> Iterator[BlockSpan]:
    """All healthy records of a source."""
    for block in range(len(index.offsets)):
        made = Block(number, *index.block(block))
        yield BlockSpan(made, 0, made.num_records)


def plan_units(indexes: Sequence[ShardIndex], records_per_shard: int) -> Iterator[WorkUnit]:
    """The units, in order; their shards are numbered from 0 on, through all units."""
    first_shard, sizes, parts, room = 0, [], list[BlockSpan](), records_per_shard
    for number, index in enumerate(indexes):
        for span in spans_of(number, index):
            is_small = index.points is not None and span.block.num_bytes <= MAX_WHOLE_BYTES
            can_be_entered = index.compression in PLAIN or is_small
            first = span.first
            while first < span.stop:
                take = min(room, span.stop - first)
                begin = parts.pop().first if parts and parts[-1].block is span.block else first
                parts.append(BlockSpan(span.block, begin, first + take))
                first, room = first + take, room - take
                if room:
                    continue
                sizes.append(records_per_shard)
                room = records_per_shard
                if can_be_entered or first == span.stop or take < records_per_shard:
                    yield WorkUnit(first_shard, tuple(sizes), tuple(parts))
                    first_shard, sizes, parts = first_shard + len(sizes), [], []
    if room < records_per_shard:
        sizes.append(records_per_shard - room)
    if sizes:
        yield WorkUnit(first_shard, tuple(sizes), tuple(parts))

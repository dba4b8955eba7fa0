"""What there is, and in which order: a data set without a consumer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, Literal

from loaderd.options import OnCorrupt, Shuffle, require
from loaderd.plan.selection import HASHES, Hashed, Operation, Selection, Skip, Take
from loaderd.schema import Schema


@dataclass(frozen=True)
class Dataset:
    """The description of a data set; nothing is read until a :class:`~loaderd.Loader` is made of it.

    The arguments are those of the same names of ``Loader``. The batch size, the position and the host belong to the
    consumer, and so to the loader. ``selection`` is what :meth:`take`, :meth:`skip` and :meth:`split` make; each of
    them works on what the ones before it left. A loader of which nothing is left raises NoShardsError.
    """

    shards: Any
    schema: Schema
    shuffle: bool | Shuffle = True
    seed: int = 0
    on_corrupt: OnCorrupt = "raise"
    index_cache: str = "user"
    selection: Selection = ()

    def take(self, count: int) -> Dataset:
        """The first ``count`` records, or all if there are fewer.

        They are counted in the order of the files, before any shuffling: shard by shard as ``shards`` lists them, as
        they lie in each. Records that were found damaged are not counted. Raises OptionError for a ``count`` below 0.
        """
        return self._with(Take(count))

    def skip(self, count: int) -> Dataset:
        """All but the first ``count`` records, counted as in :meth:`take`."""
        return self._with(Skip(count))

    def split(
        self, *fractions: float, by: Literal["record", "shard"] = "record", seed: int = 0
    ) -> tuple[Dataset, ...]:
        """A data set for each of ``fractions``; each record is in exactly one of them, and always in the same.

        The side of a record follows from ``seed``, the name of its shard without folders, and its number in it. So it
        stays when shards are added or moved; renamed, a shard is another, and shards of the same name in two folders
        are cut alike. The sides' sizes are near the fractions, not exact: of n records a side gets its fraction ± √n.

        ``by="shard"`` puts whole shards on one side. Records of one game stay together then, and a shard is read for
        the sake of its own side alone, while a split by records leaves some of every block to each side. A side
        which gets no shard, as of few shards one may, raises NoShardsError when a loader is made of it.

        Another split of one side cuts it anew. Raises OptionError where the fractions are not all above 0, or don't
        sum to 1.
        """
        for fraction in fractions:
            require(isinstance(fraction, Real) and fraction > 0, "each fraction of split", "above 0", fraction)
        require(abs(sum(fractions) - 1) < 1e-9, "the sum of the fractions of split", "1", sum(fractions))
        require(by in ("record", "shard"), "by", "record or shard", by)
        require(isinstance(seed, int), "seed", "an integer", seed)
        level = sum(isinstance(operation, Hashed) for operation in self.selection)
        edges = [0, *(round(part * HASHES) for part in accumulate(fractions[:-1])), HASHES]
        return tuple(self._with(Hashed(by, seed, level, start, stop)) for start, stop in pairwise(edges))

    def _with(self, operation: Operation) -> Dataset:
        return replace(self, selection=(*self.selection, operation))

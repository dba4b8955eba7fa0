"""What a server says of a data set: all that a consumer elsewhere needs to plan epochs of it, and no more.

It says how the sets are joined, how many records of each block are in the data set, and what positions in it belong
to. For a million blocks it takes 20 KB if they are alike, and 1.3 MB after a split by records. Only servers know
where the records are; a consumer names them by block (``remote.tickets``).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Rational
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from loaderd.dataset import AnyDataset, Concat, Dataset, Mix
from loaderd.errors import Damage, LoaderdError, ServerError
from loaderd.ipc.messages import Welcome
from loaderd.options import Shuffle, StreamOptions
from loaderd.plan.passes import Listing, listing_of
from loaderd.plan.sampling import MOST_MASS, Drawing
from loaderd.remote.tickets import SHARD_BYTES
from loaderd.schema import Schema
from loaderd.schema.packed import unpacking_schema
from loaderd.schema.wire import from_wire as schema_from_wire
from loaderd.schema.wire import to_wire as schema_to_wire
from loaderd.storage.shard_file import ShardFile
from loaderd.version import VERSION

Int64s = npt.NDArray[np.int64]

_MAX_BLOCKS = 1 << 26
"""Of a data set; a server that is not honest may send little that becomes much."""
_MAX_ROW_BYTES = 1 << 30

_UNREADABLE = (
    LoaderdError,
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
    zlib.error,
    msgpack.UnpackException,
)


@dataclass(frozen=True)
class Table:
    """``dataset``: its leaves have the schema that unpacks rows, and no shards that could be read here.

    ``counts``: of each leaf, int64, (blocks,): the records of each block. ``drawings``: of each, what its epochs draw
    of these; None: all. ``of``, ``listing``: as in positions.
    ``left_out``: as in DataListed. ``row_bytes``: of a row on the server, from which the size of windows follows, so
    that both sides have the same. ``digest`` differs where data do. ``shards``: the :func:`shard_hash` of each of
    its shards; a server that lists more shards by now finds by them which the digest belongs to.
    """

    dataset: AnyDataset
    counts: list[Int64s]
    drawings: list[Drawing | None]
    num_shards: int
    of: dict[str, Any]
    listing: Listing | None
    damages: list[Damage]
    left_out: str
    row_bytes: int
    digest: str
    shards: bytes

    @property
    def schema(self) -> Schema:
        """The schema that unpacks rows."""
        return self.dataset.leaves()[0].schema

    def ordered(self, options: StreamOptions) -> StreamOptions:
        """``options``, with the order that the servers have decided on."""
        leaf = self.dataset.leaves()[0]
        return replace(options, shuffle=leaf.shuffle, seed=leaf.seed, on_corrupt=leaf.on_corrupt)


def welcome_to(dataset: AnyDataset, unpacking: Schema, row_bytes: int) -> Welcome:
    """What a consumer must know of a data set to ask for batches; ``unpacking``: the schema that unpacks its rows."""
    order = _order_to_wire(dataset.leaves()[0])
    facts = {"schema": schema_to_wire(unpacking), "row_bytes": row_bytes, "grows": dataset.grows}
    return Welcome(VERSION, {**order, **facts})


def table_to_wire(
    dataset: AnyDataset,
    counts: list[Int64s],
    drawings: list[Drawing | None],
    *,
    num_shards: int,
    of: Mapping[str, Any],
    listing: Listing | None,
    damages: list[Damage],
    left_out: str,
    files: Iterable[ShardFile],
) -> tuple[bytes, str]:
    """(table, its digest) of a data set whose records are here. Raises SchemaError if its schema cannot be sent."""
    leaf = dataset.leaves()[0]
    identity = {
        "tree": _tree_to_wire(dataset),
        "schema": schema_to_wire(unpacking_schema(leaf.schema)),
        "row_bytes": leaf.schema.row_bytes,
        "of": {**of, "features": leaf.schema.stored_fingerprint},
        "listing": listing,
    }
    columns = [each.astype("<u4").tobytes() for each in counts]
    drawn = [None if each is None else _drawing_to_wire(each) for each in drawings]
    digest = hashlib.blake2b(msgpack.packb([identity, columns, drawn]), digest_size=8).hexdigest()
    wire: bytes = msgpack.packb(
        {
            **identity,
            "counts": [[len(each), zlib.compress(column, 1)] for each, column in zip(counts, columns, strict=True)],
            "drawings": drawn,
            "num_shards": num_shards,
            "damages": [damage.to_wire() for damage in damages],
            "left_out": left_out,
            "digest": digest,
            "shards": b"".join(map(shard_hash, files)),
        }
    )
    return wire, digest


def shard_hash(file: ShardFile) -> bytes:
    """SHARD_BYTES bytes that tell a shard from others of its data set, by its name without folders and its size."""
    return hashlib.blake2b(f"{file.name}/{file.size_bytes}".encode(), digest_size=SHARD_BYTES).digest()


def table_from_wire(data: bytes, where: str) -> Table:
    """The table in ``data``, with ``where`` as the name of its shards. Raises ServerError if it is none."""
    try:
        wire = msgpack.unpackb(data, strict_map_key=False)
        schema = schema_from_wire(wire["schema"])
        if not 0 < sum(num_blocks for num_blocks, _ in wire["counts"]) <= _MAX_BLOCKS:
            raise ValueError(f"it must have 1 to {_MAX_BLOCKS} blocks")
        if not 0 < schema.row_bytes <= _MAX_ROW_BYTES or not 0 < int(wire["row_bytes"]) <= _MAX_ROW_BYTES:
            raise ValueError(f"a row must have 1 to {_MAX_ROW_BYTES} bytes")
        counts = [_counts(*each) for each in wire["counts"]]
        drawn = enumerate(zip(counts, wire["drawings"], strict=True))
        return Table(
            _tree_from_wire(wire["tree"], schema, where),
            counts,
            [None if drawing is None else _drawing(blocks, of_set, *drawing) for of_set, (blocks, drawing) in drawn],
            int(wire["num_shards"]),
            dict(wire["of"]),
            listing_of(wire["listing"]),
            [Damage(**damage) for damage in wire["damages"]],
            str(wire["left_out"]),
            int(wire["row_bytes"]),
            str(wire["digest"]),
            bytes(memoryview(wire["shards"])),
        )
    except _UNREADABLE as error:
        raise ServerError(
            f"the description of the data set from {where} cannot be read: {type(error).__name__}: {error!s:.300}",
            hint="Install the same version of loaderd on both sides.",
        ) from None


def _counts(num_blocks: int, column: bytes) -> Int64s:
    if num_blocks <= 0:
        raise ValueError(f"{num_blocks} blocks")
    inflated = zlib.decompressobj().decompress(column, 4 * num_blocks)
    return np.frombuffer(inflated, "<u4", num_blocks).astype(np.int64)


def _drawing_to_wire(drawing: Drawing) -> list[Any]:
    masses = zlib.compress(drawing.masses.astype("<i8").tobytes(), 1)
    is_first = None if drawing.is_first is None else zlib.compress(np.packbits(drawing.is_first).tobytes(), 1)
    return [drawing.num_records, drawing.most_mass, masses, is_first]


def _drawing(
    counts: Int64s, of_set: int, num_records: int, most_mass: int, column: bytes, first: bytes | None
) -> Drawing:
    """A drawing that came from elsewhere, of blocks of so many records. Raises ValueError if it is none."""
    inflated = zlib.decompressobj().decompress(column, 8 * len(counts))
    masses = np.frombuffer(inflated, "<i8", len(counts)).astype(np.int64)
    if not type(num_records) is type(most_mass) is int or not 0 < most_mass <= MOST_MASS:
        raise ValueError("its numbers are none")
    if masses.min() < 0 or not 0 < num_records <= masses.sum(dtype=np.float64) < MOST_MASS:
        raise ValueError("its masses are none")
    if (-(-masses // (int(masses.sum()) // num_records)) > counts).any():
        raise ValueError("it draws more records than there are")
    is_first = None
    if first is not None:
        bits = zlib.decompressobj().decompress(first, -(-len(counts) // 8))
        is_first = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(counts)).view(np.bool_)
    return Drawing(masses, num_records, most_mass, of_set, is_first)


def _tree_to_wire(dataset: AnyDataset) -> dict[str, Any]:
    if isinstance(dataset, Concat):
        return {"concat": [_tree_to_wire(part) for part in dataset.sets]}
    if isinstance(dataset, Mix):
        return {
            "mix": {name: _tree_to_wire(part) for name, part in dataset.sets.items()},
            "weights": [[epoch, weights] for epoch, weights in _weights_of(dataset)],
            "epoch_records": dataset.epoch_records,
        }
    return {**_order_to_wire(dataset), "refresh": dataset.refresh}


def _order_to_wire(leaf: Dataset) -> dict[str, Any]:
    shuffle = leaf.shuffle
    return {
        "shuffle": [shuffle.window_records, shuffle.block_records] if isinstance(shuffle, Shuffle) else shuffle,
        "seed": leaf.seed,
        "on_corrupt": leaf.on_corrupt,
    }


def _weights_of(mix: Mix) -> Iterator[tuple[int, dict[str, Any]]]:
    """(epoch, weights), exactly as they were given: the order depends on their last bits."""
    by_epoch = mix.weights if all(isinstance(each, Mapping) for each in mix.weights.values()) else {0: mix.weights}
    for epoch, weights in by_epoch.items():
        yield int(epoch), {name: _weight_to_wire(weight) for name, weight in weights.items()}


def _weight_to_wire(weight: Any) -> float | list[int]:
    is_exact = isinstance(weight, Rational)
    return [int(weight.numerator), int(weight.denominator)] if is_exact else float(weight)


def _tree_from_wire(wire: Mapping[str, Any], schema: Schema, where: str) -> AnyDataset:
    if "concat" in wire:
        return Concat([_tree_from_wire(part, schema, where) for part in wire["concat"]])
    if "mix" in wire:
        weights = {
            epoch: {name: Fraction(*each) if isinstance(each, list) else each for name, each in weights.items()}
            for epoch, weights in wire["weights"]
        }
        sets = {name: _tree_from_wire(part, schema, where) for name, part in wire["mix"].items()}
        return Mix(weights, sets, wire["epoch_records"])
    shuffle = wire["shuffle"]
    return Dataset(
        where,
        schema,
        shuffle if isinstance(shuffle, bool) else Shuffle(*shuffle),
        wire["seed"],
        wire["on_corrupt"],
        "none",
        wire["refresh"],
    )

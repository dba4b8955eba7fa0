"""loaderd: batches for TensorFlow from TFRecord shards of bit-packed records, made by worker processes."""

from loaderd import errors, schemas
from loaderd.client.batch import Batch
from loaderd.client.connect import ServedLoader, connect
from loaderd.client.loader import Loader
from loaderd.dataset import Concat, Dataset, Mix
from loaderd.options import Shuffle
from loaderd.plan.positions import Position
from loaderd.randomness import RecordRandom
from loaderd.schema import Array, Bits, Derived, Float, Int64, Packed, PackedBits, Raw, Schema
from loaderd.statistics import Statistics
from loaderd.symmetry import board_symmetry
from loaderd.tls import TLS
from loaderd.version import VERSION

__version__ = VERSION

__all__ = [  # noqa: RUF022 - in the order of sorted(), which does not put capitals first
    "Array",
    "Batch",
    "Bits",
    "Concat",
    "Dataset",
    "Derived",
    "Float",
    "Int64",
    "Loader",
    "Mix",
    "Packed",
    "PackedBits",
    "Position",
    "Raw",
    "RecordRandom",
    "Schema",
    "ServedLoader",
    "Shuffle",
    "Statistics",
    "TLS",
    "board_symmetry",
    "connect",
    "errors",
    "schemas",
]

"""loaderd: shuffled, unpacked batches of bit-packed records, made by worker processes.

A name is imported when it is first used, because the daemon, which is started for every loader, needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from loaderd.version import VERSION

if TYPE_CHECKING:
    from loaderd import errors, schemas, testing
    from loaderd.client.batch import Batch
    from loaderd.client.connect import connect
    from loaderd.client.loader import Loader
    from loaderd.dataset import Concat, Dataset, Mix
    from loaderd.observe.diagnose import Diagnosis
    from loaderd.observe.statistics import Statistics
    from loaderd.options import Shuffle, Storage
    from loaderd.plan.positions import Position
    from loaderd.plan.sampling import Sample
    from loaderd.plan.selection import PowerLaw
    from loaderd.randomness import RecordRandom
    from loaderd.remote.security import TLS
    from loaderd.schema import (
        Array,
        Bits,
        CFunction,
        Codes,
        Derived,
        Fill,
        FixedRecords,
        Float,
        Int64,
        Length,
        OneHot,
        Packed,
        PackedBits,
        Planes,
        PrefixCodes,
        Raw,
        Scatter,
        Schema,
        Sparse,
        Spread,
    )
    from loaderd.schemas.symmetry import board_symmetry
    from loaderd.selfplay import katago_selfplay
    from loaderd.snapshots import StorageCounts
    from loaderd.storage.names import Columns

__version__ = VERSION

__all__ = [  # noqa: RUF022 - in the order of sorted(), which does not put names like TLS first
    "Array",
    "Batch",
    "Bits",
    "CFunction",
    "Codes",
    "Columns",
    "Concat",
    "Dataset",
    "Derived",
    "Diagnosis",
    "Fill",
    "FixedRecords",
    "Float",
    "Int64",
    "Length",
    "Loader",
    "Mix",
    "OneHot",
    "Packed",
    "PackedBits",
    "Planes",
    "Position",
    "PowerLaw",
    "PrefixCodes",
    "Raw",
    "RecordRandom",
    "Sample",
    "Scatter",
    "Schema",
    "Shuffle",
    "Sparse",
    "Spread",
    "Statistics",
    "Storage",
    "StorageCounts",
    "TLS",
    "board_symmetry",
    "connect",
    "errors",
    "katago_selfplay",
    "schemas",
    "testing",
]

_HOME = {
    **dict.fromkeys(["Concat", "Dataset", "Mix"], "dataset"),
    "Columns": "storage.names",
    "Batch": "client.batch",
    "Diagnosis": "observe.diagnose",
    "Loader": "client.loader",
    "Position": "plan.positions",
    "PowerLaw": "plan.selection",
    "RecordRandom": "randomness",
    "Sample": "plan.sampling",
    **dict.fromkeys(["Shuffle", "Storage"], "options"),
    "Statistics": "observe.statistics",
    "StorageCounts": "snapshots",
    "TLS": "remote.security",
    "board_symmetry": "schemas.symmetry",
    "connect": "client.connect",
    "katago_selfplay": "selfplay",
}
"""Where a name is defined that is not in ``schema``, as most are."""


def __getattr__(name: str) -> Any:
    if name in ("errors", "schemas", "testing"):
        return importlib.import_module(f"loaderd.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'loaderd' has no attribute '{name}'")
    found = globals()[name] = getattr(importlib.import_module(f"loaderd.{_HOME.get(name, 'schema')}"), name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__doc__", "__version__"]

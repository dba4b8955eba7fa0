"""An error names the records that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loaderd.errors import Damage, LoaderdError, WorkerError
from loaderd.plan.epoch import Slice

_UNKNOWN = -1


class ErrorContext(Protocol):
    """Makes an error name ``records``, of which the data know the shards."""

    def __call__(self, records: Sequence[Slice], error: LoaderdError, *, survived: bool = False) -> LoaderdError:
        """``survived``: the worker lives; it cannot make a row of the first record."""


def naming(error: LoaderdError, named: str, shard: str, record: int = _UNKNOWN, *, survived: bool) -> WorkerError:
    """``error`` with the records that are ``named`` behind it; the first is ``record`` of ``shard``."""
    if survived:
        which, expected = "Called with one record at a time, it fails first at", "a record of which a row can be made"
    else:
        which, expected = "It holds", "records that workers survive"
    damage = Damage(shard, record, _UNKNOWN, expected, error.message)
    text = f"{error.message}. {which}{named}"
    return WorkerError(text, hint=error.hint, damage=damage, traceback=error.traceback)

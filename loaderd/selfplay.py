"""Data sets of programs that play and learn at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from loaderd.dataset import Dataset
from loaderd.plan.selection import PowerLaw
from loaderd.schema import Schema


def katago_selfplay(
    folder: Any,
    schema: Schema | None = None,
    *,
    window: Callable[[int], int] = PowerLaw(),  # noqa: B008 - it cannot be changed
    **options: Any,
) -> Dataset:
    """The newest rows that KataGo's self-play has written below ``folder``, as its python/shuffle.py chooses them.

    ``folder``: the path or URI of one, or several, such as ``selfplay``, where KataGo writes
    ``selfplay/NET/tdata/….npz``. Files may be of any size, come while a training goes on, and need no shuffled copy:
    each epoch is made of the newest rows that there are when it begins, by the times of the files. ``window``: how
    many, by how many rows there are. ``schema``: by default :func:`loaderd.schemas.katago`. ``options``: further
    ones of :class:`~loaderd.Dataset`. Raises as Dataset does.
    """
    from loaderd.schemas.kata import katago

    folders = folder if isinstance(folder, Sequence) and not isinstance(folder, str) else [folder]
    shards = [f"{str(each).rstrip('/')}/**/*.npz" for each in folders]
    options = {"refresh": "epoch", "order": "time", **options}
    return Dataset(shards, katago() if schema is None else schema, **options).newest(window)

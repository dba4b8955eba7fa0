"""The loader behind a data set: ``dataset.loader``, and its ``close()``, ``statistics()`` and ``diagnose()``.

A ``tf.data.Dataset`` that is made of another one, by ``map()`` or the like, is a new object that TensorFlow makes. It
keeps the loader alive, but does not have these names: they are those of the data set that loaderd returned.
"""

from __future__ import annotations

from typing import Any

from loaderd.client.base import BaseLoader


def attach(dataset: Any, loader: BaseLoader, batches_per_step: int = 1) -> Any:
    """Give ``dataset`` the names; ``batches_per_step``: of the loader, for an element of the data set."""
    dataset.loader = loader
    dataset.close = loader.close
    dataset.statistics = loader.statistics
    dataset.diagnose = loader.diagnose
    dataset._loaderd_batches_per_step = batches_per_step
    return dataset


def loader_of(dataset: Any) -> BaseLoader | None:
    """The loader behind ``dataset``, if it is one that loaderd returned."""
    loader = getattr(dataset, "loader", None)
    return loader if isinstance(loader, BaseLoader) else None


def batches_per_step(dataset: Any) -> int:
    """How many batches of its loader an element of such a data set takes."""
    return int(dataset._loaderd_batches_per_step)

"""The loader behind a data set: ``dataset.loader``, and its ``close()``, ``statistics()`` and ``diagnose()``.

A ``tf.data.Dataset`` that is made of another one, by ``map()`` or the like, is a new object that TensorFlow makes. It
keeps the loader alive, but only the data set that loaderd returned has these attributes.
"""

from __future__ import annotations

from typing import Any

from loaderd.client.loader import Loader


def attach(dataset: Any, loader: Loader, batches_per_step: int = 1) -> Any:
    """Give ``dataset`` these attributes; ``batches_per_step``: how many batches make an element. Returns it."""
    dataset.loader = loader
    dataset.close = loader.close
    dataset.statistics = loader.statistics
    dataset.diagnose = loader.diagnose
    dataset._loaderd_batches_per_step = batches_per_step
    return dataset


def loader_of(dataset: Any) -> Loader | None:
    """The loader behind ``dataset``, if it is one that loaderd returned."""
    loader = getattr(dataset, "loader", None)
    return loader if isinstance(loader, Loader) else None

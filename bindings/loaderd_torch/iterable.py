"""A loader as a data set for ``torch.utils.data.DataLoader``, for programs that must have one.

loaderd's own workers unpack the batches, in loaderd's order; the DataLoader only hands them on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from loaderd.client.base import BaseLoader
from loaderd.client.elements import Structure
from loaderd.errors import OptionError
from loaderd_torch.tensors import batches

_HINT = "Use DataLoader(dataset, batch_size=None, num_workers=0); loaderd has workers of its own: Loader(workers=…)."


def dataset(loader: BaseLoader, structure: Structure = None) -> Dataset:
    """The batches of ``loader`` on the host, for ``DataLoader(dataset, batch_size=None, num_workers=0)``.

    ``structure`` is that of :func:`batches`; the DataLoader turns tuples in it into lists. ``state_dict()`` and
    ``load_state_dict()`` are what torchdata's StatefulDataLoader looks for. Batch size, order and share are the
    loader's. When an iteration begins, raises OptionError if the DataLoader would batch again or has workers.
    """
    return Dataset(loader, structure)


class Dataset(IterableDataset[Any]):  # type: ignore[misc]  # torch is not there for mypy
    """What :func:`dataset` returns."""

    def __init__(self, loader: BaseLoader, structure: Structure) -> None:
        super().__init__()
        self._batches = batches(loader, structure)

    @property
    def loader(self) -> Any:
        """The loader that the batches come from."""
        return self._batches.loader

    def __len__(self) -> int:
        """Batches of the next iteration; TypeError if it has no end."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise _worker_error()
        # A DataLoader does not tell its data set that it will batch the elements. But the caller of this method is
        # the object that would do so, and it knows: torch.utils.data._utils.fetch.
        caller = sys._getframe(1).f_locals.get("self")
        if getattr(caller, "auto_collation", False):
            raise OptionError(
                "batch_size of the DataLoader must be None, got another: it would batch again what are batches",
                hint=_HINT,
            )
        return iter(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer stands."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Have the next iteration begin there."""
        self._batches.load_state_dict(state_dict)

    def __reduce__(self) -> Any:
        """Raises OptionError: a DataLoader whose workers are not forks pickles its data set for them."""
        raise _worker_error()


def _worker_error() -> OptionError:
    return OptionError(
        "num_workers of the DataLoader must be 0, got another: the batches are in the memory of the process that "
        "made the loader, and each worker would need a loader of its own",
        hint=_HINT,
    )

"""The data sets that a maker reads: asked of the daemon when they are first needed, and kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from loaderd.client.transport import ask_server
from loaderd.daemon.catalog import data_of
from loaderd.gateway.answers import NotReady
from loaderd.gateway.row_answers import ServedSet
from loaderd.ipc.messages import AskData, DataIs
from loaderd.plan.passes import Listing
from loaderd.shm.anonymous import SharedMemory
from loaderd.storage.access import no_callback

_ANSWER_TIMEOUT_S = 30.0
_MOST_LISTINGS = 4


class ServedSets:
    """The data sets of the daemon at ``daemon``, an address ``unix:…``; ``on_wait`` as in ServedSet."""

    def __init__(self, daemon: str, on_wait: Callable[[], None] = no_callback) -> None:
        self._daemon = daemon
        self._on_wait = on_wait
        self._found: OrderedDict[tuple[str, Listing | None], ServedSet] = OrderedDict()

    def get(self, dataset: str, listing: Listing | None, is_new: bool = False) -> ServedSet:
        """The data set; if it grows, with the shards of ``listing``, or None: those that there are now.

        ``is_new``: ask the daemon which these are, even if it has said so before. Raises NotReady, TransportLost, and
        the error with which the daemon refuses.
        """
        known = self._found.get((dataset, listing))
        if known is not None and not (is_new and listing is None and known.dataset.grows):
            self._found.move_to_end((dataset, listing))
            return known
        found = ServedSet(*data_of(ask_data(self._daemon, dataset, listing)), self._on_wait)
        before = set(self._found.values())
        for each in {listing, found.data.listing}:
            self._found[dataset, each] = found
            self._found.move_to_end((dataset, each))
        while len(self._found) > _MOST_LISTINGS * len({name for name, _ in self._found}):
            self._found.popitem(last=False)
        for gone in before.difference(self._found.values()):
            gone.close()
        return found


def ask_data(daemon: str, dataset: str, listing: Listing | None) -> bytes:
    """The pickled data set of ``daemon.catalog.ServedDataset.data``. Raises NotReady, TransportLost, LoaderdError."""
    question = AskData(dataset, listing)
    answer, fd = ask_server(daemon, DataIs, question, timeout_s=_ANSWER_TIMEOUT_S)
    if fd is None:
        raise NotReady(answer.why_not)
    memory = SharedMemory(fd)
    memory.close_fd()
    return memory.bytes[: answer.num_bytes].tobytes()

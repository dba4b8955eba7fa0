"""The data sets that a maker reads: asked of the daemon when they are first needed, and kept."""

from __future__ import annotations

from collections import OrderedDict

from loaderd.client.link import LinkLost, link_to_server
from loaderd.daemon.catalog import data_of
from loaderd.errors import from_wire
from loaderd.gateway.answers import NotReady
from loaderd.gateway.row_answers import ServedSet
from loaderd.memory.anonymous import SharedMemory
from loaderd.plan.passes import Listing
from loaderd.protocol.channel import ChannelClosed
from loaderd.protocol.messages import PROTOCOL, AskData, Bye, DataIs, Failed, Hello
from loaderd.version import VERSION

_ANSWER_TIMEOUT_S = 30.0
_MOST_LISTINGS = 4


class ServedSets:
    """Of the daemon at ``daemon``, an address ``unix:…``."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._found: OrderedDict[tuple[str, Listing | None], ServedSet] = OrderedDict()

    def get(self, dataset: str, listing: Listing | None, is_new: bool = False) -> ServedSet:
        """The data set, of these shards where it grows; ``is_new``: of those that there are now.

        Raises NotReady, LinkLost, and the error with which the daemon refuses.
        """
        known = self._found.get((dataset, listing))
        if known is not None and not (is_new and listing is None and known.dataset.grows):
            return known
        found = ServedSet(*data_of(ask_data(self._daemon, dataset, listing)))
        for each in {listing, found.data.listing}:
            self._found[dataset, each] = found
        while len(self._found) > _MOST_LISTINGS * len({name for name, _ in self._found}):
            self._found.popitem(last=False)
        return found


def ask_data(daemon: str, dataset: str, listing: Listing | None) -> bytes:
    """What ``daemon.catalog.Served.data`` gives. Raises NotReady, LinkLost, LoaderdError."""
    link = link_to_server(daemon)
    link.channel.socket.settimeout(_ANSWER_TIMEOUT_S)
    try:
        link.channel.send(Hello(PROTOCOL, VERSION, ""))
        link.channel.send(AskData(dataset, None if listing is None else list(listing)))
        while True:
            for message in link.channel.receive():
                if isinstance(message, DataIs):
                    if message.why_not:
                        raise NotReady(message.why_not)
                    memory = SharedMemory(link.channel.take_fd())
                    memory.close_fd()
                    return memory.bytes[: message.num_bytes].tobytes()
                if isinstance(message, Failed):
                    raise from_wire(message.error)
                if isinstance(message, Bye):
                    raise LinkLost(message.text)
    except ChannelClosed as closed:
        raise LinkLost(f"{link.what} does not answer: {closed}") from None
    finally:
        link.close()

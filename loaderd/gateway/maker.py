"""A process that makes answers: it reads shards as workers do, and writes rows to the gateway's memory.

It starts with Making (settings: "unix", "log_format"; the memory of the answers comes along), and then answers each
Make with Made, one at a time, until the gateway closes the channel. While that takes long, it sends Waits; and before
each row, if a maker has died of the ticket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import threading
import time
from collections.abc import Callable
from functools import partial

from loaderd.client.transport import TransportLost
from loaderd.errors import LoaderdError, OptionError, ServerError, ShardError, WorkerError
from loaderd.gateway.answers import CELL_BYTES, NotReady, check_size
from loaderd.gateway.served import ServedSets
from loaderd.ipc.channel import Channel, ChannelClosed
from loaderd.ipc.child import enter_process
from loaderd.ipc.messages import Made, Make, Making, Waits
from loaderd.logs import configure
from loaderd.remote.tickets import REMOTE_PROTOCOL, RowsTicket, TableRequest, faults_to_wire, parse
from loaderd.shm.anonymous import SharedMemory
from loaderd.version import VERSION

_TELL_EVERY_S = 1.0

_logger = logging.getLogger("loaderd")


class Maker:
    """Makes answers from the data sets of the daemon at ``daemon``, an address ``unix:…``; rows go to ``memory``.

    ``tell`` is called with -1 now and then, at most once a second, while storage does not answer or rows are made;
    and with the number of each row before it is made, where rows are wanted one by one.
    """

    def __init__(self, daemon: str, memory: SharedMemory, tell: Callable[[int], None] = lambda row: None) -> None:
        self._sets = ServedSets(daemon, self._on_wait)
        self._memory = memory
        self._tell = tell
        self._told_s = 0.0

    def _on_wait(self) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._tell(-1)

    def answer(self, wanted: Make) -> Made:
        """The answer; or, if anything goes wrong, what it was. Raises nothing."""
        try:
            return self._table(wanted) if wanted.cell < 0 else self._rows(wanted)
        except (NotReady, TransportLost) as error:
            return Made(why_not=str(error))
        except LoaderdError as error:
            return Made(error=error)
        except Exception as error:
            _logger.exception("an answer cannot be made")
            return Made(error=ServerError(f"the server failed: {type(error).__name__}: {error}"))

    def _table(self, wanted: Make) -> Made:
        request = parse(TableRequest, wanted.text)
        if request.protocol != REMOTE_PROTOCOL:
            raise ServerError(
                f"this server is loaderd {VERSION} and speaks network protocol {REMOTE_PROTOCOL}; "
                f"the consumer speaks {request.protocol!r:.40}",
                hint="Install the same version on both sides.",
            )
        return Made(table=self._sets.get(request.dataset, request.listing, is_new=True).table)

    def _rows(self, wanted: Make) -> Made:
        ticket = parse(RowsTicket, wanted.text)
        try:
            served = self._sets.get(ticket.dataset, ticket.listing)
        except (OptionError, ShardError, WorkerError) as error:  # who asks had these data: they may come back
            raise NotReady(error.message) from None
        served.check(ticket)
        check_size(ticket.num_rows, served.row_bytes)
        shape = ticket.num_rows, served.row_bytes
        num_bytes = shape[0] * shape[1]
        if num_bytes > wanted.num_cells * CELL_BYTES:
            return Made(needed_bytes=num_bytes)
        start = wanted.cell * CELL_BYTES
        rows = self._memory.bytes[start : start + num_bytes].reshape(shape)
        faults = served.maker.make(ticket, rows, wanted.without, self._tell if wanted.one_by_one else None)
        return Made(*shape, faults_to_wire(faults))


def _end_with(parent: int) -> None:
    """Have this process end when the gateway has, even in the middle of an answer, which might take for ever."""
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        select.select([os.pidfd_open(parent)], [], [])
    os._exit(0)


def _tell(channel: Channel, row: int) -> None:
    with contextlib.suppress(ChannelClosed):  # the gateway has ended, which the next message shows
        channel.send(Waits(row))


def main() -> None:
    """Entry point of the process: see ``ipc.spawn.start_process``."""
    sock, parent = enter_process("loaderd-maker")
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))  # the gateway's own, which those started later inherit
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    channel = Channel(sock)
    maker: Maker | None = None
    with contextlib.suppress(ChannelClosed):  # the gateway has ended
        while True:
            for message in channel.receive():
                if isinstance(message, Making):
                    configure(message.settings["log_format"], "maker")
                    daemon = f"unix://{message.settings['unix']}"
                    maker = Maker(daemon, SharedMemory(channel.take_fd()), partial(_tell, channel))
                elif isinstance(message, Make) and maker is not None:
                    channel.send(maker.answer(message))

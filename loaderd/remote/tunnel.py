"""The gateway's part in an exchange: a consumer on another machine, as a consumer of the daemon on this one.

::

    daemon ──── Unix socket, slots ──── Tunnel ════ Flight exchange ════ relay
             ── messages ────────────────────────── as they are ──────►
             ── Ready ──► the batch in the slot, a chunk for each ────►
             ◄─ messages ────────────────────────── checked ───────────

The call's thread carries down, and a second one carries up. A batch is sent out of its slot; when gRPC has let go of
that, the slot goes back to the daemon, which therefore makes no more batches than the network takes.

Of a "shared" stream a batch is used up when its slot is released, which only the consumer can say: there the consumer
releases the daemon's slots, and may send any numbers; what he spoils is his own stream.

**How it ends.** Either side's end wakes the other thread: the daemon's socket is shut down, or, if the consumer does
not go when it was told that the daemon has, its network connection is cut.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import weakref
from collections import deque
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from loaderd.client.batch import SlotReader
from loaderd.errors import OptionError, ServerError
from loaderd.memory.layout import SlotLayout
from loaderd.memory.shared import SharedMemory
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import Bye, Failed, Message, Opened, Ready, Release, Subscribe, Welcome, encode
from loaderd.protocol.untrusted import CONSUMER_MESSAGES, MalformedMessage, decode_strict
from loaderd.remote.arrow import arrow_schema, record_batch, stored_specs
from loaderd.remote.sockets import Peer, cut_off
from loaderd.remote.wire import Compression, write_options
from loaderd.schema import Schema
from loaderd.schema.wire import from_wire
from loaderd.subscription import Subscription

# From the last word to a consumer until it is shut out: it may have much to read.
_LEAVE_TIMEOUT_S = 10.0


class Tunnel:
    """Between ``channel``, to the daemon, and the two ends of an exchange, of which the other end is at ``peer``."""

    def __init__(
        self,
        channel: Channel,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        compression: Compression,
        peer: Peer,
    ) -> None:
        self._channel = channel
        self._from_consumer = reader
        self._to_consumer = writer
        self._compression = compression
        self._peer = peer
        self._sending = threading.Lock()
        self._ended = _EndedLeases()
        self._schema: Schema | None = None
        self._subscription: Subscription | None = None
        self._slots: SlotReader | None = None
        self._arrow_schema: pa.Schema | None = None
        self._refusal = ""  # no exception: that would have hold of this object, and this object of that

    def run(self) -> None:
        """Until either side is gone. Raises ServerError where the consumer sent what it must not."""
        up = threading.Thread(target=self._carry_up, name="up", daemon=True)
        up.start()
        try:
            # The consumer's end shows in an exception of Arrow's, the daemon's in ChannelClosed.
            with contextlib.suppress(pa.ArrowException, OSError):
                try:
                    self._carry_down()
                except ChannelClosed:
                    self._to_consumer.write_metadata(encode(Bye("the server's daemon is gone")))
        finally:
            self._channel.close()
            if not self._refusal:
                up.join(_LEAVE_TIMEOUT_S)
            if not self._refusal and up.is_alive():  # the exchange must not end while this thread reads from it
                cut_off(self._peer)
                up.join()
        if self._refusal:
            raise ServerError(self._refusal)

    # --------------------------------------------------------------------------------------------- down

    def _carry_down(self) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(self._ended.fd, select.POLLIN)
        while True:
            arrived = [fd for fd, _ in poll.poll()]
            if self._ended.fd in arrived:
                os.eventfd_read(self._ended.fd)
                self._take_back()
            if self._channel.fileno() in arrived:
                for message in self._channel.receive():
                    self._down(message)
                    if isinstance(message, (Failed, Bye)):
                        return

    def _down(self, message: Message) -> None:
        if isinstance(message, Ready):
            for step, slot, num_records in message.batches:
                self._send_batch(message.generation, step, slot, num_records)
            self._take_back()
            return
        if isinstance(message, Welcome) and message.dataset:
            self._schema = from_wire(message.dataset["schema"])
        elif isinstance(message, Opened):
            self._open()
        self._to_consumer.write_metadata(encode(message))

    def _open(self) -> None:
        schema, subscription = self._schema, self._subscription
        assert schema is not None and subscription is not None
        specs = stored_specs(schema) if subscription.packed else schema.specs
        memory = SharedMemory(self._channel.take_fd())
        memory.close_fd()
        layout = SlotLayout(specs, subscription.batch_size, several_readers=not memory.writable)
        self._slots = SlotReader(memory.bytes, layout)
        self._slots.ended = self._ended
        self._arrow_schema = arrow_schema(specs)
        self._to_consumer.begin(self._arrow_schema, options=write_options(self._compression))

    def _send_batch(self, generation: int, step: int, slot: int, num_records: int) -> None:
        assert self._slots is not None
        arrays = self._slots.lend(slot, num_records)
        batch = record_batch(self._arrow_schema, arrays, num_records)
        del arrays
        ready = Ready(generation, [[step, slot, num_records]])
        self._to_consumer.write_with_metadata(batch, encode(ready))

    def _take_back(self) -> None:
        """Give the slots back that gRPC has let go of."""
        assert self._slots is not None and self._subscription is not None
        slots = self._slots.take_back()
        if slots and self._subscription.sharing != "shared":
            self._tell_daemon(Release(slots))

    def _tell_daemon(self, message: Message) -> None:
        with self._sending:
            self._channel.send(message)

    # ----------------------------------------------------------------------------------------------- up

    def _carry_up(self) -> None:
        try:
            while True:
                chunk = self._from_consumer.read_chunk()
                if chunk.data is not None or chunk.app_metadata is None:
                    raise MalformedMessage("a chunk must be a message, and no data")
                self._up(decode_strict(chunk.app_metadata.to_pybytes(), CONSUMER_MESSAGES))
        except (MalformedMessage, ServerError) as error:
            self._refusal = f"what the consumer sent is refused: {error}"
        except (StopIteration, ChannelClosed, pa.ArrowException, OSError):
            pass  # one of the two is gone
        finally:
            with contextlib.suppress(OSError):
                self._channel.socket.shutdown(2)

    def _up(self, message: Message) -> None:
        if isinstance(message, Subscribe):
            if self._subscription is not None:
                raise ServerError("a connection is for one stream")
            with contextlib.suppress(OptionError):  # the daemon will say so
                self._subscription = Subscription.from_wire(message.options)
            message = message._replace(reads_page=False)  # it is on this machine
        elif isinstance(message, Release) and (self._subscription is None or self._subscription.sharing != "shared"):
            return
        self._tell_daemon(message)


def dismiss(
    reader: flight.MetadataRecordBatchReader, writer: flight.MetadataRecordBatchWriter, last_word: Message, peer: Peer
) -> None:
    """Tell a consumer why there is no stream for it, and wait until it goes.

    If the exchange ended first, a consumer that writes at that moment would not get to read it.
    """
    deadline = threading.Timer(_LEAVE_TIMEOUT_S, cut_off, [peer])
    deadline.start()
    try:
        writer.write_metadata(encode(last_word))
        while True:
            reader.read_chunk()
    except (StopIteration, pa.ArrowException, OSError):
        deadline.cancel()


class _EndedLeases(deque[Any]):
    """Leases that have ended, as ``SlotReader.ended``; ``fd`` can be read when there are any.

    gRPC lets go of a batch in threads of its own, now and then behind the write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)  # not before the last lease that would write to it

    def append(self, lease: Any) -> None:
        super().append(lease)
        os.eventfd_write(self.fd, 1)

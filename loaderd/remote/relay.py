"""The relay: a consumer's end of a connection to a server on another machine, as a process beside the consumer.

::

    consumer                     relay                                              gateway
       │ ──Dial───────────────────► │ ══ TLS, token, exchange ═══════════════════════► │
       │ ──Hello, Subscribe, …────► │ ── as they are ────────────────────────────────► │
       │ ◄─Welcome, Listed, …────── │ ◄───────────────────────────────── as they are ─ │
       │ ◄─Opened, slots─────────── │  slots of its own                                │
       │ ◄─Ready───────────────────┤│ ◄──────────────────────── Ready with a batch ─── │
       │ ──Release────────────────► │  the slot is free                                │

To the consumer it is a server on this machine. Two threads: the first reads what the consumer says, the second what
the server says; that one stops reading where no slot is free, and so, in the end, does the server stop sending.

**How it ends.** With the consumer; or with Failed, where the server refuses us, which it would again; or with Bye,
where the server cannot be reached, or not any more. Then the process exits at once, for Flight's own shutdown may
crash at the interpreter's end.

A slot of the server's is given back by the gateway when its batch has been sent. Of a "shared" stream it is given
back when the consumer has released the batch, for this is what uses it up: its number is kept until then.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import threading
from typing import NoReturn

import pyarrow as pa

from loaderd.errors import LoaderdError, ServerError, to_wire
from loaderd.memory.layout import SlotLayout
from loaderd.memory.shared import SharedMemory
from loaderd.protocol.channel import Channel, ChannelClosed
from loaderd.protocol.messages import (
    Bye,
    Dial,
    Failed,
    Message,
    Opened,
    Ready,
    Release,
    Subscribe,
    Welcome,
    encode,
)
from loaderd.protocol.process import enter_process
from loaderd.remote.dial import Uplink
from loaderd.remote.unpack import SlotFiller
from loaderd.remote.wire import decode_from_server
from loaderd.schema import Schema
from loaderd.schema.wire import from_wire
from loaderd.subscription import Subscription

# One is being filled, two are on their way to the consumer.
_SLOTS_BESIDE_HELD = 3


class Relay:
    """Between ``channel``, to the consumer, and ``uplink``, to the server."""

    def __init__(self, channel: Channel, uplink: Uplink) -> None:
        self._channel = channel
        self._uplink = uplink
        self._schema: Schema | None = None
        self._subscription: Subscription | None = None
        self._filler: SlotFiller | None = None
        self._free: queue.LifoQueue[int] = queue.LifoQueue()  # who was freed last is still in the cache
        self._server_slots: dict[int, int] = {}

    def run(self, messages: list[Message], parent_fd: int) -> None:
        """Until the consumer or its process is gone. ``messages``: what it has said already."""
        threading.Thread(target=self._carry_down, name="down", daemon=True).start()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(parent_fd, select.POLLIN)
        with contextlib.suppress(ChannelClosed):
            while True:
                for message in messages:
                    self._up(message)
                if parent_fd in (fd for fd, _ in poll.poll()):
                    return
                messages = self._channel.receive()

    def _up(self, message: Message) -> None:
        if isinstance(message, Release):
            freed = message.slots
            message = Release([self._server_slots.pop(slot) for slot in freed if slot in self._server_slots])
            for slot in freed:
                self._free.put(slot)
            if not message.slots:
                return
        elif isinstance(message, Subscribe):
            self._subscription = Subscription.from_wire(message.options)
        # If the connection is gone, the other thread finds that out, and what to say of it.
        with contextlib.suppress(pa.ArrowException, OSError):
            self._uplink.send(encode(message))

    def _carry_down(self) -> NoReturn:
        try:
            while True:
                data, batch = self._uplink.receive()
                self._down(decode_from_server(data), batch)
        except ConnectionError as error:
            end(self._channel, Bye(str(error)))
        except LoaderdError as error:
            end(self._channel, Failed(to_wire(error)))
        except ChannelClosed:
            os._exit(0)

    def _down(self, message: Message, batch: pa.RecordBatch | None) -> None:
        if isinstance(message, Ready):
            self._fill(message, batch)
        elif isinstance(message, Opened):
            self._open(message)
        else:
            if isinstance(message, Welcome) and message.dataset:
                self._schema = from_wire(message.dataset.get("schema"))
            self._channel.send(message)
            if isinstance(message, (Failed, Bye)):
                os._exit(0)

    def _open(self, message: Opened) -> None:
        schema, subscription = self._schema, self._subscription
        if schema is None or subscription is None:
            raise ServerError("the server opened a stream that it was not asked for")
        layout = SlotLayout(schema.specs, subscription.batch_size)
        num_slots = subscription.held_batches + _SLOTS_BESIDE_HELD
        memory = SharedMemory.create("relay", num_slots * layout.slot_bytes)
        self._filler = SlotFiller(schema, subscription.packed, memory.bytes, layout)
        for slot in range(num_slots):
            self._free.put(slot)
        facts = {**message.facts, "slots": num_slots, "slot_bytes": layout.slot_bytes}
        if self._filler.kernels is not None:
            facts["kernels"] = self._filler.kernels
        self._channel.send(Opened(facts), (memory.fd,))
        memory.close_fd()

    def _fill(self, message: Ready, batch: pa.RecordBatch | None) -> None:
        if self._filler is None or self._subscription is None or batch is None or len(message.batches) != 1:
            raise ServerError("the server sent a batch that is not of the form agreed on")
        step, server_slot, _ = message.batches[0]
        slot = self._free.get()
        self._filler.fill(slot, batch)
        if self._subscription.sharing == "shared":
            self._server_slots[slot] = server_slot
        self._channel.send(Ready(message.generation, [[step, slot, batch.num_rows]]))


def end(channel: Channel, last_words: Message) -> NoReturn:
    """Say why, and exit."""
    with contextlib.suppress(ChannelClosed):
        channel.send(last_words)
    os._exit(0)


def main() -> None:
    """Entry point of the relay process: see ``protocol.process.start_process``."""
    os.environ["GRPC_VERBOSITY"] = "NONE"  # what goes wrong is in our own words
    sock, parent = enter_process("loaderd-relay")
    channel = Channel(sock)
    try:
        parent_fd = os.pidfd_open(parent)
        messages = channel.receive()
        while not messages:
            messages = channel.receive()
    except (ProcessLookupError, ChannelClosed):  # the consumer ended while this process started
        return
    dial, *messages = messages
    assert isinstance(dial, Dial)
    try:
        uplink = Uplink(dial)
    except ConnectionError as error:
        end(channel, Bye(str(error)))
    except LoaderdError as error:
        end(channel, Failed(to_wire(error)))
    Relay(channel, uplink).run(messages, parent_fd)
    os._exit(0)

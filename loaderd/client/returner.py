"""Gives back the slots of a member of a group that has left its loop, and asks for no more batches.

In a loop, slots go back with the request for the next batch. A consumer that has left its loop may never ask again,
and the others would wait for its slots at the end of the pass. So a thread waits for the end of iterations, and then
for the ends of the batches that are still held. Only C code wakes it (``SimpleQueue.put``), which may be called
wherever garbage is collected, and lets no Ctrl-C come in between. Taking batches costs no more for it.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loaderd.client.shared_stream import SharedIteration, SharedStream


class Returner:
    """Gives back slots of ``stream``; its thread ends with that, or with :meth:`end`."""

    def __init__(self, stream: SharedStream) -> None:
        self._ends: SimpleQueue[Any] = SimpleQueue()
        self._iterations: set[weakref.ref[SharedIteration]] = set()
        self._leases: set[weakref.ref[Any]] = set()
        self._stream = weakref.ref(stream, self._ends.put)

    def start(self) -> None:
        threading.Thread(target=self._run, name="loaderd-returner", daemon=True).start()

    def watch(self, iteration: SharedIteration) -> None:
        """When this and all other iterations are over or gone, what the consumer lets go of goes back."""
        self._iterations.add(weakref.ref(iteration, self._ends.put))

    def end(self) -> None:
        """The stream is over. Does not wait."""
        self._ends.put(None)

    def _run(self) -> None:
        while self._return_after(self._ends.get()):
            pass

    def _return_after(self, end: weakref.ref[Any] | None) -> bool:
        """Handle the end of an iteration, or of a batch that outlived one. False: the stream has ended."""
        stream = self._stream()
        if end is None or stream is None or stream.is_over:
            return False
        self._iterations.discard(end)
        self._leases.discard(end)
        with stream.lock:
            if not self._is_in_loop():  # nor is it taking a batch now, as that needs the lock
                self._leases.update(weakref.ref(lease, self._ends.put) for lease in stream.give_back())
        return True

    def _is_in_loop(self) -> bool:
        living = [one for ref in list(self._iterations) if (one := ref()) is not None]
        return not all(one.is_over for one in living)

"""Gives back what a member of a group lets go of when it has left its loop, and asks for no batch any more.

In a loop, a slot goes back with the question for the next batch; but who has left it may never ask again, and the
others would wait for that at the end of the pass. So a thread waits for the end of iterations, and then for the ends
of the batches that are still held. What wakes it is C code alone (``SimpleQueue.put``), which may be called wherever
garbage is collected, and lets no Ctrl-C come in between. Where batches are taken, it costs nothing.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loaderd.client.shared_stream import SharedIteration, SharedStream


class Returner:
    """Of a stream; its thread ends with that, or with :meth:`end`."""

    def __init__(self, stream: SharedStream) -> None:
        self._ends: SimpleQueue[Any] = SimpleQueue()
        self._iterations: set[weakref.ref[SharedIteration]] = set()
        self._leases: set[weakref.ref[Any]] = set()
        self._stream = weakref.ref(stream, self._ends.put)

    def start(self) -> None:
        threading.Thread(target=self._run, name="loaderd-returner", daemon=True).start()

    def watch(self, iteration: SharedIteration) -> None:
        """When this is gone, and every other one is, too, what the consumer lets go of goes back."""
        self._iterations.add(weakref.ref(iteration, self._ends.put))

    def end(self) -> None:
        """The stream is over. Does not wait."""
        self._ends.put(None)

    def _run(self) -> None:
        while self._return_after(self._ends.get()):
            pass

    def _return_after(self, end: weakref.ref[Any] | None) -> bool:
        """An iteration, or a batch that has outlived one, is gone; False: the stream is."""
        stream = self._stream()
        if end is None or stream is None or stream.is_over:
            return False
        self._iterations.discard(end)
        self._leases.discard(end)
        with stream.lock:
            if not self._is_in_loop():  # nor takes a batch now: it would need the lock
                self._leases.update(weakref.ref(lease, self._ends.put) for lease in stream.give_back())
        return True

    def _is_in_loop(self) -> bool:
        living = [one for ref in list(self._iterations) if (one := ref()) is not None]
        return not all(one.is_over for one in living)

"""Data sets whose iterators can be interrupted in the main thread.

Such an iterator calls Python in the thread that takes an element. In the main thread, that is where Python would run
the handlers of signals, and of what they raise, such as KeyboardInterrupt, TensorFlow would make an UnknownError. So
they run when the element is there.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import tensorflow as tf

from loaderd.client.end import program_has_ended

# Without the enums that it makes of numbers, which take 15 µs a batch.
_set_handler = getattr(signal.signal, "__wrapped__", signal.signal)


def interruptible(dataset: Any) -> Any:
    """``dataset``, with iterators for which signals wait. What is made of it by ``map()`` or the like has others."""
    dataset.__class__ = _changed_dataset(dataset.__class__)
    return dataset


@cache
def _changed_dataset(kind: Any) -> type:
    def iterate(self: Any) -> Any:
        iterator = kind.__iter__(self)
        if tf.executing_eagerly():
            iterator.__class__ = _changed_iterator(iterator.__class__)
            iterator._loaderd_signals = _handled_signals()
        return iterator

    return _changed(kind, __iter__=iterate)


@cache
def _changed_iterator(kind: Any) -> type:
    def take(self: Any) -> Any:
        if program_has_ended():
            raise StopIteration
        return _uninterrupted(self._loaderd_signals, kind.__next__, self)

    def get_next(self: Any) -> Any:
        return _uninterrupted(self._loaderd_signals, kind.get_next, self)

    return _changed(kind, __next__=take, get_next=get_next)


def _changed(kind: type, **methods: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _uninterrupted(signals: list[int], function: Callable[[Any], Any], argument: Any) -> Any:
    """``function(argument)``; handlers of these signals run behind it. 2 µs."""
    if threading.get_ident() != threading.main_thread().ident:  # where handlers do not run
        return function(argument)
    came: list[int] = []
    handlers: list[tuple[int, Any]] = []
    try:
        for number in signals:
            handlers.append((number, _set_handler(number, lambda number, _: came.append(number))))
        return function(argument)
    finally:
        for number, handler in reversed(handlers):  # SIGINT last: from then on, this can be interrupted
            _set_handler(number, handler)
        for number in came:
            signal.raise_signal(number)


def _handled_signals() -> list[int]:
    """The numbers of signals that have handlers in Python, SIGINT first."""
    numbers = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    return sorted(numbers, key=lambda number: (number != signal.SIGINT, number))

"""Data sets whose iterators can be interrupted in the main thread.

Such an iterator calls Python in the thread that takes an element. In the main thread, that is where Python would run
the handlers of signals, and of what they raise, such as KeyboardInterrupt, TensorFlow would make an UnknownError. So
they run when the element is there.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # without the enums that signal makes of numbers: 100 µs a batch
import signal
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import tensorflow as tf

from loaderd.client.end import program_has_ended

_SIGNALS = [int(signal.SIGINT), *map(int, signal.valid_signals() - {signal.SIGINT})]


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
        return iterator

    return _changed(kind, __iter__=iterate)


@cache
def _changed_iterator(kind: Any) -> type:
    def take(self: Any) -> Any:
        if program_has_ended():
            raise StopIteration
        return _uninterrupted(kind.__next__, self)

    def get_next(self: Any) -> Any:
        return _uninterrupted(kind.get_next, self)

    return _changed(kind, __next__=take, get_next=get_next)


def _changed(kind: type, **methods: Callable[..., Any]) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **methods})


def _uninterrupted(function: Callable[[Any], Any], argument: Any) -> Any:
    """``function(argument)``; handlers of signals that Python runs, it runs behind that. 4 µs."""
    if threading.get_ident() != threading.main_thread().ident:  # where handlers do not run
        return function(argument)
    came: list[int] = []
    handlers: list[tuple[int, Any]] = []
    try:
        for number in _SIGNALS:
            if callable(_signal.getsignal(number)):
                handlers.append((number, _signal.signal(number, lambda number, _: came.append(number))))
        return function(argument)
    finally:
        for number, handler in reversed(handlers):  # SIGINT last: from then on, this can be interrupted
            _signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)

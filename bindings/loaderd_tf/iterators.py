"""The iterators of loaderd's data sets: the thread that takes an element calls Python.

In an eager loop, TensorFlow does so. In a ``tf.function``, its usual operation hands the call to another thread,
which then hands the rest of the graph to a third thread: a third of what a batch cost. So another operation of
TensorFlow's is used here. The thread that runs it does nothing but wait for the batch. So it is not used for batches
that themselves wait for a thread of TensorFlow: for a copy to a device, or for another consumer of the same memory.

In an eager loop in the main thread, Python would run handlers of signals during the call, and TensorFlow would turn
what they raise, such as KeyboardInterrupt, into an UnknownError. So handlers run when the element is there. If one
raises, the iterator gives that element next. (A checkpoint of the iterator made in between is behind that element.)
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module signal makes enums of numbers: 100 µs a batch
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import tensorflow as tf

from loaderd.client.shutdown import ProgramEnded, program_has_ended
from loaderd_tf.keras_calls import check_has_target

_SIGNALS = [int(signal.SIGINT), *map(int, signal.valid_signals() - {signal.SIGINT})]

# How many elements a graph may take without autograph, as in TensorFlow: more is a loop that is traced for ever.
_MAX_TRACED = 32


def with_own_iterators(dataset: Any, *, in_thread: bool, shuffled: bool, has_target: bool) -> Any:
    """``dataset``, with iterators that make signals wait. What ``map()`` or the like makes of it has other iterators.

    ``in_thread``: whether the thread that takes an element calls Python in a graph, too. ``shuffled``: whether each
    iteration has another order, of which ``skip`` warns. ``has_target``: whether its elements are more than a dict
    of fields, for which ``fit`` is refused.
    """
    dataset.__class__ = _changed_dataset(dataset.__class__, in_thread, shuffled, has_target)
    return dataset


@cache
def _changed_dataset(kind: Any, in_thread: bool, shuffled: bool, has_target: bool) -> type:
    def iterate(self: Any) -> Any:
        if not has_target:
            check_has_target(list(self.element_spec))
        iterator = kind.__iter__(self)
        if in_thread or tf.executing_eagerly():
            iterator.__class__ = _changed_iterator(iterator.__class__, in_thread)
        return iterator

    def skip(self: Any, count: Any, name: Any = None) -> Any:
        warnings.warn(
            "skip(…) of a shuffled data set leaves out other records in each iteration. So take(…) and skip(…) do "
            "not split it: training and validation would share records. Split the records: "
            "loaderd.Dataset(…).split(0.9, 0.1), or its take(n) and skip(n). To go on in the middle of an epoch, "
            "give start=loaderd.Position(…). Or give shuffle=False.",
            stacklevel=2,
        )
        return kind.skip(self, count, name)

    return _changed(kind, __iter__=iterate, **({"skip": skip} if shuffled else {}))


@cache
def _changed_iterator(kind: Any, in_thread: bool) -> type:
    def taken(by: Callable[[Any], Any], iterator: Any) -> Any:
        if tf.executing_eagerly():
            return _uninterrupted(by, iterator)
        return _in_thread(by, iterator) if in_thread else by(iterator)

    def take(self: Any) -> Any:
        try:
            if program_has_ended():
                raise StopIteration
            return taken(kind.__next__, self)
        except StopIteration:
            if program_has_ended() and threading.get_ident() != threading.main_thread().ident:
                raise ProgramEnded().for_thread() from None
            raise

    def get_next(self: Any) -> Any:
        return taken(kind.get_next, self)

    def get_next_as_optional(self: Any) -> Any:
        kept = _pop_kept(self) if tf.executing_eagerly() else None
        return kind.get_next_as_optional(self) if kept is None else tf.experimental.Optional.from_value(kept)

    def restore(self: Any, tensors: Any) -> Any:
        _pop_kept(self)
        return kind._restore_from_tensors(self, tensors)

    members: dict[str, Any] = {
        "__next__": take,
        "get_next": get_next,
        "get_next_as_optional": get_next_as_optional,
        "_restore_from_tensors": restore,
    }
    if in_thread:
        members["_type_spec"] = property(lambda self: _IteratorSpec(self.element_spec))
        members["_loaderd_traced"] = 0
    return _changed(kind, **members)


def _changed(kind: type, **members: Any) -> type:
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


# ------------------------------------------------------------------------------------- in a graph


class _IteratorSpec(tf.data.IteratorSpec):  # type: ignore[misc]
    """The spec of an iterator that a ``tf.function`` gets: what it sees as its argument is one of loaderd's, too."""

    __slots__ = ()

    def _from_components(self, components: Any) -> Any:
        iterator = super()._from_components(components)
        iterator.__class__ = _changed_iterator(iterator.__class__, True)
        return iterator


def _in_thread(function: Callable[[Any], Any], iterator: Any) -> Any:
    """The next element of ``iterator``, which ``function(iterator)`` would take in another thread."""
    if iterator._loaderd_traced >= _MAX_TRACED:
        return function(iterator)
    iterator._loaderd_traced += 1
    specs = tf.nest.flatten(iterator.element_spec)
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=resource,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.nest.pack_sequence_as(iterator.element_spec, tensors)


# ---------------------------------------------------------------------------------------- signals


def _uninterrupted(function: Callable[[Any], Any], iterator: Any) -> Any:
    """The next element of ``iterator``, by ``function(iterator)``; handlers of signals run after that. Costs 4 µs.

    If a handler raises, the element is kept for the next call.
    """
    if threading.get_ident() != threading.main_thread().ident:  # handlers run only in the main thread
        return _kept_or_taken(function, iterator)
    came: list[int] = []
    handlers: list[tuple[int, Any]] = []
    element = None
    try:
        try:
            for number in _SIGNALS:
                if callable(_signal.getsignal(number)):
                    handlers.append((number, _signal.signal(number, lambda number, _: came.append(number))))
            element = _kept_or_taken(function, iterator)
        finally:
            for number, handler in reversed(handlers):  # SIGINT last: from then on, this can be interrupted
                _signal.signal(number, handler)
            if came:
                _call_all(dict(handlers), came)
    except BaseException:
        if element is not None:
            iterator._loaderd_kept, element = element, None  # a kept traceback keeps local variables
        raise
    # Nothing is called from here on, so an interrupt comes when the consumer has the element.
    return element


def _call_all(handlers: dict[int, Any], came: list[int]) -> None:
    """Call the handler of each signal that came. Raises the first exception that one of them raised."""
    raised: BaseException | None = None
    for number in came:
        try:  # the signal is not sent again: asyncio learned of it by its file descriptor
            handlers[number](number, sys._getframe())
        except BaseException as caught:
            raised = caught if raised is None else raised
    try:
        if raised is not None:
            raise raised
    finally:
        del raised  # or its traceback would keep itself, and so the iterator


def _kept_or_taken(function: Callable[[Any], Any], iterator: Any) -> Any:
    """The element that was kept because a handler raised, if there is one, and else ``function(iterator)``."""
    kept = _pop_kept(iterator)
    return function(iterator) if kept is None else kept


def _pop_kept(iterator: Any) -> Any:
    return iterator.__dict__.pop("_loaderd_kept", None)  # in one step: other threads may ask, too

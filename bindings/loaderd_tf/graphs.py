"""Graphs that call Python: where they run, how they are traced, what they keep alive."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

_threads = threading.local()
_NUMBER = np.zeros(1, np.int32)

Function = TypeVar("Function", bound=Callable[..., Any])

_MESSAGE = (
    "The batches are read in the process that made the data set, and this is another one: a worker of tf.data "
    "service, or of a parameter server. Instead of tf.data service, run `loaderd serve` and give each consumer "
    "loaderd_tf.from_loader(loaderd.connect(…)). For several hosts, use loaderd_tf.distribute with a "
    "MultiWorkerMirroredStrategy."
)


def check_process() -> tf.Operation:
    """An operation, for the graph of a data set's function, that fails in any process but this one.

    TensorFlow may send a graph to another process, where the Python function that it calls is "not found in the
    registry". This operation fails first, and its message is in terms of what the user did.
    """
    # No operation of TensorFlow tells the number of its process. But the kernel lists the threads of each process by
    # number, and the first thread has that of the process.
    here = tf.io.matching_files(f"/proc/self/task/{os.getpid()}")
    return tf.debugging.Assert(tf.size(here) > 0, [_MESSAGE])


def keep_thread() -> None:
    """Have Python keep the state of the current thread, which is TensorFlow's, from call to call.

    Else it makes the state anew in each call, with memory that it asks the kernel for and gives back: a sixth of what
    a batch costs. To prevent that, this begins a call that never ends. A thread that ends leaves 6 KB behind.
    """
    if not hasattr(_threads, "is_kept"):
        _threads.is_kept = True
        ctypes.pythonapi.PyGILState_Ensure()


def let_go_of_arrays() -> None:
    """Have TensorFlow let go of the arrays behind tensors that are gone.

    It does so when an eager tensor is deleted. So this makes one, and deletes it, in the way that costs least: 1 µs.
    """
    tf.experimental.dlpack.from_dlpack(_NUMBER.__dlpack__())


def unconverted(function: Function) -> Function:
    """``function``, which autograph then leaves as it is when it translates a user's function that calls it.

    Autograph writes its translations to temporary files, which a killed process leaves behind; and it takes long.
    """
    return cast(Function, tf.autograph.experimental.do_not_convert(function))


def keep_with_graph(kept: Any) -> None:
    """Keep ``kept`` as long as the graph that is being traced, if one is.

    A data set may be made in a function of a graph, such as ``range(2).interleave(lambda _: make_dataset(…))``. Its
    Python object is gone when the function has been traced, but the graph goes on making such data sets.
    """
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        graph._loaderd_kept = [*getattr(graph, "_loaderd_kept", []), kept]

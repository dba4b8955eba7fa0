"""Writes what a loader does, for TensorBoard, beside what Keras' own callback writes of the model.

``tf.summary.scalar`` would do, but needs the package ``tensorboard`` where the training runs, which TensorFlow does
not bring. So the figures are written as TensorBoard's plugin reads them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

import loaderd
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.options import as_count, is_count, is_path, require
from loaderd_tf.dataset_attributes import loader_of
from loaderd_tf.graphs import unconverted

_SCALAR = 1  # a value of tensorflow.DataClass, which has no public name


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that writes for TensorBoard what the loader did since it last wrote; in a loop, call :meth:`write`.

    ``loader_or_dataset``: a loader, or a data set of :func:`make_dataset`, :func:`from_loader` or :func:`distribute`.
    ``log_dir``: it writes to the folder ``loaderd`` there, which TensorBoard shows as a run; Keras's own callback may
    have the same one. ``update_freq``: ``"epoch"`` (the step is the epoch's number), or every so many steps (the step
    is the optimizer's).

    It writes the rate of examples, the shares of waiting, what was restarted and skipped, and the seconds that the
    workers took by stage and field, as :class:`loaderd.Statistics` has them. The time of validation does not count.
    The seconds of workers are missing where ``statistics()`` does not have them. Nothing is written of a loader that
    is closed.
    """

    _supports_tf_logs = True  # tells tf_keras not to fetch the logs of each step for this callback

    def __init__(
        self,
        loader_or_dataset: Loader | tf.data.Dataset | tf.distribute.DistributedDataset,
        log_dir: str | os.PathLike[str],
        *,
        update_freq: int | Literal["epoch"] = "epoch",
    ) -> None:
        super().__init__()
        loader = loader_or_dataset if isinstance(loader_or_dataset, Loader) else loader_of(loader_or_dataset)
        if loader is None:
            raise OptionError(
                "loader_or_dataset must be a loader, or come from make_dataset, from_loader or distribute, "
                f"got {loader_or_dataset!r}",
                hint="Of a data set that you derived from one, by map() or the like, give that one.",
            )
        require(is_path(log_dir), "log_dir", "the path of a folder", log_dir)
        must = '"epoch" or a positive number of steps'
        is_freq = is_count(update_freq) or (isinstance(update_freq, str) and update_freq == "epoch")
        require(is_freq, "update_freq", must, update_freq)
        self._loader = loader
        self._directory = os.path.join(os.fspath(log_dir), "loaderd")
        self._update_freq = update_freq
        self._writer: Any = None  # made when there is something to write
        self._seen = self._steps_since_write = 0
        # Keras 3 waits for the end of each step to tell callbacks of it, unless this is True.
        self.async_safe = update_freq == "epoch"
        self._begin()

    @unconverted
    def write(self, step: int) -> None:
        """Write what the loader did since the last time, or since this callback was made, as of ``step``."""
        step = as_count(step, "step", "an integer, 0 or more", 0)
        if not tf.executing_eagerly():
            raise OptionError(
                "TensorBoard.write reads figures of now, and this is a tf.function that is being traced",
                hint="Call it in the loop that calls the function.",
            )
        if self._loader.closed:
            return
        before, since_s = self._before, self._since_s
        self._begin()
        summary = tf.compat.v1.Summary()  # of all figures in one: TensorFlow takes a millisecond for each message
        for tag, value in _scalars(before, self._before, self._since_s - since_s):
            metadata = summary.value.add(tag=tag, tensor=tf.make_tensor_proto(np.float32(value))).metadata
            metadata.plugin_data.plugin_name = "scalars"
            metadata.data_class = _SCALAR
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._directory)
        # A callback of Keras' may have said that this step is not to be recorded. That is for its own figures only.
        with self._writer.as_default(), tf.summary.record_if(True):
            tf.summary.experimental.write_raw_pb(summary.SerializeToString(), step)
        self._writer.flush()

    def _begin(self) -> None:
        """Have the figures that are written next count from now on."""
        self._before, self._since_s = self._loader.statistics(), time.monotonic()

    # ------------------------------------------------------------------------------------ called by fit

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps_since_write = 0
        self._begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._update_freq == "epoch":
            return
        steps = batch + 1 - self._seen  # with steps_per_execution, more than one
        self._seen += steps
        self._steps_since_write += steps
        if self._steps_since_write >= self._update_freq:
            self._steps_since_write = 0
            self.write(int(tf.convert_to_tensor(self.model.optimizer.iterations)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._update_freq == "epoch":
            self.write(epoch)

    def on_test_begin(self, logs: Any = None) -> None:
        self._test_began_s = time.monotonic()

    def on_test_end(self, logs: Any = None) -> None:
        self._since_s += time.monotonic() - self._test_began_s

    # tf_keras calls these; a callback of Keras 3 does not have them.

    def _implements_train_batch_hooks(self) -> bool:
        return self._update_freq != "epoch"

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


def _scalars(before: loaderd.Statistics, now: loaderd.Statistics, elapsed_s: float) -> Iterator[tuple[str, float]]:
    """Tags and their values."""
    elapsed_s = max(elapsed_s, 1e-9)
    yield "loaderd/examples_per_s", (now.records_delivered - before.records_delivered) / elapsed_s
    # A wait counts when it ends, so it may be longer than ``elapsed_s``.
    yield "loaderd/waiting_share", min(1.0, (now.wait_s - before.wait_s) / elapsed_s)
    yield "loaderd/device_waiting_share", min(1.0, (now.device_wait_s - before.device_wait_s) / elapsed_s)
    for name in ("workers_restarted", "daemon_restarts", "records_skipped"):
        yield f"loaderd/{name}", getattr(now, name)
    is_same_daemon = before.daemon_restarts == now.daemon_restarts  # a new one begins at 0
    for name in ("stage_s", "field_s"):
        old = getattr(before, name) if is_same_daemon else {}
        for part, seconds in getattr(now, name).items():
            yield f"loaderd_{name}/{part}", seconds - old.get(part, 0)

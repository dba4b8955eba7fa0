"""Writes what a loader does, for TensorBoard, beside what Keras' own callback writes of the model.

::

    loader.statistics() ──► differences since the last write ──┐
    a batch that is taken ──► copies of its first records ─────┴──► log_dir/loaderd/events.out.tfevents…

Figures are written as TensorBoard's plugins read them. ``tf.summary.scalar`` and ``tf.summary.image`` would do the
same, but need the package ``tensorboard`` where the training runs, which TensorFlow does not bring.
``tf.summary.histogram`` takes single values, and a loader has only their counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

import loaderd
from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.options import as_count, is_count, is_path, require
from loaderd.schema.grids import picture, planes_of
from loaderd_tf.dataset_attributes import loader_of
from loaderd_tf.graphs import unconverted

# Waits of the first class are shorter than 2**12 ns; each other class ends at twice the one before. The first and the
# last have one end only, and are drawn as wide as the others.
_FIRST_CLASS_ENDS_AT = 12
# Values of tensorflow.DataClass, which has no public name.
_SCALAR, _TENSOR, _BLOBS = 1, 2, 3
_TILE = 48  # pixels a plane: twice as many take four times as long


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that writes for TensorBoard what the loader did since it last wrote; in a loop, call :meth:`write`.

    ``loader_or_dataset``: a loader, or a data set of :func:`make_dataset`, :func:`from_loader` or :func:`distribute`.
    ``log_dir`` may be that of Keras' own TensorBoard callback: this one writes to the folder ``loaderd`` in it, which
    TensorBoard shows as a run of that name. ``update_freq``: ``"epoch"`` (the step is the epoch's number), or every
    so many steps (the step is the optimizer's).

    ========================================  ======================================================================
    ``loaderd/examples_per_s``                records that were taken from the loader a second
    ``loaderd/waiting_share``                 share of the time, 0 to 1, that the consumer waited for batches
    ``loaderd/device_waiting_share``          the same for copies to a device
    ``loaderd/workers_restarted``             also ``daemon_restarts``, ``records_skipped``: since the loader began
    ``loaderd/waits_log10_s``                 a histogram of how long the waits were, log10 of seconds: -3 is 1 ms
    ``loaderd_stage_s/…``                     seconds of all workers by stage
    ``loaderd_field_s/…``                     seconds of all workers by field
    ``loaderd_pictures/…``                    once an epoch, by field, ``pictures`` records of a batch: their planes
    ========================================  ======================================================================

    They mean what they mean in :class:`loaderd.Statistics`. The time of validation does not count. The histogram and
    the seconds of workers are missing where ``statistics()`` does not have them. Nothing is written of a loader that
    is closed.

    ``pictures``: of how many records; 0: none. They are copied from a batch that the training takes: no batch is
    taken or held for them. A field has pictures if it has two or three axes, as a board has; planes are the last
    axis, unless only the first can be. With ``unpack="device"``, fields are packed, and have none.
    """

    _supports_tf_logs = True  # tells tf_keras not to fetch the logs of each step for this callback

    def __init__(
        self,
        loader_or_dataset: Loader | tf.data.Dataset | tf.distribute.DistributedDataset,
        log_dir: str | os.PathLike[str],
        *,
        update_freq: int | Literal["epoch"] = "epoch",
        pictures: int = 4,
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
        self._num_pictures = as_count(pictures, "pictures", "a number of records, 0 or more", 0)
        self._glimpse = loader._glimpse(self._num_pictures) if self._num_pictures else {}
        self._writer: Any = None  # made when there is something to write
        self._steps = self._seen = self._steps_since_write = 0
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
        self._add(_summary(before, self._before, self._since_s - since_s), step)

    @unconverted
    def write_pictures(self, step: int) -> None:
        """Write pictures of a batch that was taken since the last time, as of ``step``. ``fit``: once an epoch."""
        step = as_count(step, "step", "an integer, 0 or more", 0)
        if not self._glimpse or self._loader.closed:
            return
        summary = _pictures(self._glimpse)
        self._glimpse = self._loader._glimpse(self._num_pictures)
        if summary.value:
            self._add(summary, step)

    def _add(self, summary: tf.compat.v1.Summary, step: int) -> None:
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
        self._steps += steps
        self._steps_since_write += steps
        if self._steps_since_write >= self._update_freq:
            self._steps_since_write = 0
            self.write(self._step_now())

    def _step_now(self) -> int:
        """The optimizer's step, which counts those before a backup was restored; without one, the steps seen here."""
        optimizer = self.model.optimizer
        return self._steps if optimizer is None else int(tf.convert_to_tensor(optimizer.iterations))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._update_freq == "epoch":
            self.write(epoch)
            self.write_pictures(epoch)
        else:
            self.write_pictures(self._step_now())

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


def _summary(before: loaderd.Statistics, now: loaderd.Statistics, elapsed_s: float) -> tf.compat.v1.Summary:
    """All figures of a step in one message, because TensorFlow takes a millisecond for each message."""
    summary = tf.compat.v1.Summary()
    for tag, value in _scalars(before, now, elapsed_s):
        _add_to(summary, tag, np.float32(value), "scalars", _SCALAR)
    waits = _since(before, now, "waits")
    if any(waits.values()):
        _add_to(summary, "loaderd/waits_log10_s", _histogram([*waits.values()]), "histograms", _TENSOR)
    return summary


def _add_to(summary: tf.compat.v1.Summary, tag: str, value: Any, plugin: str, data_class: int) -> None:
    metadata = summary.value.add(tag=tag, tensor=tf.make_tensor_proto(value)).metadata
    metadata.plugin_data.plugin_name = plugin
    metadata.data_class = data_class


def _pictures(fields: Mapping[str, np.ndarray[Any, Any]]) -> tf.compat.v1.Summary:
    """For each field with planes: width, height, and a PNG for each record, in the form of TensorBoard's images."""
    summary = tf.compat.v1.Summary()
    for name, values in fields.items():
        drawn = [picture(planes, _TILE) for value in values if (planes := planes_of(value)) is not None]
        if drawn:
            height, width, _ = drawn[0].shape
            blobs = [b"%d" % width, b"%d" % height, *(tf.io.encode_png(each).numpy() for each in drawn)]
            _add_to(summary, f"loaderd_pictures/{name}", blobs, "images", _BLOBS)
    return summary


def _scalars(before: loaderd.Statistics, now: loaderd.Statistics, elapsed_s: float) -> Iterator[tuple[str, float]]:
    """Tags and their values."""
    elapsed_s = max(elapsed_s, 1e-9)
    yield "loaderd/examples_per_s", (now.records_delivered - before.records_delivered) / elapsed_s
    # A wait counts when it ends, so it may be longer than ``elapsed_s``.
    yield "loaderd/waiting_share", min(1.0, (now.wait_s - before.wait_s) / elapsed_s)
    yield "loaderd/device_waiting_share", min(1.0, (now.device_wait_s - before.device_wait_s) / elapsed_s)
    for name in ("workers_restarted", "daemon_restarts", "records_skipped"):
        yield f"loaderd/{name}", getattr(now, name)
    for name in ("stage_s", "field_s"):
        for part, seconds in _since(before, now, name).items():
            yield f"loaderd_{name}/{part}", seconds


def _since(before: loaderd.Statistics, now: loaderd.Statistics, name: str) -> dict[Any, float]:
    """By how much the figures of a mapping or a sequence have grown. A new daemon begins at 0."""
    old: Mapping[Any, float] = _mapping(before, name) if before.daemon_restarts == now.daemon_restarts else {}
    return {part: value - old.get(part, 0) for part, value in _mapping(now, name).items()}


def _mapping(statistics: loaderd.Statistics, name: str) -> Mapping[Any, float]:
    values = getattr(statistics, name)
    return values if isinstance(values, Mapping) else dict(enumerate(values))


def _histogram(counts: list[float]) -> np.ndarray[Any, Any]:
    """float64, (classes, 3): where each class of ``waits`` begins and ends, as log10 of seconds, and its count."""
    exponents = np.arange(len(counts) + 1) + _FIRST_CLASS_ENDS_AT - 1
    edges = np.log10(2.0**exponents / 1e9)
    return np.stack([edges[:-1], edges[1:], counts], axis=1)

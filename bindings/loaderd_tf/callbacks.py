"""Resuming ``model.fit`` in the middle of an epoch.

Keras's own BackupAndRestore restores weights from the middle of an epoch, and then begins that epoch from its first
batch. This one also knows where the training stands in its data::

    fit:      epoch 0 ──────────────────► epoch 1 ─────────x killed
    backup:        ▲      ▲      ▲      ▲      ▲     ▲
    fit again:                                       └────────► epoch 1 ends ──► epoch 2 ──►
                                                     the steps that were left, and the metrics of the whole epoch
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import keras
import tensorflow as tf

import loaderd
from loaderd.errors import OptionError
from loaderd.options import is_count, require
from loaderd_tf.callback_state import callback_states, restore_callbacks, save_best_weights
from loaderd_tf.dataset_attributes import loader_of
from loaderd_tf.keras_calls import argument_of_fit
from loaderd_tf.pipeline_check import check_counted

# The value of model.stop_training when this callback ends an epoch early: not True, by which another callback ends
# the whole training.
_EPOCH_IS_OVER = object()
_NAME = "backup"
_GLOB = "*?[\\"  # characters by which TensorFlow takes a path for a pattern when it looks for a backup or deletes it


@dataclass
class _Progress(tf.train.experimental.PythonState):  # type: ignore[misc]
    """Where a training stands: before ``step`` of ``epoch``, and before the batch of ``position`` (JSON).

    ``shapes``: those of all saved variables, by what they belong to. ``callbacks``: what :func:`callback_states`
    returned.
    """

    epoch: int = 0
    step: int = 0
    position: str = ""
    shapes: Mapping[str, list[list[int]]] | None = None
    callbacks: Mapping[str, Mapping[str, Any]] | None = None

    def serialize(self) -> str:
        return json.dumps(asdict(self))

    def deserialize(self, string_value: bytes) -> None:
        for name, value in json.loads(string_value).items():
            setattr(self, name, value)


class BackupAndRestore(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback that saves a training as it goes on, and lets the next ``fit`` go on with exactly the next batch.

    ``directory``: where the backup lies, one at a time; each training needs its own. ``dataset``: what ``fit`` trains
    on, from :func:`make_dataset`, :func:`from_loader` or :func:`distribute`. ``save_freq``: ``"epoch"``, or a number
    of steps: then after every so many, and at the end of each epoch too. ``delete_checkpoint``: whether the backup is
    deleted when the training has come to its end; if not, another ``fit`` of more epochs goes on from there.

    After a crash, run the same program again: if there is a backup, ``fit`` goes on in the middle of its epoch, with
    the backup's weights, optimizer (and so its schedule), metrics and random states. Each batch and each epoch's logs
    are those of a training that nothing interrupted. Keras's EarlyStopping, ReduceLROnPlateau and ModelCheckpoint go
    on with the best value that they had seen, and for how long there was no better one. All other callbacks begin
    anew, and all count the batches of the resumed epoch from 0. A backup is written whole or not at all, whenever the
    process dies. With ``steps_per_epoch``, the data set must be endless (``epochs=None``). If replicas keep values of
    their own, such as the statistics of a BatchNormalization, TensorFlow saves their mean.

    ``fit`` trains on ``dataset`` or on what ``map`` and ``prefetch`` make of it: each step must be its next batch.
    Raises OptionError for data that grow, and for a ``directory`` that TensorFlow would
    take for a pattern. When ``fit`` begins, raises it if the backup is of another model or of other data, and for
    what cannot be resumed: other data than ``dataset``, what ``cache``, ``shuffle``, ``batch`` and the like make of
    it, ``steps_per_epoch`` for data with an end, and ``steps_per_execution`` that does not divide an epoch's steps.
    """

    def __init__(
        self,
        directory: Any,
        dataset: tf.data.Dataset | tf.distribute.DistributedDataset,
        *,
        save_freq: int | Literal["epoch"] = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        loader = loader_of(dataset)
        if loader is None:
            raise OptionError(
                f"dataset must come from make_dataset, from_loader or distribute, got {dataset!r}",
                hint="Of a data set that you derived from one, by map() or the like, give that one.",
            )
        if loader._grows:
            raise OptionError(
                'dataset must not be of data that grow (refresh="epoch"): where it stands after so many steps is not '
                "known before each epoch has begun",
                hint="In a loop of your own, over loaderd_tf.batches(loader), save loader.position with the model.",
            )
        is_freq = is_count(save_freq) or (isinstance(save_freq, str) and save_freq == "epoch")
        require(is_freq, "save_freq", '"epoch" or a positive number of steps', save_freq)
        if any(character in str(directory) for character in _GLOB):
            raise OptionError(
                f"directory must be a path without any of {' '.join(_GLOB)}, got {str(directory)!r}",
                hint="TensorFlow takes such a path for a pattern: it would write a backup, and never find it.",
            )
        self._directory = str(directory)
        self._dataset = dataset
        self._loader = loader
        cardinality = dataset.cardinality
        self._num_steps = int(cardinality() if callable(cardinality) else cardinality)
        self._batches_per_step: int = dataset._loaderd_batches_per_step
        self._save_freq = save_freq
        self._delete_checkpoint = delete_checkpoint

    # ------------------------------------------------------------------------------------ called by fit

    def on_train_begin(self, logs: Any = None) -> None:
        self._backup: str | None = tf.train.latest_checkpoint(self._directory)
        self._steps_per_epoch = self._check_fit()
        self._progress = _Progress()
        self._manager: tf.train.CheckpointManager | None = None
        self._begin: loaderd.Position | None = None  # where the iterator in use began, ``_taken`` steps ago
        self._steps_since_save = 0
        self._epoch_ended = False
        self._data_checked = False
        callbacks = getattr(argument_of_fit("callbacks"), "callbacks", ())
        self._callbacks = [each for each in callbacks if each is not self]  # else it would keep itself alive
        self.model._initial_epoch = None
        if self._backup is not None:
            self._restore(self._backup)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._first, self._seen = epoch, 0, 0
        if self._begin is None or not self._endless:  # the iterator of an endless data set goes on
            self._begin, self._taken = self._loader.next_position(), 0
        if self._backup is not None:
            self._first = self._progress.step
            if self._first:  # fit has just reset the metrics
                tf.train.Checkpoint(metrics=self._variables()["metrics"]).restore(self._backup).expect_partial()
            # Not before: each callback has reset itself when the training began.
            restore_callbacks(self._callbacks, self._progress.callbacks or {}, self._backup)
            self._backup = None
        if self._epoch_ended:
            self._save()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self._data_checked:
            self._data_checked = True
            self._check_data_of_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        steps = batch + 1 - self._seen
        self._seen += steps
        self._taken += steps
        self._steps_since_save += steps
        if self._first + self._seen == self._steps_per_epoch:
            if self._first and not self.model.stop_training:
                self.model.stop_training = _EPOCH_IS_OVER
        elif self._save_freq != "epoch" and self._steps_since_save >= self._save_freq:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model.stop_training is _EPOCH_IS_OVER:
            self.model.stop_training = False
        # The end is saved when all callbacks have seen it: when the next epoch begins, or at the end of the training.
        self._epoch_ended = True

    def on_train_end(self, logs: Any = None) -> None:
        self.model._initial_epoch = None
        if self._delete_checkpoint:
            self._delete()
        elif self._epoch_ended:
            if not self._endless:
                self._begin, self._taken = self._loader.next_position(), 0
            self._epoch, self._first, self._seen = self._epoch + 1, 0, 0
            self._save()

    # ------------------------------------------------------------------------------ what fit trains on

    @property
    def _endless(self) -> bool:
        return self._num_steps == int(tf.data.INFINITE_CARDINALITY)

    def _check_fit(self) -> int | None:
        """How many steps ``fit`` makes in an epoch; None if it has no end. Raises OptionError as the class says."""
        steps, together = self.params["steps"], self.model.steps_per_execution
        if self._endless:
            return None if steps is None else -(-steps // together) * together
        # Where Keras is given steps_per_epoch, it keeps its iterator from one epoch to the next: the epoch after a
        # resumed one would have no steps.
        if steps != self._num_steps or argument_of_fit("steps_per_epoch") is not None:
            raise OptionError(
                f"fit must not be given steps_per_epoch for a data set with an end, got {steps}",
                hint=f"Leave it out: fit takes the {self._num_steps} steps of the data set by itself. Or make the "
                "data set with epochs=None: it goes on from one epoch of fit to the next.",
            )
        if self._num_steps % together:
            raise OptionError(
                f"steps_per_execution must divide the {self._num_steps} steps of an epoch, got {together}",
                hint="Make the data set with epochs=None, and give fit steps_per_epoch.",
            )
        # With a backup, it does not matter where the data stand, as they are sought: in the middle of an epoch also
        # where an earlier fit sought them, and ended before its first step. See _seek.
        if self._backup is None and not self._loader._next_is_whole:
            raise OptionError(
                "the data set begins in the middle of an epoch",
                hint="Make it without start=…: the callback finds out by itself where to go on.",
            )
        return self._num_steps

    def _check_data_of_step(self) -> None:
        """Have the step that begins check the iterator of its data, which Keras shows only to ``train_function``."""
        train = self.model.train_function

        def check_and_train(iterator: Any) -> Any:
            self.model.train_function = train
            check_counted(iterator, self._loader, self._endless)
            return train(iterator)

        self.model.train_function = check_and_train

    def _variables(self) -> dict[str, list[tf.Variable]]:
        """All of the training's variables, by what they belong to.

        ``tf.train.Checkpoint(model=…)`` would miss the random states of Keras's layers.
        """
        model = self.model
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        parts = {"model": model.variables, "optimizer": optimizer, "metrics": model.metrics_variables}
        return {name: [variable.value for variable in part] for name, part in parts.items()}

    def _shapes(self) -> dict[str, list[list[int]]]:
        return {name: [v.shape.as_list() for v in variables] for name, variables in self._variables().items()}

    # ------------------------------------------------------------------------------ the backup's files

    def _save(self) -> None:
        if self._manager is None:  # by now, all variables exist
            checkpoint = tf.train.Checkpoint(progress=self._progress, **self._variables())
            self._manager = tf.train.CheckpointManager(checkpoint, self._directory, 1, checkpoint_name=_NAME)
            latest = self._manager.latest_checkpoint
            if latest is not None:  # the new backup gets another name: the old one stays until it is whole
                checkpoint.save_counter.assign(int(latest.rpartition("-")[2]))
        assert self._begin is not None, "an epoch has begun"
        progress = self._progress
        progress.epoch, progress.step = self._epoch, self._first + self._seen
        progress.position = self._loader.after(self._begin, self._taken * self._batches_per_step).to_json()
        progress.shapes = self._shapes()
        progress.callbacks = callback_states(self._callbacks)
        save_best_weights(self._callbacks, self._manager.checkpoint)
        self._manager.save()
        self._steps_since_save = 0
        self._epoch_ended = False

    def _restore(self, backup: str) -> None:
        progress = self._progress
        tf.train.Checkpoint(progress=progress).restore(backup).expect_partial()
        if self._shapes() != progress.shapes:  # some variables are made only with the first batch: make them now
            trained_on = getattr(argument_of_fit("x"), "element_spec", self._dataset.element_spec)
            self.model._symbolic_build(data_batch=trained_on)
        if self._shapes() != progress.shapes:
            raise OptionError(
                f"the backup in {self._directory} is of another model or optimizer: of variables of the shapes "
                f"{progress.shapes}, and these have {self._shapes()}",
                hint="Delete it to train anew, or give another directory.",
            )
        self._seek(loaderd.Position.from_json(progress.position), progress.step)
        tf.train.Checkpoint(**self._variables()).restore(backup).expect_partial()
        self.model._initial_epoch = progress.epoch

    def _seek(self, position: loaderd.Position, step: int) -> None:
        """Have the data go on at ``position``, which is ``step`` steps behind the begin of an epoch of ``fit``.

        Raises OptionError where ``fit`` would end its epochs elsewhere than the data end theirs.
        """
        before = self._loader.next_position()
        self._loader.load_state_dict(position)
        if self._endless:
            return
        together, batches = self._batches_per_step, self._loader.batches_left
        # A last step of fewer batches than the others may be dropped or taken.
        if abs((self._num_steps - step) * together - batches) >= together:
            self._loader.load_state_dict(before)
            raise OptionError(
                f"fit must take epochs of {step + -(-batches // together)} steps, as the backup in "
                f"{self._directory} says, got {self._num_steps} steps",
                hint="Make the data set as it was made then, without start=…: the callback finds out by itself where "
                "to go on.",
            )

    def _delete(self) -> None:
        # First the file that names the latest backup: if the process dies here, nobody finds half of one.
        for pattern in ("checkpoint", f"{_NAME}-*"):
            for path in tf.io.gfile.glob(f"{self._directory}/{pattern}"):
                (tf.io.gfile.rmtree if tf.io.gfile.isdir(path) else tf.io.gfile.remove)(path)
        if tf.io.gfile.isdir(self._directory) and not tf.io.gfile.listdir(self._directory):
            tf.io.gfile.rmtree(self._directory)

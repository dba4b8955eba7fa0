"""Whether each step of ``fit`` takes one batch of a loader, so that counting steps counts batches.

What is between the two may hold batches back, repeat them or cut them anew, and TensorFlow does not tell. So this
module follows what a data set was made of, from the one that is iterated to that of the loader::

    iterator ──► prefetch ──► map ──► the loader's        each step is a batch, in the loader's order
    iterator ──► map ──► cache ──► the loader's           refused: the loader does not see the second epoch
"""

from __future__ import annotations

from typing import Any

from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd_tf.dataset_attributes import loader_of

# TensorFlow's classes of data sets that make one element of each element.
_ONE_FOR_ONE = {"_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset"}
# Those that a strategy makes of a data set: each batch becomes one for all replicas together.
_BY_STRATEGY = {"_AutoShardDataset", "_LegacyRebatchDataset", "_RestructuredDataset"}
# Allowed where a pass ends with the epoch of fit: both count all of its steps, and fit takes no fewer.
_OF_PASSES = {"_TakeDataset", "_AssertCardinalityDataset"}
# Only for endless data: repeat begins the next pass ahead, and Keras does not know how long a copy to a device is.
_OF_ENDLESS = {"_RepeatDataset", "_CopyToDeviceDataset"}


def check_counted(iterator: Any, loader: Loader, endless: bool) -> None:
    """Raise OptionError unless each element of Keras's ``iterator`` is the next batch of ``loader``.

    ``endless``: whether the data of the loader have no end.
    """
    allowed = _ONE_FOR_ONE | _BY_STRATEGY | (_OF_ENDLESS if endless else _OF_PASSES)
    for each in getattr(iterator, "_iterators", [iterator]):  # with a strategy: one for each host
        dataset = getattr(each, "_dataset", None)
        while dataset is not None and loader_of(dataset) is not loader:
            name, inputs = type(dataset).__name__, dataset._inputs()
            if name not in allowed or not inputs or getattr(dataset, "_deterministic", None) == "false":
                raise OptionError(
                    "fit must train on the data set that BackupAndRestore was given, and take its batches one for "
                    f"one and in their order, got {name.lstrip('_')} between the two: it could not be resumed",
                    hint="Of the data set make others by map (deterministic) and prefetch only. make_dataset itself "
                    "shuffles, batches, copies to a device, and with epochs=None repeats.",
                )
            (dataset,) = inputs

"""Every function of tf.data.experimental that takes a data set: a program for each, of the same name."""

# through: independent
# apart: most are old names of what dataset_methods.py has

import numpy as np
import tensorflow as tf
from usage import make, report

experimental = tf.data.experimental

# %% AUTOTUNE: as a number
report(make().map(lambda x, y: x * 2, num_parallel_calls=experimental.AUTOTUNE).prefetch(experimental.AUTOTUNE))

# %% Counter: the old counter
report(tf.data.Dataset.zip((experimental.Counter(), make())))

# %% RandomDataset: the old random
report(tf.data.Dataset.zip((experimental.RandomDataset(seed=3), make())))

# %% Optional: from a batch, and of an iterator
report(experimental.Optional.from_value(next(iter(make()))).get_value())

# %% get_next_as_optional: of an iterator
iterator = iter(make())
report([experimental.get_next_as_optional(iterator).get_value() for _ in range(8)])
report(bool(experimental.get_next_as_optional(iterator).has_value()))

# %% Reducer: group_by_reducer of records
reducer = experimental.Reducer(lambda key: 0.0, lambda total, row: total / 2 + row[1], lambda total: total * 2)
report(make(("id", "target")).unbatch().apply(experimental.group_by_reducer(lambda i, t: i % 3, reducer)))

# %% group_by_reducer: of batches
reducer = experimental.Reducer(
    lambda key: tf.zeros((32,)), lambda total, batch: total / 2 + batch[0][0] * 2, lambda total: total
)
report(make(("bits", "id")).apply(experimental.group_by_reducer(lambda x, i: i[0] // 32, reducer)))

# %% assert_cardinality: after a filter, and of the data set itself
ds = make()
report(ds.filter(lambda x, y: y[0] < 1.0).apply(experimental.assert_cardinality(4)))
report(ds.apply(experimental.assert_cardinality(8)))

# %% bucket_by_sequence_length: the old name
ds = make("id").unbatch().map(lambda i: tf.repeat(i, 1 + i % 4))
report(ds.apply(experimental.bucket_by_sequence_length(lambda x: tf.shape(x)[0], [3], [4, 4])))

# %% cardinality: and its constants
ds = make()
report(experimental.cardinality(ds), experimental.cardinality(make(epochs=None)) == experimental.INFINITE_CARDINALITY)
report(experimental.cardinality(ds.filter(lambda *_: True)) == experimental.UNKNOWN_CARDINALITY, ds)

# %% choose_from_datasets: the old name
ds = make()
report(
    experimental.choose_from_datasets(
        [ds, ds.skip(4)],
        tf.data.Dataset.range(2).repeat(3),
    )
)

# %% copy_to_device: to the only device
report(list(make().apply(experimental.copy_to_device("/cpu:0"))))

# %% dense_to_ragged_batch: the old name
report(make(("id", "bits")).unbatch().map(lambda i, x: x[: int(i % 3)]).apply(experimental.dense_to_ragged_batch(5)))

# %% dense_to_sparse_batch: the old name
report(make("bits").unbatch().map(lambda x: x[24:]).apply(experimental.dense_to_sparse_batch(5, [8])))

# %% enumerate_dataset: the old name
report(make().apply(experimental.enumerate_dataset(start=2)))

# %% from_list: of batches
report(experimental.from_list([x for x, _ in make()]))

# %% to_variant: and from_variant
ds = make().map(lambda x, y: (x * 2, y))
report(experimental.from_variant(experimental.to_variant(ds), ds.element_spec))

# %% from_variant: of the data set itself, as get_structure describes it
ds = make()
report(experimental.from_variant(experimental.to_variant(ds), experimental.get_structure(ds)))

# %% get_single_element: the old name
report(experimental.get_single_element(make().skip(7)))

# %% get_structure: the specification
ds = make()
report(str(experimental.get_structure(ds)), str(experimental.get_structure(iter(ds))), ds)

# %% get_model_proto: a running pipeline's model
iterator = iter(make().map(lambda x, y: x * 2, num_parallel_calls=2))
report(next(iterator))
report(type(experimental.get_model_proto(iterator)).__name__)

# %% group_by_window: the old name
ds = make(("id", "bits")).unbatch()
report(ds.apply(experimental.group_by_window(lambda i, x: i % 3, lambda key, rows: rows.batch(5), window_size=5)))

# %% ignore_errors: the old name
ds = make().map(lambda x, y: tf.debugging.check_numerics(x / (y[0] - 0.5), "bad"))
report(ds.apply(experimental.ignore_errors()))

# %% index_table_from_dataset: a vocabulary out of records
ds = make("id").unbatch().take(20).map(lambda i: i * 3)
table = experimental.index_table_from_dataset(ds, key_dtype=tf.int64)
report(table.lookup(tf.constant([0, 3, 57, 4], tf.int64)))

# %% table_from_dataset: a table out of records
ds = make(("id", "target")).unbatch().take(20)
table = experimental.table_from_dataset(ds, default_value=-1.0, key_dtype=tf.int64)
report(table.lookup(tf.constant([0, 5, 19, 20], tf.int64)))

# %% DatasetInitializer: a table that is filled from the data set
initializer = experimental.DatasetInitializer(make("target").unbatch().enumerate())
table = tf.lookup.StaticHashTable(initializer, -1.0)
report(table.lookup(tf.constant([0, 5, 127, 128], tf.int64)))

# %% map_and_batch: of records
report(make().unbatch().apply(experimental.map_and_batch(lambda x, y: (x * 2, y), 8, num_parallel_calls=2)))

# %% pad_to_cardinality: with what is missing
report(make({"x": "bits", "y": "id"}).apply(experimental.pad_to_cardinality(10)))

# %% parallel_interleave: the old name
ds = tf.data.Dataset.range(2).apply(experimental.parallel_interleave(lambda _: make(), cycle_length=2, sloppy=False))
report(ds)

# %% prefetch_to_device: to the only device
report(list(make().apply(experimental.prefetch_to_device("/cpu:0"))))

# %% rejection_resample: the old name
ds = make(("id", "bits")).unbatch()
report(
    ds.apply(experimental.rejection_resample(lambda i, x: tf.cast(i % 2, tf.int32), [0.3, 0.7], [0.5, 0.5], seed=1))
)

# %% sample_from_datasets: the old name
ds = make()
report(experimental.sample_from_datasets([ds, ds.map(lambda x, y: (x * 2, y))], [0.5, 0.5], seed=2))

# %% save: and load
ds = make()
experimental.save(ds, "saved")
report(experimental.load("saved", ds.element_spec))

# %% load: compressed
make().save("saved", compression="GZIP")
report(experimental.load("saved", compression="GZIP"))

# %% scan: the old name
report(make().apply(experimental.scan(np.float32(1), lambda total, batch: (total * 2, batch[0][:4] * total))))

# %% shuffle_and_repeat: of batches
report(make().apply(experimental.shuffle_and_repeat(8, count=2, seed=4)))

# %% snapshot: the old name
ds = make()
report(ds.apply(experimental.snapshot("snapshot")), ds.apply(experimental.snapshot("snapshot")))

# %% take_while: the old name
report(make().apply(experimental.take_while(lambda x, y: y[0] < 1.0)))

# %% unbatch: the old name
report(make().apply(experimental.unbatch()).batch(8))

# %% unique: the old name
report(make("id").unbatch().map(lambda i: i % 9).apply(experimental.unique()))

# %% TFRecordWriter: batches written to a file
experimental.TFRecordWriter("file").write(make("bits").map(tf.io.serialize_tensor))
report(tf.data.TFRecordDataset("file").map(lambda text: tf.io.parse_tensor(text, tf.float32)))


# %% parse_example_dataset: stored examples made of records, and parsed
def example(i):
    value = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(i)]))
    return tf.train.Example(features=tf.train.Features(feature={"i": value})).SerializeToString()


ds = make("id").unbatch().map(lambda i: tf.ensure_shape(tf.py_function(example, [i], tf.string), ())).batch(4)
report(ds.apply(experimental.parse_example_dataset({"i": tf.io.FixedLenFeature([], tf.int64)})))

# %% make_saveable_from_iterator: in a graph of TensorFlow 1, an error for every iterator of version 2
ds = make()
try:
    experimental.make_saveable_from_iterator(iter(ds))
except (AttributeError, TypeError, ValueError) as error:
    report(type(error).__name__)
report(ds)

# %% enable_debug_mode: functions of maps run eagerly
experimental.enable_debug_mode()
report(make().map(lambda x, y: (x[:8] * 2, y)))

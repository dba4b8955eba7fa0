"""Every public method of tf.data.Dataset: a program for each, of the same name."""

# through: independent

import numpy as np
import tensorflow as tf
from usage import make, report

# %% apply: API reference, Dataset.apply
report(make().apply(lambda ds: ds.map(lambda x, y: (x + 1, y * 2))))

# %% as_numpy_iterator: API reference; with_options of the bare data set
for x, y in make().as_numpy_iterator():
    report(x, y)

# %% batch: guide "data", Simple batching; batches of batches
ds = make()
report(ds.batch(3), ds.unbatch().batch(5, drop_remainder=True), ds.batch(2, num_parallel_calls=2))

# %% bucket_by_sequence_length: API reference, with rows cut to lengths of their own
ragged = make(("id", "bits")).unbatch().map(lambda number, bits: bits[-1 - int(number % 7) :])
report(
    ragged.bucket_by_sequence_length(
        lambda row: tf.shape(row)[0], bucket_boundaries=[3, 5], bucket_batch_sizes=[4, 4, 4]
    )
)

# %% cache: guide "data_performance", Caching; in memory
ds = make(shuffle=True).cache()
report(ds, ds)  # the second time the same, though a pass of loaderd would have another order

# %% cardinality: API reference
ds = make()
report(ds.cardinality(), ds.repeat(2).cardinality(), ds.batch(3).cardinality(), make(epochs=None).cardinality())
report(ds)

# %% choose_from_datasets: API reference
batches = make()
ds = tf.data.Dataset.choose_from_datasets(
    [batches, batches.map(lambda x, y: (-x, y))], tf.data.Dataset.range(2).repeat(8), stop_on_empty_dataset=True
)
report(ds)

# %% concatenate: API reference; with itself
ds = make()
report(ds.concatenate(ds), ds.concatenate(ds.take(1)))

# %% counter: API reference
report(tf.data.Dataset.zip(tf.data.Dataset.counter(start=5), make()))

# %% element_spec: API reference; as the argument of another data set
ds = make(("bits", ("target", "id")))
report(str(ds.element_spec), tf.data.Dataset.from_generator(ds.as_numpy_iterator, output_signature=ds.element_spec))

# %% enumerate: API reference
for i, (x, y) in make().enumerate(start=3):
    report(i, x * float(i), y)

# %% filter: API reference; whole batches, and records
ds = make()
report(ds.filter(lambda x, y: tf.reduce_sum(y) > 8.0))
report(ds.unbatch().filter(lambda x, y: x[-1] > 0).batch(4))

# %% fingerprint: API reference
ds = make()
report(ds.fingerprint().dtype.name, ds)  # of another graph, so another number

# %% flat_map: API reference; records out of batches
report(make().flat_map(lambda x, y: tf.data.Dataset.from_tensor_slices((x, y))).batch(16))

# %% from_generator: guide "data", Consuming Python generators
ds = make()
report(tf.data.Dataset.from_generator(lambda: iter(ds.as_numpy_iterator()), output_signature=ds.element_spec))

# %% from_tensor_slices: guide "data", Consuming NumPy arrays; of all batches, taken into memory
xs, ys = zip(*make().as_numpy_iterator())
report(tf.data.Dataset.from_tensor_slices((np.concatenate(xs), np.concatenate(ys))).batch(10))

# %% from_tensors: API reference; one element of all batches
report(tf.data.Dataset.from_tensors(tf.stack([x for x, _ in make()])))

# %% get_single_element: API reference
ds = make()
report(ds.take(1).get_single_element(), ds.batch(8).get_single_element())

# %% group_by_window: API reference; odd and even records
ds = make(("bits", "id")).unbatch()
report(ds.group_by_window(lambda x, i: i % 2, lambda key, rows: rows.batch(8), window_size=8))

# %% ignore_errors: API reference
ds = make().map(lambda x, y: (x, tf.debugging.check_numerics(1.0 / (y - 0.25), "bad")))
report(ds.ignore_errors())

# %% interleave: guide "data_performance", Parallelizing data extraction
# through: loaderd
ds = tf.data.Dataset.range(2).interleave(lambda _: make(), cycle_length=2, num_parallel_calls=1)
report(ds)

# %% list_files: guide "data", beside files
import pathlib

for i in range(3):
    pathlib.Path(f"file{i}").write_text(str(i))
names = tf.data.Dataset.list_files("file?", shuffle=False).map(tf.strings.length)
report(tf.data.Dataset.zip(names, make()))

# %% load: API reference
make().save("saved")
report(tf.data.Dataset.load("saved"))

# %% map: guide "data", Preprocessing data; in parallel, in any order
batches = make()
report(batches.map(lambda x, y: (x * 2 - 1, tf.math.tanh(y)), num_parallel_calls=tf.data.AUTOTUNE))
ds = batches.map(lambda x, y: (x + y[:, None], y), num_parallel_calls=4, deterministic=False)
report(sorted(float(tf.reduce_sum(x)) for x, _ in ds))

# %% options: API reference
ds = make()
report(ds.options().deterministic, ds.options().threading.private_threadpool_size, ds)

# %% padded_batch: guide "data", Batching tensors with padding
ds = make(("id", "bits")).unbatch().map(lambda i, x: x[: int(i % 5) + 1])
report(ds.padded_batch(6, padding_values=-1.0), ds.padded_batch(6, padded_shapes=(8,)))

# %% prefetch: guide "data_performance", Prefetching
ds = make()
report(make(prefetch=0).prefetch(1), ds.prefetch(tf.data.AUTOTUNE), ds.prefetch(100))

# %% ragged_batch: API reference
report(make(("id", "bits")).unbatch().map(lambda i, x: x[: int(i % 5)]).ragged_batch(7))

# %% random: API reference; noise for each batch
noise = tf.data.Dataset.random(seed=4).map(lambda n: tf.cast(n % 7, tf.float32))
report(tf.data.Dataset.zip(make(), noise).map(lambda batch, n: (batch[0] + n, batch[1])))

# %% range: API reference; numbers for each batch
report(tf.data.Dataset.zip(tf.data.Dataset.range(100), make()))

# %% rebatch: API reference
ds = make()
report(ds.rebatch(32), ds.rebatch(5), ds.rebatch([3, 7], drop_remainder=True))

# %% reduce: API reference; a sum over all batches
ds = make()
report(ds.reduce(np.float32(0), lambda total, batch: total / 2 + tf.reduce_sum(batch[0]) * tf.reduce_sum(batch[1])))

# %% rejection_resample: guide "data", Resampling
ds = make(("bits", "id")).unbatch()
report(ds.rejection_resample(lambda x, i: tf.cast(i % 4 == 0, tf.int32), target_dist=[0.5, 0.5], seed=7).batch(4))

# %% repeat: guide "data", Training workflows; forever, and cut
batches = make()
report(batches.repeat(3), batches.repeat().take(20))
ds = make(epochs=2, shuffle=True)  # each repetition two other epochs
report(ds.repeat(2))

# %% sample_from_datasets: guide "data", Dataset sampling
ds = tf.data.Dataset.sample_from_datasets(
    [make(epochs=None), make(epochs=None).map(lambda x, y: (-x, y))], weights=[0.5, 0.5], seed=3
)
report(ds.take(30))

# %% save: API reference; in shards
ds = make()
ds.save("saved", shard_func=lambda x, y: tf.cast(y[0], tf.int64) % 2)
report(tf.data.Dataset.load("saved", reader_func=lambda shards: shards.flat_map(lambda shard: shard)))

# %% scan: API reference; a running sum
report(make().scan(np.float32(0), lambda total, batch: (total + tf.reduce_sum(batch[1]), (batch[0], total))))

# %% shard: guide "data"; a part of the batches
ds = make()
report(ds.shard(num_shards=3, index=1), ds.shard(2, 0))

# %% shuffle: guide "data", Randomly shuffling input data; batches, and records
ds = make()
report(ds.shuffle(4, seed=1), ds.unbatch().shuffle(50, seed=2, reshuffle_each_iteration=True).batch(8))

# %% skip: API reference
ds = make()
report(ds.skip(3), ds.skip(100), make(epochs=3).skip(12).take(2))

# %% snapshot: API reference; the second time from the files
ds = make()
report(ds.snapshot("snapshot"), ds.snapshot("snapshot"))

# %% sparse_batch: API reference
report(make("bits").unbatch().map(lambda x: x[20:]).sparse_batch(4, row_shape=[12]))

# %% take: guide "data"
ds = make()
report(ds.take(3), ds.take(-1), ds.take(0), make(epochs=None).take(11))

# %% take_while: API reference
report(make().take_while(lambda x, y: y[0] < 1.0), make(epochs=None).take_while(lambda x, y: y[-1] < 1.9))

# %% unbatch: API reference
ds = make()
report(ds.unbatch().batch(16), ds.unbatch().take(5))

# %% unique: API reference
ds = make(("bits", "id")).unbatch().map(lambda x, i: i % 10)
report(ds.unique())

# %% window: guide "data", Time series windowing
ds = make().window(3, shift=2).flat_map(lambda x, y: tf.data.Dataset.zip(x, y))
report(ds)

# %% with_options: API reference
ds = make()
options = tf.data.Options()
options.deterministic = True
options.threading.private_threadpool_size = 2
report(ds.with_options(options), ds.map(lambda x, y: x - 1).with_options(options))

# %% zip: API reference; with itself, and with others
# through: loaderd
ds = make()
report(
    tf.data.Dataset.zip(ds, ds),
    tf.data.Dataset.zip((ds, ds.skip(2))),
    tf.data.Dataset.zip({"a": ds, "b": ds}),
)

# %% __iter__: guide "data", Dataset structure
iterator = iter(make())
report(next(iterator))
report(list(iterator))
report(list(iterator))

# %% __len__: API reference
ds = make()
report(len(ds), len(ds.repeat(2)), len(ds.batch(3)), ds)

# %% __bool__: API reference
ds = make()
report(bool(ds), bool(ds.take(0)), "yes" if ds else "no", ds)

# %% __nonzero__: the same, as Python 2 called it
ds = make()
report(ds.__nonzero__(), ds)

# %% __debug_string__: of this class alone; what the pipeline is made of
ds = make()
report(type(ds.map(lambda x, y: x).__debug_string__()).__name__, ds)


# %% __tf_tracing_type__: a data set as the argument of a tf.function
batches = make()


@tf.function
def total(ds):
    result = 0.0
    for x, y in ds:
        result = result / 2 + tf.reduce_sum(x) * y[0]
    return result


report(total(batches), total(batches.take(2)), total.experimental_get_tracing_count() <= 2)

# %% __repr__: what print() shows
ds = make()
print(ds.map(lambda x, y: (x, y)), ds.batch(2))
report(repr(ds.take(1)).split(" ", 1)[1], ds)

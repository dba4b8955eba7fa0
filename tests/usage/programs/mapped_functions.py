"""Functions in ``map`` and beside it: guides "data", "function", "ragged_tensor", "sparse_tensor"."""

# through: independent

import tensorflow as tf
from usage import make, report


# %% numpy_function: guide "data", Applying arbitrary Python logic
def halve(x):
    x = x.copy()
    x[:8] *= 0.5
    return x


def process(x, y):
    x = tf.ensure_shape(tf.numpy_function(halve, [x], tf.float32), (16, 32))
    return x, y


report(make().map(process))


# %% numpy_function_in_place: that writes into its input, a result of the graph
def scale(x):
    x *= 2
    return x


report([x for x in make("bits").map(lambda x: tf.numpy_function(scale, [x[:8] + 1], tf.float32))])


# %% py_function: guide "data", tf.py_function
def of(x, y):
    return tf.constant(x.numpy().mean() + y.numpy()[0])


report(make().map(lambda x, y: tf.ensure_shape(tf.py_function(of, [x, y], tf.float32), ())))

# %% py_function_parallel: in parallel, while batches are taken in Python too
# apart: it takes long
ds = make().map(lambda x, y: tf.py_function(lambda a: a * 2, [x], tf.float32), num_parallel_calls=4)
report(list(ds))


# %% autograph_map: guide "function", conditions in a map
# apart: others show as much
def choose(x, y):
    if tf.reduce_sum(y) > 16.0:
        x = x * 2
    else:
        x = -x
    for i in tf.range(2):
        y = y + tf.cast(i, tf.float32)
    return x, y


report(make().map(choose))


# %% random_map: stateless randomness in a map
# apart: others show as much
def noisy(i, batch):
    x, y = batch
    return x + tf.random.stateless_normal(tf.shape(x), seed=[1, tf.cast(i, tf.int32)]), y


report(make().enumerate().map(noisy))

# %% variables_in_map: a counter in a map
counter = tf.Variable(0.0)
report(make().map(lambda x, y: (x + counter.assign_add(1.0), y)), counter)

# %% lookup_table: guide "data", a table in a map
# apart: it takes long
table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([0, 1, 2], [5, 7, 9], tf.int64, tf.int64), -1)
report(make(("bits", "id")).map(lambda x, i: (x, table.lookup(i % 4))))

# %% time_series: guide "data", Time series windowing; sequences of records
# apart: it takes long
ds = make(("bits", "target")).unbatch().batch(10, drop_remainder=True)
report(ds.map(lambda x, y: (x[:-3], y[-3:])))

# %% one_hot_and_ragged: guide "ragged_tensor", ragged batches
# apart: others show as much
ds = make(("bits", "id")).map(
    lambda x, i: (tf.RaggedTensor.from_row_lengths(tf.range(16), [3, 5, 8]), tf.one_hot(i % 3, 3))
)
report(ds, ds.map(lambda r, o: r * 2))

# %% sparse: guide "sparse_tensor", sparse elements
# apart: it takes long
ds = make("bits").map(tf.sparse.from_dense)
report(ds, ds.map(lambda s: tf.sparse.to_dense(s) * 2))


# %% tensor_array: records collected in a tf.TensorArray
# apart: it takes long
@tf.function
def collect(x):
    rows = tf.TensorArray(tf.float32, 16)
    for i in tf.range(16):
        rows = rows.write(i, x[i] * 2)
    return rows.stack()


for x, _ in make():
    report(collect(x))

# %% map_fn: tf.map_fn and tf.vectorized_map over records
# apart: it takes long
for x, y in make():
    report(tf.map_fn(lambda row: row[-4:] * 2, x), tf.vectorized_map(lambda row: tf.reduce_sum(row) * row, x))

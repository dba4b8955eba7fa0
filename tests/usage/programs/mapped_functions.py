"""Functions in ``map``: guides "data", "function"."""

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


# %% variables_in_map: a counter in a map
counter = tf.Variable(0.0)
report(make().map(lambda x, y: (x + counter.assign_add(1.0), y)), counter)

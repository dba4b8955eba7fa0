"""Guide "data_performance" and tf.data.Options: every option there is."""

# through: independent

import tensorflow as tf
from usage import make, report

options = tf.data.Options()


def pipeline():
    ds = make().map(lambda x, y: (x[:8] * 2, y[:8]), num_parallel_calls=2)
    ds = ds.filter(lambda x, y: y[0] >= 0.0)
    return ds.map(lambda x, y: (x + 1, y)).batch(2).prefetch(2).with_options(options)


# %% deterministic: Options.deterministic
options.deterministic = False
ds = make().map(lambda x, y: (x[:8] * 2, y[:8]), num_parallel_calls=4).with_options(options)
report(sorted(float(tf.reduce_sum(x) + tf.reduce_sum(y)) for x, y in ds), make().with_options(options))

# %% threading: Options.threading (experimental_threading is its old name, which TensorFlow refuses)
options.threading.private_threadpool_size = 1
options.threading.max_intra_op_parallelism = 1
report(pipeline())

# %% experimental_optimization: every optimization
for name in dir(options.experimental_optimization):
    if not name.startswith("_"):
        setattr(options.experimental_optimization, name, True)
report(pipeline(), make().with_options(options))

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

# %% experimental_deterministic: the old name
# apart: it takes long
options.experimental_deterministic = True
report(pipeline())

# %% threading: Options.threading (experimental_threading is its old name, which TensorFlow refuses)
options.threading.private_threadpool_size = 1
options.threading.max_intra_op_parallelism = 1
report(pipeline())

# %% autotune: Options.autotune
# apart: others show as much
options.autotune.enabled = True
options.autotune.cpu_budget = 2
options.autotune.ram_budget = 1 << 28
options.autotune.autotune_algorithm = tf.data.experimental.AutotuneAlgorithm.STAGE_BASED
options.autotune.initial_parallelism = 2
options.autotune.min_parallelism = 1
report(pipeline(), make().with_options(options))

# %% no_autotune: Options.autotune.enabled = False
# apart: it takes long
options.autotune.enabled = False
report(pipeline(), make().with_options(options))

# %% experimental_warm_start: the iterator begins before it is asked
# apart: others show as much
options.experimental_warm_start = True
report(pipeline())
iterator = iter(make().with_options(options))
report(next(iterator), next(iterator))

# %% experimental_slack: Options.experimental_slack
# apart: others show as much
options.experimental_slack = True
report(pipeline(), make().prefetch(1).with_options(options))

# %% experimental_optimization: every optimization
for name in dir(options.experimental_optimization):
    if not name.startswith("_"):
        setattr(options.experimental_optimization, name, True)
report(pipeline(), make().with_options(options))

# %% no_optimization: none
# apart: it takes long
options.experimental_optimization.apply_default_optimizations = False
report(pipeline(), make().with_options(options))

# %% experimental_distribute: Options.experimental_distribute
# apart: it takes long
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.HINT
options.experimental_distribute.num_devices = 2
report(pipeline())

# %% experimental_external_state_policy: each policy, with a checkpoint
# apart: it takes long
for policy in tf.data.experimental.ExternalStatePolicy:
    options.experimental_external_state_policy = policy
    iterator = iter(make().with_options(options))
    report(next(iterator))
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    path = checkpoint.save("at")
    report(next(iterator))
    checkpoint.restore(path)
    report(next(iterator))

# %% experimental_symbolic_checkpoint: on and off
# apart: checkpoints show as much
for symbolic in True, False:
    options.experimental_symbolic_checkpoint = symbolic
    iterator = iter(pipeline())
    report(next(iterator))
    checkpoint = tf.train.Checkpoint(iterator=iterator)
    path = checkpoint.save("at")
    report(next(iterator))
    checkpoint.restore(path)
    report(list(iterator))

# %% experimental_service: Options.experimental_service
# apart: it takes long
options.experimental_service.pinned = True
report(pipeline())

# %% dataset_name: Options.dataset_name and framework_type
# apart: it takes long
options.dataset_name = "batches"
options.framework_type = ["TFDS"]
report(pipeline(), make().with_options(options))

# %% merge: Options.merge
# apart: it takes long
other = tf.data.Options()
other.deterministic = True
report(make().with_options(options.merge(other)))

# %% parallelism: guide "data_performance", all together
# apart: others show as much
ds = tf.data.Dataset.range(2).interleave(lambda _: make(), num_parallel_calls=tf.data.AUTOTUNE)
ds = ds.map(lambda x, y: (x * 2, y), num_parallel_calls=tf.data.AUTOTUNE).cache().prefetch(tf.data.AUTOTUNE)
report(ds, ds)

# %% vectorized: guide "data_performance", Vectorizing mapping
# apart: it takes long
report(make().unbatch().batch(64).map(lambda x, y: (x[:, :16] * 2, y + 1)))

# %% memory_footprint: guide "data_performance", Reducing memory footprint
# apart: it takes long
report(make().unbatch().map(lambda x, y: x[-4:] * y).cache().shuffle(20, seed=1).batch(8, num_parallel_calls=2))

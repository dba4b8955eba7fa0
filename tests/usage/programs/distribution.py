"""Guide "distributed_training", "custom training with tf.distribute", "input": two replicas, on two logical CPUs."""

# through: independent
# alone: of two strategies in one process, TensorFlow confuses the collectives

import keras
import tensorflow as tf
from usage import distribute, make, report

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def net():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


# %% fit: guide, fit under a MirroredStrategy
# through: loaderd
with mirrored().scope():
    model = net()
report(model.fit(make(batch_size=32), epochs=2, verbose=0).history, model.get_weights())

# %% fit_prefetched: with prefetch(AUTOTUNE) and validation_data
# apart: it takes long
with mirrored().scope():
    model = net()
ds = make(batch_size=32).prefetch(tf.data.AUTOTUNE)
report(model.fit(ds, validation_data=make(batch_size=32).take(2), epochs=2, verbose=0).history)

# %% fit_shuffled: each epoch another order
# apart: it takes long
with mirrored().scope():
    model = net()
report(model.fit(make(shuffle=True, batch_size=32), epochs=2, verbose=0).history)

# %% fit_steps: steps_per_epoch of an endless data set
# apart: it takes long
with mirrored().scope():
    model = net()
report(model.fit(make(batch_size=32, epochs=None), steps_per_epoch=3, epochs=2, verbose=0).history)

# %% evaluate_predict: guide
# apart: it takes long
with mirrored().scope():
    model = net()
report(model.evaluate(make(batch_size=32), verbose=0), model.predict(make("bits", batch_size=32), verbose=0))

# %% distribute_dataset: guide "input", experimental_distribute_dataset
strategy = mirrored()
for batch in strategy.experimental_distribute_dataset(make(batch_size=32)):
    report(batch)

# %% distribute_rebatched: batches that two replicas cannot share evenly
# apart: it takes long
strategy = mirrored()
ds = make(batch_size=50, remainder="short")
for batch in strategy.experimental_distribute_dataset(ds):
    report(strategy.experimental_local_results(batch))

# %% distribute_from_function: guide "input", distribute_datasets_from_function
# apart: it takes long
strategy = mirrored()
distributed = strategy.distribute_datasets_from_function(lambda context: make())
for batch in distributed:
    report(batch)

# %% auto_shard_off: guide "input", Sharding
# apart: others show as much
strategy, options = mirrored(), tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
report(list(strategy.experimental_distribute_dataset(make(batch_size=32).with_options(options))))

# %% auto_shard_data: guide "input", Sharding
# apart: it takes long
strategy, options = mirrored(), tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
report(list(strategy.experimental_distribute_dataset(make(batch_size=32).with_options(options))))

# %% auto_shard_file: guide "input", Sharding; with one worker
# apart: it takes long
strategy, options = mirrored(), tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
report(list(strategy.experimental_distribute_dataset(make(batch_size=32).with_options(options))))

# %% custom_loop: guide, strategy.run and strategy.reduce
# apart: it takes long
strategy = mirrored()
with strategy.scope():
    model, optimizer = net(), keras.optimizers.SGD(0.01)


@tf.function
def train_step(batch):
    def of_replica(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss((model(x)[:, 0] - y) ** 2, global_batch_size=32)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(of_replica, args=(batch,)), axis=None)


for batch in strategy.experimental_distribute_dataset(make(batch_size=32)):
    report(train_step(batch))
report(model.get_weights())

# %% loop_in_function: guide "input", iterating in a tf.function
# apart: it takes long
strategy = mirrored()
distributed = strategy.experimental_distribute_dataset(make(batch_size=32))


@tf.function
def epoch(distributed):
    total = 0.0
    for batch in distributed:
        sums = strategy.run(lambda batch: tf.reduce_sum(batch[0] * 2) + batch[1][0], args=(batch,))
        total = total / 2 + strategy.reduce(tf.distribute.ReduceOp.SUM, sums, axis=None)
    return total


report(epoch(distributed), epoch(distributed))

# %% optional: guide "input", get_next_as_optional of a distributed iterator
# apart: it takes long
strategy = mirrored()
iterator = iter(strategy.experimental_distribute_dataset(make(batch_size=32).take(2)))
for _ in range(3):
    found = iterator.get_next_as_optional()
    report(bool(found.has_value()))
    if found.has_value():
        report(found.get_value())

# %% own_distribute: loaderd_tf.distribute, in a loop
# through: loaderd
# apart: own_distribute_in_place shows as much
strategy = mirrored()
for batch in distribute(strategy):
    report(batch)

# %% own_distribute_in_place: with arithmetic on slices in each replica
# through: loaderd
strategy = mirrored()


@tf.function
def step(batch):
    return strategy.run(lambda batch: (batch[0][:8] * 2, batch[1][8:] + 1), args=(batch,))


for batch in distribute(strategy):
    report(step(batch))

# %% own_distribute_fit: loaderd_tf.distribute, in fit
# through: loaderd
# apart: it takes long
strategy = mirrored()
with strategy.scope():
    model = net()
report(model.fit(distribute(strategy), epochs=2, verbose=0).history, model.get_weights())

# %% one_device: tf.distribute.OneDeviceStrategy
# apart: it takes long
ds = make()
strategy = tf.distribute.OneDeviceStrategy("CPU:1")
with strategy.scope():
    model = net()
report(model.fit(ds, verbose=0).history)
report(list(strategy.experimental_distribute_dataset(ds)))

# %% default_strategy: tf.distribute.get_strategy
# apart: it takes long
strategy = tf.distribute.get_strategy()
report(list(strategy.experimental_distribute_dataset(make())))

# %% central_storage: tf.distribute.experimental.CentralStorageStrategy
# apart: it takes long
strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
report(list(strategy.experimental_distribute_dataset(make(batch_size=32))))

# %% multi_worker_of_one: MultiWorkerMirroredStrategy without TF_CONFIG
# apart: it takes long
strategy = tf.distribute.MultiWorkerMirroredStrategy()
for batch in strategy.experimental_distribute_dataset(make(batch_size=32)):
    report(strategy.experimental_local_results(batch))

# %% distribute_values: experimental_distribute_values_from_function
# apart: it takes long
strategy, iterator = mirrored(), iter(make())
values = strategy.experimental_distribute_values_from_function(lambda context: next(iterator)[0])
report(strategy.run(lambda x: x[:4] * 2, args=(values,)))

# %% second_device: batches computed with on the other device
for x, y in make():
    with tf.device("CPU:1"):
        report(x[:8] * 2 + y[0], tf.identity(y) + 1)

# %% to_second_device: make_dataset(device=…), and tf.data's own prefetch_to_device
# apart: others show as much
report(
    list(make(device="/CPU:1")),
    [x.device[-5:] for x, _ in make().apply(tf.data.experimental.prefetch_to_device("/CPU:1"))],
)

# %% copy_to_device: tf.data.experimental.copy_to_device
# apart: others show as much
report(list(make().apply(tf.data.experimental.copy_to_device("/CPU:1")).prefetch(1)))

# %% metrics: guide "distributed_training", a metric in each replica
# apart: it takes long
strategy = mirrored()
with strategy.scope():
    mean = keras.metrics.Mean()
for batch in strategy.experimental_distribute_dataset(make(batch_size=32)):
    strategy.run(lambda batch: mean.update_state(batch[1]), args=(batch,))
    report(mean.result())

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

# %% multi_worker_of_one: MultiWorkerMirroredStrategy without TF_CONFIG
# apart: it takes long
strategy = tf.distribute.MultiWorkerMirroredStrategy()
for batch in strategy.experimental_distribute_dataset(make(batch_size=32)):
    report(strategy.experimental_local_results(batch))

# %% second_device: batches computed with on the other device
for x, y in make():
    with tf.device("CPU:1"):
        report(x[:8] * 2 + y[0], tf.identity(y) + 1)

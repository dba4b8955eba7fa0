"""Guides "custom_training", "customizing what happens in fit", "writing a training loop", "function", "autodiff"."""

# through: independent

import keras
import numpy as np
import tensorflow as tf
from usage import make, report


def net():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])


# %% function_step: guide, Speeding-up your training step with tf.function
model, optimizer, loss_of = net(), keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError()


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(y, model(x, training=True)[:, 0])
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))
    return loss


for x, y in make():
    report(train_step(x, y))
report(train_step.experimental_get_tracing_count(), model.get_weights())


# %% one_thread: inter_op_parallelism_threads, and two data sets in a function, of several passes each
# alone: it is of the process
tf.config.threading.set_inter_op_parallelism_threads(1)


@tf.function
def both(one, other):
    total = tf.constant(0.0)
    for _ in tf.range(16):
        (x, y), (z, _) = next(one), next(other)
        total = total / 2 + tf.reduce_sum(x * y[:, None]) - tf.reduce_sum(z * y[:, None]) / 4
    return total


ds, same = make(epochs=2), make(epochs=2)
for _ in range(2):
    report(both(iter(ds), iter(same)))


# %% loop_in_function: guide "function", iterating over a data set
@tf.function
def epoch(ds):
    total = tf.constant(0.0)
    for x, y in ds:
        total = total / 2 + tf.reduce_sum(x * y[:, None])
        if total > 150.0:
            break
    return total


report(epoch(make()), epoch(make(epochs=None)))


# %% iterator_argument: an iterator as argument of a tf.function
# through: loaderd
@tf.function
def next_sum(iterator):
    x, y = next(iterator)
    return tf.reduce_sum(x) + y[0]


iterator = iter(make())
report([next_sum(iterator) for _ in range(8)], next_sum.experimental_get_tracing_count())
try:
    next_sum(iterator)
except tf.errors.OutOfRangeError:
    report("the end")


# %% steps_in_function: several steps a call, as steps_per_execution does
# apart: it takes long
@tf.function
def steps(iterator):
    total = tf.zeros((32,))
    for _ in tf.range(4):
        x, y = next(iterator)
        total = total / 2 + tf.linalg.matvec(x, y, transpose_a=True)
    return total


iterator = iter(make())
report(steps(iterator), steps(iterator))


# %% train_step: guide "Customizing what happens in fit"
ds = make()


class Custom(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.mean = keras.metrics.Mean(name="loss")

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True)[:, 0])
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights))
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def test_step(self, data):
        x, y = data
        self.mean.update_state(self.compute_loss(y=y, y_pred=self(x, training=False)[:, 0]))
        return {"loss": self.mean.result()}

    def predict_step(self, data):
        return self(data[0][:8]) * 2


model = Custom()
model.compile("adam", "mse")
report(model.fit(ds, epochs=2, validation_data=ds, verbose=0).history, model.predict(ds, verbose=0))


# %% threads: data sets in Python threads
# through: loaderd
import threading

found = {}


def work(i):
    found[i] = [tf.reduce_sum(x) for x, _ in make(("bits", "target"))]


threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
report([found[i] for i in range(3)])

# %% thread_pool: one iterator, batches worked on in a pool
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(2) as pool:
    report(list(pool.map(lambda batch: (batch[0] * 2).numpy() + batch[1].numpy()[:, None], make())))

# %% dlpack: tensors to numpy by DLPack
for x, y in make():
    report(np.from_dlpack(x), np.asarray(y))

# %% numpy_views: numpy arithmetic on .numpy()
for x, y in make():
    report(x.numpy() * 2, np.dot(x, x.numpy().T), y.numpy().mean())

# %% debug_mode: tf.data.experimental.enable_debug_mode
# alone: it is of the process
tf.data.experimental.enable_debug_mode()
report(make().map(lambda x, y: (x * 2, y)))

"""Guides "custom_training", "customizing what happens in fit", "writing a training loop", "function", "autodiff"."""

# through: independent

import keras
import numpy as np
import tensorflow as tf
from usage import make, report


def net():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((32,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)])


# %% eager_loop: guide "Writing a training loop from scratch"
# apart: others show as much
model, optimizer, loss_of = net(), keras.optimizers.Adam(), keras.losses.MeanSquaredError()
for epoch in range(2):
    for step, (x, y) in enumerate(make()):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True)[:, 0])
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights))
        report(loss)

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


# %% jit_step: tf.function(jit_compile=True)
# apart: others show as much
@tf.function(jit_compile=True)
def step(x, y):
    return tf.reduce_sum(x * y[:, None], axis=0) + x[0] * 2


for x, y in make():
    report(step(x, y))


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

# %% iter_in_function: iter() in a tf.function
# apart: others show as much
ds = make()


@tf.function
def first_two():
    iterator = iter(ds)
    return next(iterator), next(iterator)


report(first_two(), first_two())


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


# %% optional: guide "data", get_next_as_optional
# apart: others show as much
ds = make()


@tf.function
def drain(iterator):
    count, total = 0, 0.0
    found = iterator.get_next_as_optional()
    while found.has_value():
        x, y = found.get_value()
        count, total = count + 1, total / 2 + tf.reduce_sum(x) * y[1]
        found = iterator.get_next_as_optional()
    return count, total


report(drain(iter(ds)))
iterator = iter(ds)
for _ in range(9):
    found = iterator.get_next_as_optional()
    report(bool(found.has_value()), found.get_value() if found.has_value() else None)

# %% global_data_set: a data set that a tf.function captures
# apart: others show as much
ds = make()


@tf.function
def total():
    return ds.reduce(0.0, lambda total, batch: total / 2 + tf.reduce_sum(batch[0]) * batch[1][0])


report(total(), total())


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


# %% gan_step: guide, a GAN's train_step: two optimizers
# apart: it takes long
class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        self.critic, self.maker = net(), keras.Sequential([keras.Input((8,)), keras.layers.Dense(32)])
        self.seeds = keras.random.SeedGenerator(3)

    def compile(self):
        super().compile()
        self.optimizers = [keras.optimizers.Adam(), keras.optimizers.Adam()]

    def train_step(self, real):
        noise = keras.random.normal((16, 8), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            judged = self.critic(tf.concat([self.maker(noise), real], 0))
            losses = tf.reduce_mean(judged[:16] - judged[16:]), -tf.reduce_mean(judged[:16])
        for optimizer, part, loss in zip(self.optimizers, (self.critic, self.maker), losses):
            optimizer.apply_gradients(zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights))
        return {"critic": losses[0], "maker": losses[1]}


model = Gan()
model.compile()
report(model.fit(make("bits"), epochs=2, verbose=0).history)

# %% accumulated_gradients: every fourth step, in a loop
# apart: it takes long
model, optimizer = net(), keras.optimizers.SGD(0.01)
sums = [tf.Variable(tf.zeros_like(w)) for w in model.trainable_weights]
for step, (x, y) in enumerate(make()):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x)[:, 0] - y) ** 2)
    for total, gradient in zip(sums, tape.gradient(loss, model.trainable_weights)):
        total.assign_add(gradient)
    if step % 4 == 3:
        optimizer.apply_gradients(zip(sums, model.trainable_weights))
        for total in sums:
            total.assign(tf.zeros_like(total))
report(model.get_weights())

# %% custom_gradient: gradients with respect to the batch itself
# apart: it takes long
for x, y in make():
    with tf.GradientTape() as tape:
        tape.watch(x)
        z = tf.reduce_sum(x * x * y[:, None])
    report(tape.gradient(z, x))


# %% profiler: guide "profiler", a trace around steps
# apart: others show as much
import pathlib

tf.profiler.experimental.start("profile")
for step, (x, y) in enumerate(make()):
    with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
        report(tf.reduce_sum(x * y[:, None]))
tf.profiler.experimental.stop()
report(bool(list(pathlib.Path("profile").rglob("*.xplane.pb"))))

# %% summary: tf.summary in a loop
# apart: it takes long
writer = tf.summary.create_file_writer("logs")
with writer.as_default():
    for step, (x, y) in enumerate(make()):
        tf.summary.write("mean", tf.reduce_mean(x), step)
        tf.summary.write("slice", x[:8] * 2, step)
        report(x)

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

# %% tf1_style: tf.compat.v1.data iterators in a graph
# apart: it takes long
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    ds = tf.compat.v1.data.Dataset.range(8).map(lambda i: i * 2)
    following = tf.compat.v1.data.make_one_shot_iterator(ds).get_next()
    report([session.run(following) for _ in range(8)])
report(make())

# %% debug_mode: tf.data.experimental.enable_debug_mode
# alone: it is of the process
tf.data.experimental.enable_debug_mode()
report(make().map(lambda x, y: (x * 2, y)))

# %% run_functions_eagerly: tf.config.run_functions_eagerly
# apart: it takes long
tf.config.run_functions_eagerly(True)
report(make().map(lambda x, y: (x * 2, y)))

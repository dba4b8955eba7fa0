"""Where TensorFlow writes in place: a result goes into the memory of an input that it believes nobody else needs."""

# through: independent

import keras
import numpy as np
import tensorflow as tf
from usage import make, report

# %% slice_times_two: guide "data", a map
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: (x[:8] * 2, y[:8])))

# %% first_row: guide "tensor_slicing"
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: x[0] * 2))

# %% mixup: Keras example "mixup"
# through: loaderd, independent, split, mirrored
# apart: chess_mixup shows as much
report(make().map(lambda x, y: (0.5 * x[:8] + 0.5 * x[8:], 0.5 * y[:8] + 0.5 * y[8:])))

# %% rebatch: API reference; then arithmetic
# apart: others show as much
# through: loaderd, independent, split, mirrored
report(make().rebatch(8).map(lambda x, y: (x * 3 - 1, y + 1)))

# %% split: tf.split and arithmetic
# apart: others show as much
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: [half * 2 + 1 for half in tf.split(x, 2)]))

# %% unstack: tf.unstack and arithmetic
# through: loaderd, independent, split, mirrored
# apart: others show as much
report(make().map(lambda x, y: tf.add_n([row * 2 for row in tf.unstack(x)])))

# %% unbatch: records, and arithmetic
# through: loaderd, independent, split, mirrored
report(make().unbatch().map(lambda x, y: (x * -1 + y, y * y)).batch(16))

# %% chain: a chain of element-wise operations, which grappler fuses
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: tf.nn.relu(tf.exp(-x) * 2.0 - 1.0) + tf.sqrt(y)[:, None]))

# %% add_to_slice: tf.tensor_scatter_nd_add into a batch
# through: loaderd, independent, split, mirrored
# apart: others show as much
report(make().map(lambda x, y: tf.tensor_scatter_nd_add(x, [[0], [3]], tf.ones((2, 32)))))

# %% eager_slices: eager arithmetic on slices
# through: loaderd, independent, split, mirrored
for x, y in make():
    report(x[:8] * 2, x[0] + 1, -y[4:], x)


# %% function_slices: a tf.function that owns its argument
# through: loaderd, independent, split, mirrored
# apart: others show as much
@tf.function
def step(x, y):
    a, b = x[:8], x[8:]
    a = a * 2 + b
    return a, tf.reduce_sum(x), y[::2] - 1


for x, y in make():
    report(step(x, y))

# %% unbatch_rebatch_fit: Keras guide, after rebatching
# through: loaderd, independent, split, mirrored
# apart: it takes long
ds = make()
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(ds.rebatch(32).repeat(2), epochs=1, verbose=0, steps_per_epoch=8)
report(history.history, model.get_weights(), model.evaluate(ds.rebatch(32), verbose=0))


# %% accumulate: a Keras train_step that adds up gradients of slices
# through: loaderd, independent, split, mirrored
class Accumulating(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        total = None
        for part in range(4):
            xs, ys = x[4 * part : 4 * part + 4], y[4 * part : 4 * part + 4]
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(xs)[:, 0] - ys) ** 2)
            found = tape.gradient(loss, self.trainable_variables)
            total = found if total is None else [a + b for a, b in zip(total, found)]
        self.optimizer.apply_gradients(zip([g / 4 for g in total], self.trainable_variables))
        return {"loss": loss}


keras.utils.set_random_seed(0)
model = Accumulating()
model.compile("sgd")
report(model.fit(make(), verbose=0, shuffle=False).history, model.get_weights())

# %% bitcast: tf.bitcast shares the memory
report(make(("bits", "id")).map(lambda x, i: tf.bitcast(x, tf.int32) + 1))

# %% reshape: tf.reshape shares it too
# apart: others show as much
report(make().map(lambda x, y: tf.reshape(x, (16, 4, 8))[:, 0] * 2 - y[:, None]))

# %% assign_slices: variables that take slices
v = tf.Variable(tf.zeros((8, 32)))
for x, _ in make():
    v.assign(x[:8])
    v.assign_add(x[8:])
    v.scatter_nd_add([[1]], x[:1])
    report(v.numpy(), x)


# %% dynamic_update: a loop that updates rows in place
ds = make()


@tf.function
def rows(x):
    for i in tf.range(4):
        x = tf.tensor_scatter_nd_update(x, [[i]], [x[i] * 2])
    return x


report(ds.map(lambda x, y: rows(x)))
for x, y in ds:
    report(rows(x), x)

# %% raw_inplace: tf.raw_ops.InplaceAdd, which writes into its input by contract
report(make().map(lambda x, y: tf.raw_ops.InplaceAdd(x=tf.identity(x[:8]) * 1, i=[0, 1], v=tf.ones((2, 32)))))

# %% matmul: a product after slices
# apart: others show as much
w = tf.constant(np.linspace(-1, 1, 96).reshape(32, 3).astype("float32"))
report(make().map(lambda x, y: tf.nn.bias_add(tf.matmul(x[4:12], w), [1.0, 2.0, 3.0])))

# %% cast: to int8 and back, and a mask
# apart: others show as much
report(make().map(lambda x, y: tf.where(tf.cast(x, tf.int8) > 0, x * 2, -x)))

# %% chess_mixup: the same on boards of chess
# through: loaderd
ds = make((("board", "flags"), "score"), chess=True)
report(ds.map(lambda inputs, score: ((inputs[0][:8] * 0.3 + inputs[0][8:] * 0.7, inputs[1][:8] * 2), score[8:] + 1)))

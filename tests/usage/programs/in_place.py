"""Where TensorFlow writes in place: a result goes into the memory of an input that it believes nobody else needs."""

# through: independent

import keras
import tensorflow as tf
from usage import make, report

# %% slice_times_two: guide "data", a map
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: (x[:8] * 2, y[:8])))

# %% first_row: guide "tensor_slicing"
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: x[0] * 2))

# %% unbatch: records, and arithmetic
# through: loaderd, independent, split, mirrored
report(make().unbatch().map(lambda x, y: (x * -1 + y, y * y)).batch(16))

# %% chain: a chain of element-wise operations, which grappler fuses
# through: loaderd, independent, split, mirrored
report(make().map(lambda x, y: tf.nn.relu(tf.exp(-x) * 2.0 - 1.0) + tf.sqrt(y)[:, None]))

# %% eager_slices: eager arithmetic on slices
# through: loaderd, independent, split, mirrored
for x, y in make():
    report(x[:8] * 2, x[0] + 1, -y[4:], x)


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

# %% chess_mixup: the same on boards of chess
# through: loaderd
ds = make((("board", "flags"), "score"), chess=True)
report(ds.map(lambda inputs, score: ((inputs[0][:8] * 0.3 + inputs[0][8:] * 0.7, inputs[1][:8] * 2), score[8:] + 1)))

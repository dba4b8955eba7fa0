"""Structures of elements, ways to make the data set, and batches in all forms."""

# through: independent

import tensorflow as tf
from usage import loader, make, report

# %% all_fields: structure=None, a dict of all fields
for batch in make(None):
    report(batch["bits"], batch["target"] * batch["weight"], batch["id"])
report(make(None))

# %% nested: guide "data", Dataset structure
report(make({"inputs": ("bits", {"number": "id"}), "outputs": ["target", "weight"]}))

# %% chess_boards: the example's records
report(make((("board", "flags"), "score"), chess=True))

# %% short_batch: the last batch of an epoch is smaller
ds = make(batch_size=50, remainder="short")
report(ds, ds.cardinality(), ds.map(lambda x, y: tf.shape(x)), ds.unbatch().batch(16))

# %% several_epochs: epochs=3, each in another order
# apart: it takes long
report(make(shuffle=True, epochs=2), make(epochs=3))

# %% endless: epochs=None
ds = make(epochs=None)
report(ds.take(20), [int(i) for i, _ in zip(range(3), ds)], int(ds.cardinality()))

# %% from_loader: loaderd_tf.from_loader
# through: loaderd
ds = make(via="from_loader")
report(ds, ds.map(lambda x, y: x[:4] * 2))

# %% dataset_object: of a loaderd.Dataset
# through: loaderd
report(make(("bits", "id"), via="dataset"))

# %% generator_of_loader: Dataset.from_generator over a loader
batches = loader()
ds = tf.data.Dataset.from_generator(
    lambda: ((batch["bits"], batch["target"]) for batch in batches),
    output_signature=(tf.TensorSpec((16, 32), tf.float32), tf.TensorSpec((16,), tf.float32)),
)
report(ds, ds.map(lambda x, y: (x[:8] * 2, y)))

# %% loader_into_tensors: tf.constant and arithmetic on a loader's arrays
kept = [tf.constant(batch["bits"]) * 2 + batch["target"][:, None] for batch in loader()]
report(kept)

# %% keeping_all: list(ds), more batches than are lent out
# through: loaderd
kept = list(make(epochs=3))
report(kept)
report([x * 2 for x, _ in kept])

# %% keeping_some: batches kept while others pass
# through: loaderd
kept = []
for i, (x, y) in enumerate(make(epochs=4)):
    if i % 5 == 0:
        kept.append((x, y))
report(kept)

# %% kept_numpy: x.numpy() kept after the tensor is gone
# apart: it takes long
kept = [x.numpy() for x, y in make(epochs=4)]
report(kept)

# %% to_device: make_dataset(device=…)
# through: loaderd
report([(x, y) for x, y in make(device="/CPU:0")])

# %% many_iterators: several iterators of one data set, in turn
# apart: it takes long
ds = make()
iterators = [iter(ds) for _ in range(3)]
for _ in range(8):
    report([next(iterator) for iterator in iterators])

# %% left_early: break out of a loop, and begin again
# apart: it takes long
ds = make(epochs=None)
for _ in range(3):
    for i, (x, y) in enumerate(ds):
        report(x[0] + y[0])
        if i == 2:
            break


# %% in_a_function: made, used and dropped in a function, ten times
# through: loaderd
# apart: it takes long
def once():
    return sum(float(tf.reduce_sum(x)) for x, _ in make().take(3))


report([once() for _ in range(4)])

# %% tf_keras_fit: tf_keras, the Keras before 3
# apart: it takes long
import tf_keras

ds = make()
tf_keras.utils.set_random_seed(0)
model = tf_keras.Sequential([tf_keras.layers.Dense(4, activation="relu"), tf_keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(ds, epochs=2, validation_data=ds.take(2), verbose=0)
report(history.history, model.evaluate(ds, verbose=0))

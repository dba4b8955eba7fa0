"""Structures of elements, ways to make the data set, and batches in all forms."""

# through: independent

import collections

import keras
import optree
import tensorflow as tf
from usage import loader, make, report

# %% all_fields: structure=None, a dict of all fields
for batch in make(None):
    report(batch["bits"], batch["target"] * batch["weight"], batch["id"])
report(make(None))

# %% one_field: structure="bits"
# apart: it takes long
report(make("bits"), make("bits").map(lambda x: x * 2))

# %% nested: guide "data", Dataset structure
report(make({"inputs": ("bits", {"number": "id"}), "outputs": ["target", "weight"]}))

# %% same_field_twice: an autoencoder's data
# apart: others show as much
report(make(("bits", "bits")).map(lambda x, y: (x * 0.5, y)))

# %% namedtuple: tuples with names
# apart: others show as much
Pair = collections.namedtuple("Pair", "x y")
report(make(("bits", "target")).map(Pair).map(lambda pair: pair.x * pair.y[:, None]))

# %% optree: Keras 3's trees
# apart: it takes long
tree = optree.tree_map(lambda t: t * 2, next(iter(make({"a": "bits", "b": ("target", "weight")}))))
report(tree)
report([keras.tree.map_structure(lambda t: t + 1, batch) for batch in make(("bits", ("target", "weight")))])

# %% tf_nest: tf.nest over elements
# apart: it takes long
report([tf.nest.flatten(batch) for batch in make({"b": "bits", "a": ("target", "id")})])

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

# %% passes: each iteration another epoch
# through: loaderd
# apart: others show as much
ds = make(shuffle=True)
for epoch in range(4):
    report([y for x, y in ds])

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

# %% loader_into_keras: train_on_batch over a loader
# apart: others show as much
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for batch in loader():
    report(model.train_on_batch(batch["bits"], batch["target"]))

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

# %% no_prefetch: make_dataset(prefetch=0)
# through: loaderd
# apart: others show as much
report(make(prefetch=0), make(prefetch=0).map(lambda x, y: x[0] * 2))

# %% two_data_sets: two at once, of the same shards
# through: loaderd
# apart: others show as much
for (x, y), (v, w) in zip(make(), make(("target", "id"))):
    report(x * y[:, None], v, w)

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

# %% data_set_dropped: an iterator outlives the name of its data set
# apart: it takes long
iterator = iter(make().map(lambda x, y: x * 2))
report(list(iterator))


# %% in_a_function: made, used and dropped in a function, ten times
# through: loaderd
# apart: it takes long
def once():
    return sum(float(tf.reduce_sum(x)) for x, _ in make().take(3))


report([once() for _ in range(4)])

# %% string_keys: dicts as Keras takes them, by input names
# apart: it takes long
inputs = {"a": keras.Input((32,), name="a"), "b": keras.Input((), name="b")}
joined = keras.layers.Concatenate()([inputs["a"], keras.layers.Reshape((1,))(inputs["b"])])
keras.utils.set_random_seed(0)
model = keras.Model(inputs, keras.layers.Dense(1)(joined))
report(model.predict(make({"a": "bits", "b": "target"}), verbose=0))

# %% tf_keras_fit: tf_keras, the Keras before 3
# apart: it takes long
import tf_keras

ds = make()
tf_keras.utils.set_random_seed(0)
model = tf_keras.Sequential([tf_keras.layers.Dense(4, activation="relu"), tf_keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
history = model.fit(ds, epochs=2, validation_data=ds.take(2), verbose=0)
report(history.history, model.evaluate(ds, verbose=0))

# %% tf_keras_more: predict, and several steps a call
# apart: it takes long
import tf_keras

tf_keras.utils.set_random_seed(0)
model = tf_keras.Sequential([tf_keras.layers.Dense(4, activation="relu"), tf_keras.layers.Dense(1)])
report(model.predict(make("bits"), verbose=0))
inputs = tf_keras.Input((32,))
other = tf_keras.Model(inputs, tf_keras.layers.Dense(1)(inputs))
other.compile("sgd", "mse", steps_per_execution=4)
report(other.fit(make(("bits", "target", "weight"), epochs=None), epochs=2, steps_per_epoch=4, verbose=0).history)

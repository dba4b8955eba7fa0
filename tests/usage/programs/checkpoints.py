"""Guide "checkpoint": iterators in checkpoints."""

# through: independent

import keras
import tensorflow as tf
from usage import make, report

# %% save_and_restore: guide "data", Iterator checkpointing
iterator = iter(make())
checkpoint = tf.train.Checkpoint(step=tf.Variable(0), iterator=iterator)
manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=3)
report([next(iterator) for _ in range(3)])
path = manager.save()
report([next(iterator) for _ in range(3)])
checkpoint.restore(path)
report(list(iterator))

# %% each_step: saved after each step, and restored from each
# apart: it takes long
iterator = iter(make())
checkpoint = tf.train.Checkpoint(iterator=iterator)
paths = [checkpoint.save("at")]
for batch in iterator:
    paths.append(checkpoint.save("at"))
for path in paths:
    checkpoint.restore(path)
    report(list(iterator))

# %% another_iterator: restored into a new iterator of a new data set
# through: loaderd
iterator = iter(make(epochs=3))
report([next(iterator) for _ in range(11)])
path = tf.train.Checkpoint(iterator=iterator).save("at")
other = iter(make(epochs=3))
tf.train.Checkpoint(iterator=other).restore(path)
report([next(other) for _ in range(5)])

# %% after_maps: of a pipeline behind the data set
ds = make().map(lambda x, y: (x[:8] * 2, y), num_parallel_calls=2).batch(2).prefetch(2)
iterator = iter(ds)
report(next(iterator))
checkpoint = tf.train.Checkpoint(iterator=iterator)
path = checkpoint.save("at")
report(next(iterator), next(iterator))
checkpoint.restore(path)
report(list(iterator))

# %% after_shuffle: with the user's own shuffle, whose buffer is saved
# apart: it takes long
ds = make().unbatch().shuffle(30, seed=3).batch(8)
iterator = iter(ds)
report([next(iterator) for _ in range(4)])
checkpoint = tf.train.Checkpoint(iterator=iterator)
path = checkpoint.save("at")
first = [next(iterator) for _ in range(12)]
checkpoint.restore(path)
again = [next(iterator) for _ in range(12)]
report(first, again)

# %% training: guide "checkpoint", a model, an optimizer and an iterator
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
iterator = iter(make(shuffle=True, epochs=2))
checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer, iterator=iterator)
manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=2)
report([model.train_on_batch(*next(iterator)) for _ in range(5)])
manager.save()
report([model.train_on_batch(*next(iterator)) for _ in range(5)])
manager.restore_or_initialize()
report([model.train_on_batch(*batch) for batch in iterator])


# %% random_access_of_state: tf.train.Checkpoint in a tf.function's iterator
# through: loaderd
@tf.function
def two(iterator):
    return next(iterator)[0][0] * 2, next(iterator)[1]


iterator = iter(make(epochs=None))
checkpoint = tf.train.Checkpoint(iterator=iterator)
report(two(iterator))
path = checkpoint.write("at")
report(two(iterator))
checkpoint.read(path)
report(two(iterator))

"""Keras' guides: fit, evaluate and predict, and their arguments; callbacks."""

# through: independent

import keras
import numpy as np
from usage import make, report


def net(**options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((32,)), *layers])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options})
    return model


# %% fit: guide "Training & evaluation with the built-in methods"
# through: loaderd
model = net()
report(model.fit(make(), epochs=3, verbose=2).history, model.get_weights())

# %% fit_shuffled: each epoch another order
# apart: it takes long
model = net()
report(model.fit(make(shuffle=True), epochs=3, verbose=0).history, model.get_weights())

# %% predict: guide
report(net().predict(make("bits"), verbose=0), net().predict(make(), verbose=0))

# %% fit_short: the last batch smaller
# apart: it takes long
model = net()
report(model.fit(make(batch_size=50, remainder="short"), epochs=2, verbose=0).history, model.get_weights())

# %% validation_data: guide
model = net()
report(model.fit(make(), validation_data=make().take(3), epochs=2, verbose=2).history)

# %% validation_steps: guide, "Using a validation dataset"
# apart: it takes long
model = net()
history = model.fit(
    make(epochs=None), steps_per_epoch=5, epochs=3, validation_data=make(epochs=None), validation_steps=3, verbose=0
)
report(history.history, model.get_weights())

# %% steps_per_epoch_repeat: guide; ds.repeat()
# apart: it takes long
report(net().fit(make(shuffle=True).repeat(), steps_per_epoch=6, epochs=3, verbose=0).history)

# %% sample_weight: guide, "Using sample weighting"
# apart: it takes long
model = net(weighted_metrics=["mse"])
report(model.fit(make(("bits", "target", "weight")), epochs=2, verbose=0).history)
report(model.evaluate(make(("bits", "target", "weight")), verbose=0))

# %% steps_per_execution: compile's argument
# apart: it takes long
ds = make()
model = net(steps_per_execution=4)
report(model.fit(ds, epochs=2, verbose=0).history, model.evaluate(ds, verbose=0))
report(model.predict(make("bits"), verbose=0))

# %% jit_compile: compile's argument
# apart: it takes long
ds = make()
model = net(jit_compile=True)
report(model.fit(ds, epochs=2, verbose=0).history, model.evaluate(ds, verbose=0))

# %% mixed_precision: guide "mixed_precision"
# apart: it takes long
keras.mixed_precision.set_global_policy("mixed_bfloat16")
report(net().fit(make(), epochs=2, verbose=0).history)

# %% several_inputs: guide, "Passing data to multi-input, multi-output models"
# apart: it takes long
first, second = keras.Input((32,), name="bits"), keras.Input((1,), name="weight")
keras.utils.set_random_seed(1)
out = keras.layers.Dense(2)(keras.layers.Concatenate()([first, second]))
model = keras.Model([first, second], [out[:, :1], out[:, 1:]])
model.compile("adam", ["mse", "mae"], loss_weights=[1.0, 0.5])
report(model.fit(make((("bits", "weight"), ("target", "target"))), epochs=2, verbose=0).history)

# %% chess: the example's model
# apart: it takes long
board, flags = keras.Input((8, 8, 24)), keras.Input((10,))
keras.utils.set_random_seed(1)
x = keras.layers.Conv2D(4, 3)(board)
x = keras.layers.Concatenate()([keras.layers.Flatten()(x), flags])
model = keras.Model([board, flags], keras.layers.Dense(1, activation="tanh")(x))
model.compile("adam", "mse")
ds = make((("board", "flags"), "score"), chess=True)
report(model.fit(ds, epochs=2, verbose=0).history, model.predict(ds, verbose=0))


# %% uncaught: an exception in a callback ends the program
# through: loaderd
# fails: 1
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        report(batch, logs["loss"])
        if batch == 3:
            raise RuntimeError("enough")


net().fit(make(), epochs=3, callbacks=[Fails()], verbose=0)

# %% keyboard_interrupt: Ctrl-C in fit ends the program
# through: loaderd
# fails: 130
import os
import signal
import sys


class Interrupts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        report(batch, logs["loss"])
        if batch == 3:
            os.kill(os.getpid(), signal.SIGINT)


try:
    net().fit(make(), epochs=3, callbacks=[Interrupts()], verbose=0)
except KeyboardInterrupt:
    sys.exit(130)

# %% backup: keras.callbacks.BackupAndRestore
# apart: it takes long
report(net().fit(make(), epochs=2, callbacks=[keras.callbacks.BackupAndRestore("backup")], verbose=0).history)

# %% each_batch: train_on_batch, test_on_batch, predict_on_batch
# apart: it takes long
model = net()
for x, y in make():
    report(model.train_on_batch(x, y), model.test_on_batch(x, y), model.predict_on_batch(x[:4]))

# %% numpy_of_all: np.concatenate over all batches, then fit on arrays
# apart: it takes long
ds = make()
xs = np.concatenate([x for x, _ in ds])
ys = np.concatenate([y for _, y in ds])
report(net().fit(xs, ys, batch_size=16, shuffle=False, verbose=0).history)

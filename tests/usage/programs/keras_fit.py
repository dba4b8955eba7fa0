"""Keras' guides: fit, evaluate and predict, and their arguments; callbacks."""

# through: independent

import keras
import numpy as np
import tensorflow as tf
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

# %% progress_bar: verbose=1
# apart: it takes long
import contextlib
import io

said = io.StringIO()
with contextlib.redirect_stdout(said):
    report(net().fit(make(), epochs=2, verbose=1).history)
report("8/8" in said.getvalue(), "Unknown" in said.getvalue())

# %% unbuilt: a model that is built by its first batch
# apart: it takes long
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
report(model.fit(make(shuffle=True), epochs=2, verbose=0).history, model.get_weights())

# %% evaluate: guide
# apart: others show as much
ds = make()
report(net().evaluate(ds, verbose=0), net().evaluate(ds.take(3), return_dict=True, verbose=2))

# %% predict: guide
report(net().predict(make("bits"), verbose=0), net().predict(make(), verbose=0))

# %% predict_short: the last batch smaller
# apart: it takes long
report(net().predict(make("bits", batch_size=50, remainder="short"), verbose=0))

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

# %% validation_freq: fit's argument
# apart: it takes long
ds = make()
report(net().fit(ds, validation_data=ds, validation_freq=2, epochs=4, verbose=0).history)

# %% validation_same: the training data again
# apart: it takes long
ds = make(shuffle=True)
report(net().fit(ds, validation_data=ds, epochs=2, verbose=0).history)

# %% validation_split: refused for every data set, and it says so
# apart: others show as much
ds = make()
try:
    net().fit(ds, validation_split=0.2, verbose=0)
except ValueError as error:
    report(str(error)[:60])
report(ds.take(1))

# %% steps_per_epoch: guide; one iterator through all epochs
# apart: others show as much
report(net().fit(make(epochs=None), steps_per_epoch=5, epochs=3, verbose=0).history)

# %% steps_per_epoch_repeat: guide; ds.repeat()
# apart: it takes long
report(net().fit(make(shuffle=True).repeat(), steps_per_epoch=6, epochs=3, verbose=0).history)

# %% runs_out: fewer batches than steps_per_epoch × epochs
# apart: it takes long
report(net().fit(make(), steps_per_epoch=5, epochs=2, verbose=0).history)

# %% initial_epoch: fit's argument
# apart: it takes long
report(net().fit(make(), initial_epoch=2, epochs=4, verbose=0).history)

# %% fit_twice: fit goes on
# apart: it takes long
model, ds = net(), make(shuffle=True)
report(model.fit(ds, verbose=0).history, model.fit(ds, epochs=2, verbose=0).history)

# %% sample_weight: guide, "Using sample weighting"
# apart: it takes long
model = net(weighted_metrics=["mse"])
report(model.fit(make(("bits", "target", "weight")), epochs=2, verbose=0).history)
report(model.evaluate(make(("bits", "target", "weight")), verbose=0))

# %% class_weight: guide, "Using class weighting"
# apart: it takes long
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(4, activation="softmax")])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
ds = make(("bits", "id")).map(lambda x, i: (x, i % 4))
report(model.fit(ds, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}, epochs=2, verbose=0).history)

# %% steps_per_execution: compile's argument
# apart: it takes long
ds = make()
model = net(steps_per_execution=4)
report(model.fit(ds, epochs=2, verbose=0).history, model.evaluate(ds, verbose=0))
report(model.predict(make("bits"), verbose=0))

# %% steps_per_execution_uneven: that does not divide the steps
# apart: it takes long
report(net(steps_per_execution=3).fit(make(), epochs=2, verbose=0).history)

# %% jit_compile: compile's argument
# apart: it takes long
ds = make()
model = net(jit_compile=True)
report(model.fit(ds, epochs=2, verbose=0).history, model.evaluate(ds, verbose=0))

# %% run_eagerly: compile's argument
# apart: it takes long
model = net(run_eagerly=True)
report(model.fit(make(), epochs=2, verbose=0).history, model.get_weights())

# %% mixed_precision: guide "mixed_precision"
# apart: it takes long
keras.mixed_precision.set_global_policy("mixed_bfloat16")
report(net().fit(make(), epochs=2, verbose=0).history)

# %% loss_scaling: guide "mixed_precision", float16
# apart: it takes long
keras.mixed_precision.set_global_policy("mixed_float16")
report(net().fit(make(), verbose=0).history)

# %% gradient_accumulation: the optimizer's argument
# apart: it takes long
model = net(optimizer=keras.optimizers.Adam(gradient_accumulation_steps=4))
report(model.fit(make(), epochs=2, verbose=0).history, model.get_weights())

# %% ema: the optimizer's moving average
# apart: it takes long
optimizer = keras.optimizers.SGD(use_ema=True, ema_overwrite_frequency=3)
report(net(optimizer=optimizer).fit(make(), epochs=2, verbose=0).history)

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

# %% preprocessing_layers: guide "preprocessing_layers", in the data set
# apart: others show as much
normal = keras.layers.Normalization()
normal.adapt(make("bits"))
report(make().map(lambda x, y: (normal(x), y)))

# %% augmentation: guide, dropout and noise in the model
# apart: it takes long
ds = make()
keras.utils.set_random_seed(1)
layers = [keras.layers.GaussianNoise(0.1), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
model = keras.Sequential([keras.Input((32,)), *layers, keras.layers.Dense(1)])
model.compile("sgd", "mse")
report(model.fit(ds, epochs=2, verbose=0).history, model.evaluate(ds, verbose=0))

# %% early_stopping: callbacks
# apart: it takes long
callback = keras.callbacks.EarlyStopping(monitor="loss", patience=0, min_delta=100.0)
report(net().fit(make(), epochs=5, callbacks=[callback], verbose=0).history)


# %% stop_training: guide "writing your own callbacks"; in the middle of an epoch
# apart: others show as much
class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.stop_training = True


report(net().fit(make(epochs=None), steps_per_epoch=8, epochs=5, callbacks=[Stop()], verbose=0).history)


# %% interrupted: an exception in a callback, caught; and fit again
# apart: others show as much
class Fails(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise RuntimeError("enough")


model, ds = net(), make()
try:
    model.fit(ds, epochs=3, callbacks=[Fails()], verbose=0)
except RuntimeError as error:
    report(str(error))
report(model.fit(ds, verbose=0).history)


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

# %% checkpoints_and_logs: ModelCheckpoint, CSVLogger, LearningRateScheduler, TerminateOnNaN
# apart: it takes long
import pathlib

callbacks = [
    keras.callbacks.ModelCheckpoint("{epoch}.keras"),
    keras.callbacks.CSVLogger("log.csv"),
    keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1),
]
model = net()
model.fit(make(), epochs=2, callbacks=callbacks, verbose=0)
report(pathlib.Path("log.csv").read_text(), keras.models.load_model("2.keras").predict(make("bits"), verbose=0))

# %% profiled: guide "profiler", fit with a trace
# apart: it takes long
import pathlib

ds = make()
with tf.profiler.experimental.Profile("profile"):
    report(net().fit(ds, epochs=2, validation_data=ds.take(2), verbose=0).history)
report(bool(list(pathlib.Path("profile").rglob("*.xplane.pb"))))

# %% backup: keras.callbacks.BackupAndRestore
# apart: it takes long
report(net().fit(make(), epochs=2, callbacks=[keras.callbacks.BackupAndRestore("backup")], verbose=0).history)

# %% swap_ema: keras.callbacks.SwapEMAWeights
# apart: it takes long
model = net(optimizer=keras.optimizers.SGD(use_ema=True))
report(model.fit(make(), callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)], verbose=0).history)

# %% each_batch: train_on_batch, test_on_batch, predict_on_batch
# apart: it takes long
model = net()
for x, y in make():
    report(model.train_on_batch(x, y), model.test_on_batch(x, y), model.predict_on_batch(x[:4]))

# %% saved_model: save, load and export
# apart: it takes long
ds = make()
model = net()
model.fit(ds, verbose=0)
model.save("model.keras")
report(keras.models.load_model("model.keras").evaluate(ds, verbose=0))
model.export("exported", verbose=False)
loaded = tf.saved_model.load("exported")
report([loaded.serve(x) for x, _ in ds])

# %% cosine_schedule: a schedule of steps, which cardinality gives
# apart: it takes long
ds = make()
schedule = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=len(ds) * 2)
report(net(optimizer=keras.optimizers.SGD(schedule)).fit(ds, epochs=2, verbose=0).history)

# %% metrics_by_hand: guide, metrics over a data set
# apart: it takes long
auc, mean = keras.metrics.AUC(), keras.metrics.Mean()
for x, y in make():
    auc.update_state(y > 1.0, x[:, -5])
    mean.update_state(y, sample_weight=x[:, -1])
    report(mean.result())
report(auc.result(), mean.result())

# %% numpy_of_all: np.concatenate over all batches, then fit on arrays
# apart: it takes long
ds = make()
xs = np.concatenate([x for x, _ in ds])
ys = np.concatenate([y for _, y in ds])
report(net().fit(xs, ys, batch_size=16, shuffle=False, verbose=0).history)

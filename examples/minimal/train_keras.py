"""``fit`` in Keras. Run again after a crash, it goes on with exactly the next batch.

python train_keras.py 'shards/*.tfrecord' run
"""

import sys
from pathlib import Path

import keras
import loaderd_tf

import loaderd

shards, folder = sys.argv[1:]

keras.utils.set_random_seed(0)
layers = [keras.Input((8, 8, 24)), keras.layers.Flatten(), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
net = keras.Sequential(layers)
net.compile("adam", "mse")
train = loaderd_tf.make_dataset(
    shards,
    loaderd.schemas.chess_eval(),
    batch_size=512,
    structure=("board", "score"),
    # device="/GPU:0",
)
backup = loaderd_tf.BackupAndRestore(Path(folder) / "backup", train, save_freq=20)  # steps
net.fit(train, epochs=2, callbacks=[backup], verbose=2)
net.save(Path(folder) / "net.keras")

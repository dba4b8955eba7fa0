"""A training loop in TensorFlow. Run again after a crash, it goes on with exactly the next batch.

python train_tensorflow.py 'shards/*.tfrecord' run
"""

import sys

import keras
import loaderd_tf
import tensorflow as tf

import loaderd

shards, folder = sys.argv[1:]
epochs = 2

keras.utils.set_random_seed(0)
layers = [keras.Input((8, 8, 24)), keras.layers.Flatten(), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
net = keras.Sequential(layers)
net.compile("adam", "mse")
net.optimizer.build(net.trainable_variables)  # so that all of it is restored at once
position = tf.Variable(loaderd.Position().to_json())  # what comes next
checkpoint = tf.train.Checkpoint(net=net, optimizer=net.optimizer, position=position)
manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
manager.restore_or_initialize()

start = loaderd.Position.from_json(position.numpy())
schema = loaderd.schemas.chess_eval()
if start.epoch < epochs:
    with loaderd.Loader(shards, schema, batch_size=512, epochs=epochs, start=start) as loader:
        for board, score in loaderd_tf.batches(loader, ("board", "score")):  # on a GPU: device="/GPU:0"
            net.train_on_batch(board, score)
            if loader.position.batch % 20 == 0:  # and behind each epoch
                position.assign(loader.position.to_json())
                manager.save()
print(f"step {int(net.optimizer.iterations)}")

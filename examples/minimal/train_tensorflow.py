"""A training loop in TensorFlow. Run again after a crash, it goes on with exactly the next batch.

python train_tensorflow.py 'shards/*.tfrecord' run
"""

import json
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
state = tf.Variable("")  # of the loader
checkpoint = tf.train.Checkpoint(net=net, optimizer=net.optimizer, loader=state)
manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)

with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=512) as loader:
    if manager.restore_or_initialize():
        loader.load_state_dict(json.loads(state.numpy()))
    batches = loaderd_tf.batches(loader, ("board", "score"))  # on a GPU: device="/GPU:0"
    for _ in range(loader.position.epoch, epochs):
        for board, score in batches:
            net.train_on_batch(board, score)
            if loader.position.batch % 20 == 0:  # and behind each epoch
                state.assign(json.dumps(loader.state_dict()))
                manager.save()
print(f"step {int(net.optimizer.iterations)}")

"""A training loop in JAX. Run again after a crash, it goes on with exactly the next batch.

python train_jax.py 'shards/*.tfrecord' checkpoint.pickle
"""

import os
import pickle
import sys

import jax
import jax.numpy as jnp
import loaderd_jax

import loaderd

shards, file = sys.argv[1:]
epochs = 2


def loss(weights, board, score):
    hidden = jax.nn.relu(board.reshape(len(board), -1) @ weights[0])
    return jnp.mean((hidden @ weights[1] - score) ** 2)


@jax.jit
def step(weights, board, score):
    gradients = jax.grad(loss)(weights, board, score)
    return [weight - 0.01 * gradient for weight, gradient in zip(weights, gradients, strict=True)]


weights = [0.02 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(1536, 32), (32,)])]
with loaderd.Loader(shards, loaderd.schemas.chess_eval(), batch_size=512) as loader:
    if os.path.exists(file):
        with open(file, "rb") as saved:
            weights, state = pickle.load(saved)
        loader.load_state_dict(state)
    batches = loaderd_jax.batches(loader, structure=("board", "score"))  # on a GPU: device=jax.devices()[0]
    for _ in range(loader.position.epoch, epochs):
        for board, score in batches:
            weights = step(weights, board, score)
            if loader.position.batch % 20 == 0:  # and behind each epoch
                with open(f"{file}.new", "wb") as saving:
                    pickle.dump((weights, loader.state_dict()), saving)
                os.replace(f"{file}.new", file)

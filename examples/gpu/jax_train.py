"""Trains two networks in JAX on chess records, fed in three ways, and says how busy each keeps the GPU.

    python make_shards.py --out shards
    python jax_train.py --data 'shards/*/*.tfrecord'

The feeds: ``framework`` is a loop as one writes it for JAX, threads that unpack in numpy and copy to the device
ahead; ``floats`` is loaderd, its workers unpack; ``packed`` is loaderd with ``unpack="device"``. A step is one
compiled function, which computes in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from queue import Queue
from threading import Event, Thread
from typing import Any

import jax
import jax.numpy as jnp
import loaderd_jax
import measure
import records

import loaderd

OPTIONS = measure.options_of("Train networks in JAX, fed in three ways.")
measure.check_gpu(OPTIONS, jax.default_backend() == "gpu", "jax")
DEVICE = jax.devices("gpu" if OPTIONS.gpu else "cpu")[0]
STRUCTURE = (("board", "flags"), "score")
Parameters = Any  # a tree of arrays


# ------------------------------------------------------------------------------------------------ the networks


def normal(key: jax.Array, *shape: int) -> jax.Array:
    """Weights whose last dimension is the outputs."""
    inputs = functools.reduce(lambda product, size: product * size, shape[:-1])
    return jax.random.normal(key, shape) * (2 / inputs) ** 0.5


def conv(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def residual_parameters(key: jax.Array) -> Parameters:
    filters, keys = OPTIONS.filters, iter(jax.random.split(key, 2 * OPTIONS.blocks + 4))
    return {
        "stem": normal(next(keys), 3, 3, 24, filters),
        # A block begins as the identity, so that a tower learns without normalization.
        "blocks": [
            (normal(next(keys), 3, 3, filters, filters), jnp.zeros((3, 3, filters, filters)))
            for _ in range(OPTIONS.blocks)
        ],
        "squeeze": normal(next(keys), 1, 1, filters, 8),
        "head": (normal(next(keys), 8 * 64 + 10, 64), normal(next(keys), 64, 1)),
    }


def residual(parameters: Parameters, board: jax.Array, flags: jax.Array) -> jax.Array:
    x = jax.nn.relu(conv(board, parameters["stem"]))
    for first, second in parameters["blocks"]:
        x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, first)), second))
    x = conv(x, parameters["squeeze"]).reshape(len(board), -1)
    hidden, out = parameters["head"]
    return jnp.tanh(jax.nn.relu(jnp.concatenate([x, flags], axis=1) @ hidden) @ out)[:, 0]


def nnue_parameters(key: jax.Array) -> Parameters:
    sizes = [1536 + 10, OPTIONS.hidden, 32, 32, 1]
    pairs = zip(jax.random.split(key, 4), sizes, sizes[1:], strict=False)
    return [(normal(key, inputs, outputs), jnp.zeros(outputs)) for key, inputs, outputs in pairs]


def nnue(parameters: Parameters, board: jax.Array, flags: jax.Array) -> jax.Array:
    x = jnp.concatenate([board.reshape(len(board), -1), flags], axis=1)
    *layers, (last, offset) = parameters
    for weights, bias in layers:
        x = jnp.clip(x @ weights + bias, 0, 1)
    return jnp.tanh(x @ last + offset)[:, 0]


class Trainee:
    """The parameters of a network, and those of Adam: two moments of each, and the number of steps."""

    def __init__(self, apply: Callable[..., jax.Array], parameters: Parameters) -> None:
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        self.state = jax.device_put((parameters, zeros, jax.tree.map(jnp.zeros_like, zeros), jnp.zeros(())), DEVICE)
        self._step = jax.jit(functools.partial(step, apply), donate_argnums=0)

    def step(self, batch: Any) -> jax.Array:
        self.state, loss = self._step(self.state, batch)
        return loss


def step(apply: Callable[..., jax.Array], state: Any, batch: Any) -> tuple[Any, jax.Array]:
    parameters, means, squares, count = state
    (board, flags), score = batch

    def loss_of(parameters: Parameters) -> jax.Array:
        half, board_half, flags_half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (parameters, board, flags))
        return jnp.mean((apply(half, board_half, flags_half).astype(jnp.float32) - score) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
    squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, gradients)
    count += 1
    rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    parameters = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), parameters, means, squares)
    return (parameters, means, squares, count), loss


# --------------------------------------------------------------------------------------------------- the feeds


@contextmanager
def by_framework() -> Iterator[Iterator[Any]]:
    ahead, over = Queue[Any](2 * OPTIONS.framework_workers), Event()

    def unpack_batches(number: int) -> None:
        try:
            shards = OPTIONS.shards[number :: OPTIONS.framework_workers]
            for rows in records.packed_batches(shards, OPTIONS.batch_size, seed=number):
                ahead.put(jax.device_put(records.unpack(rows), DEVICE))
                if over.is_set():
                    return
        except BaseException as error:
            ahead.put(error)

    threads = [
        Thread(target=unpack_batches, args=(number,), daemon=True) for number in range(OPTIONS.framework_workers)
    ]
    for thread in threads:  # numpy lets go of the GIL in what takes long
        thread.start()
    try:
        yield batches_of(ahead)
    finally:
        over.set()
        while not ahead.empty():  # each thread has room for one more batch, and ends
            ahead.get()
        for thread in threads:
            thread.join()


def batches_of(ahead: Queue[Any]) -> Iterator[Any]:
    while True:
        batch = ahead.get()
        if isinstance(batch, BaseException):
            raise batch
        yield batch


@contextmanager
def by_loaderd(unpack: str) -> Iterator[Iterator[Any]]:
    with loaderd.Loader(
        OPTIONS.shards,
        loaderd.schemas.chess_eval(),
        batch_size=OPTIONS.batch_size,
        workers=OPTIONS.workers,
        epochs=None,
        remainder="carry",
        unpack=unpack,
    ) as loader:
        yield iter(loaderd_jax.batches(loader, STRUCTURE, device=DEVICE))


# ------------------------------------------------------------------------------------------------ the training


def train(trainee: Trainee, batches: Iterator[Any], clock: measure.Clock) -> float:
    before = trainee.step(next(batches))
    for batch in batches:
        loss = trainee.step(batch)
        before.block_until_ready()  # of the step before, so that the GPU always has one to go on with
        before = loss
        if clock.tick():
            break
    return float(before)


if __name__ == "__main__":
    key = jax.random.key(0)
    measure.run(
        f"JAX {jax.__version__}",
        OPTIONS,
        nets={
            "residual": lambda: Trainee(residual, residual_parameters(key)),
            "nnue": lambda: Trainee(nnue, nnue_parameters(key)),
        },
        feeds={
            "framework": by_framework,
            "floats": lambda: by_loaderd("worker"),
            "packed": lambda: by_loaderd("device"),
        },
        train=train,
        take=measure.take,
        hold=lambda batches: repeat(next(batches)),
    )

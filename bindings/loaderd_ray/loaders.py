"""Loaders of the data sets that servers of a Ray cluster have, and their positions in checkpoints of Ray Train."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray

import loaderd
from loaderd.client.loader import Loader
from loaderd.errors import OptionError, ServerError
from loaderd_ray.serving import require_manager
from loaderd_ray.spec import ServerState, Spec, datasets_of

_ANSWER_S = 20.0
_MOST_WAIT_S = 0.02  # an answer takes 1 ms; while the manager is away, the known addresses will do
_FILE = "loaderd-position.json"


def connect(
    name: str,
    *,
    batch_size: int,
    dataset: str | None = None,
    shard: tuple[int, int] | None = None,
    reconnect_timeout: float = 300.0,
    **options: Any,
) -> loaderd.Loader:
    """A loader of a data set that servers of ``name`` have; its order is that of a ``Loader``.

    - ``dataset``: its name; None: the only one.
    - ``shard``: None: in a worker of Ray Train, its rank and the number of workers; elsewhere, and with
      ``sharing="independent"``, the whole data set.
    - ``reconnect_timeout`` and ``options``: those of :func:`loaderd.connect`, except ``token``, which is known.

    The loader asks the server of its own node as long as that serves, and else all servers that it can reach. It
    follows servers that come, go or move. Raises what :func:`loaderd.connect` raises, and ServerError where there are
    no servers of that name.
    """
    manager = require_manager(name)
    spec: Spec = ray.get(manager.spec.remote(), timeout=_ANSWER_S)
    if shard is None and options.get("sharing") != "independent":
        shard = _place_in_training()
    return loaderd.connect(
        Addresses(manager, name),
        datasets_of(spec, dataset),
        batch_size=batch_size,
        shard=shard,
        token=spec.token,
        reconnect_timeout=reconnect_timeout,
        **options,
    )


def save(loader: Loader | loaderd.Position, directory: str | os.PathLike[str]) -> None:
    """Write the position of a loader into a folder, such as that of a checkpoint. Only one rank is to do it.

    The position is the same for all ranks that have taken the same number of batches. For a ``tf.data.Dataset``, give
    the position itself (``dataset.loader.after(…)``).
    """
    position = loader.position if isinstance(loader, Loader) else loader
    Path(directory, _FILE).write_text(position.to_json())


def load(checkpoint: Any) -> loaderd.Position | None:
    """The position that :func:`save` wrote, for ``start=``; None where ``checkpoint`` is None: the training begins.

    ``checkpoint``: one of Ray Train (``ray.train.get_checkpoint()``), or a folder. Raises OptionError where there is
    no position in it.
    """
    if checkpoint is None:
        return None
    # A Checkpoint passes for a path, and raises when it is used as one.
    is_checkpoint = hasattr(checkpoint, "as_directory")
    with checkpoint.as_directory() if is_checkpoint else contextlib.nullcontext(checkpoint) as directory:
        try:
            text = Path(directory, _FILE).read_bytes()
        except OSError as error:
            raise OptionError(
                f"{os.fspath(directory)} has no position of a loader: {error.strerror}",
                hint="loaderd_ray.save(loader, directory) writes one.",
            ) from None
    return loaderd.Position.from_json(text)


def _place_in_training() -> tuple[int, int] | None:
    """(rank, number of ranks) in a worker of Ray Train, None elsewhere."""
    if "ray.train" not in sys.modules:  # a worker of it has imported it; importing it takes seconds
        return None
    import ray.train

    try:
        context = ray.train.get_context()
        rank, ranks = context.get_world_rank(), context.get_world_size()
    except RuntimeError:
        return None
    return None if rank is None else (rank, ranks)


class Addresses:
    """Returns which servers to ask, as ``loaderd.connect`` wants it: called every two seconds during a training.

    So it waits for an answer only as long as it knows no server. Raises ServerError while there is none to ask.
    """

    def __init__(self, manager: Any, name: str) -> None:
        self._manager = manager
        self._name = name
        self._node = ray.get_runtime_context().get_node_id()
        self._machine = ray.util.get_node_ip_address()
        self._addresses: Sequence[str] = ()
        self._pending: Any = None

    def __call__(self) -> Sequence[str]:
        self._pending = self._pending or self._manager.states.remote()
        answered, _ = ray.wait([self._pending], timeout=_MOST_WAIT_S if self._addresses else _ANSWER_S)
        states: Sequence[ServerState] = ()
        why = "their manager does not answer"
        if answered:
            self._pending = None
            with contextlib.suppress(ray.exceptions.RayError):
                states = ray.get(answered[0])
                errors = [f"{state.machine or state.key}: {state.error or 'it starts'}" for state in states]
                why = "; ".join(errors) or "there is no node for one"
        self._addresses = self._choose(states) or self._addresses
        if not self._addresses:
            raise ServerError(
                f"none of the servers of {self._name!r} can be reached from {self._machine}: {why}",
                hint="Without TLS a server is for its own node alone: see loaderd_ray.serve.",
            )
        return self._addresses

    def _choose(self, states: Sequence[ServerState]) -> list[str]:
        """The address of this node's server, if it serves; else those of all servers that can be reached."""
        by_node = {
            state.node: state.address
            for state in states
            if state.address is not None and (state.machine == self._machine or not _is_loopback(state.address))
        }
        return [by_node[self._node]] if self._node in by_node else list(by_node.values())


def _is_loopback(address: str) -> bool:
    return str(urlsplit(address).hostname).startswith("127.")

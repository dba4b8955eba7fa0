"""All that loaderd is compared with: the candidates that are timed, and the trainings to which accidents happen."""

from __future__ import annotations

from dataclasses import dataclass

from loaderd.bench import registry
from loaderd.bench.registry import Candidate

# What a comparison of all leaves out: they start a server, and bench/server_cost.py compares them.
_OF_A_SERVER = Candidate(variants=())
# And these read what the others do not: bench/real_records.py compares them.
_OF_OTHER_FILES = Candidate(variants=())

CANDIDATES = {
    "tfdata_seed": Candidate(),
    "tfdata_batched": Candidate(),
    "tfdata_service": Candidate(),
    "mp_queue": Candidate(),
    "torch_dataloader": Candidate(),
    "grain_loader": Candidate(),
    "spdl_pipeline": Candidate(),
    "spdl_checked": Candidate(),
    "lczero": Candidate(),
    "lczero_chunkparser": _OF_OTHER_FILES,
    "katago_npz": _OF_OTHER_FILES,
    **registry.CANDIDATES,
    "loaderd_torch_batches": Candidate(),
    "loaderd_jax_batches": Candidate(),
    "loaderd_served": _OF_A_SERVER,
    "loaderd_served_twice": _OF_A_SERVER,
    "loaderd_flight": _OF_A_SERVER,
    "loaderd_flight_two": _OF_A_SERVER,
    "loaderd_flight_three": _OF_A_SERVER,
}


@dataclass(frozen=True)
class Library:
    """One that trainings of ``bench/reliability.py`` use, as ``trainers/NAME_epoch.py`` has it.

    ``packages``: what must be installed. ``worker``: what the command line of each of its workers contains, behind
    the process's name; None: it has threads. ``service``: its workers are servers that run apart from the training.
    """

    title: str
    packages: tuple[str, ...]
    worker: str | None
    service: bool = False


_OF_TORCH = ("torch", "tfrecord", "torchdata")

LIBRARIES = {
    "loaderd": Library("loaderd", ("loaderd",), "loaderd-worker"),
    "tfdata": Library("tf.data", ("tensorflow",), None),
    "tfdata_service": Library("tf.data service", ("tensorflow",), "trainers.tfdata_service_epoch", service=True),
    "torch": Library("DataLoader", _OF_TORCH, "-m trainers torch"),
    "torch_timeout": Library("DataLoader(timeout=5)", _OF_TORCH, "-m trainers torch_timeout"),
    "grain": Library("Grain", ("grain", "tfrecord"), "multiprocessing.spawn import spawn_main"),
}

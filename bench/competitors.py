"""All that loaderd is compared with: the candidates that are timed, and the trainings to which accidents happen."""

from __future__ import annotations

from dataclasses import dataclass

# How each runs where no candidates are named: once with each of these options. One without any is left out then: it
# starts a server (bench/server_cost.py compares those), or reads other files (bench/real_records.py,
# bench/parquet.py).
CANDIDATES: dict[str, tuple[str, ...]] = {
    "tfdata_seed": ("",),
    "tfdata_batched": ("",),
    "tfdata_tuned": ("",),
    "tfdata_expert": ("", "noshuffle", "int8"),
    "tfdata_xla": ("", "noshuffle,graph"),
    "tfdata_parse": ("packed",),
    "tfdata_service": ("",),
    "mp_queue": ("",),
    "torch_dataloader": ("",),
    "grain_loader": ("",),
    "spdl_pipeline": ("",),
    "spdl_checked": ("",),
    "lczero": ("",),
    "lczero_chunkparser": (),
    "katago_npz": (),
    "plain_records": (),
    "pyarrow_scanner": (),
    "loaderd_python": ("", "numpy", "int8", "packed"),
    "loaderd_batches": ("",),
    "loaderd_tfdata": ("", "graph", "numpy", "numpy,graph"),
    "loaderd_torch_batches": ("",),
    "loaderd_jax_batches": ("",),
    "loaderd_served": (),
    "loaderd_served_twice": (),
    "loaderd_http": (),
    "loaderd_http_two": (),
    "loaderd_http_three": (),
    "floor": ("", "int8", "packed"),
}


def all_specs() -> tuple[str, ...]:
    """All variants of all candidates, as they are named on the command line: ``tfdata_expert:noshuffle``."""
    return tuple(
        f"{name}:{options}" if options else name for name, variants in CANDIDATES.items() for options in variants
    )


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

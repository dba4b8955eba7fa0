"""The candidates of ``loaderd bench``. The further ones of ``make bench`` are in ``bench/competitors.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from loaderd.user_modules import add_working_directory


@dataclass(frozen=True)
class Candidate:
    """A module ``NAME.py`` in ``package``.

    ``variants``: how it runs where no candidates are named, once with each of these options.
    """

    package: str = "candidates"
    variants: tuple[str, ...] = ("",)


CANDIDATES = {
    "tfdata_tuned": Candidate("loaderd_tf.bench"),
    "tfdata_expert": Candidate("loaderd_tf.bench", ("", "noshuffle", "int8")),
    "tfdata_xla": Candidate("loaderd_tf.bench", ("", "noshuffle,graph")),
    "tfdata_parse": Candidate("loaderd_tf.bench", ("packed",)),
    "loaderd_python": Candidate("loaderd.bench", ("", "numpy", "int8", "packed")),
    "loaderd_batches": Candidate("loaderd_tf.bench"),
    "loaderd_tfdata": Candidate("loaderd_tf.bench", ("", "graph", "numpy", "numpy,graph")),
    "floor": Candidate("loaderd.bench", ("", "int8", "packed")),
}


def specs_of(candidates: Mapping[str, Candidate]) -> tuple[str, ...]:
    """All variants of all of them, as they are named on the command line: ``tfdata_expert:noshuffle``."""
    return tuple(
        f"{name}:{options}" if options else name
        for name, candidate in candidates.items()
        for options in candidate.variants
    )


def module_of(name: str) -> str:
    """The module of candidate ``name``; one that is not known here is in a folder ``candidates`` on the path."""
    return f"{CANDIDATES.get(name, Candidate()).package}.{name}"


def check_known(name: str) -> None:
    """Raise ValueError where there is no candidate ``name``; imports none, as they import TensorFlow."""
    if name in CANDIDATES:
        return
    add_working_directory(module_of(name))
    try:
        is_known = find_spec(module_of(name)) is not None
    except ModuleNotFoundError:  # there is no folder "candidates"
        is_known = False
    if not is_known:
        known = ", ".join(CANDIDATES)
        raise ValueError(f"--candidates {name} must be one of {known}, or candidates/{name}.py on the path")

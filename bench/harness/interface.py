"""What a candidate is: one module of a folder ``candidates`` with one function, run in a process of its own.

A candidate reads the shards of a :class:`Config` and yields a :class:`Step` whenever batches have arrived::

    def steps(config: Config) -> Iterator[Step]: ...

It delivers what ``config.delivered()`` says, decoded as ``reference.py`` says, ``config.batch_size`` records a batch
but for a last short one. It honours every field of the config that means something to it, imports what it needs at
the top of its module (imports are not timed), and gives everything back when the generator is closed. A module that
cannot deliver every configuration has a function ``def cannot(config) -> str | None``, which returns the reason why
it is left out, such as "it unpacks nothing". What the reader of its figures must know, such as that no CRC is
checked, is a line of text, ``NOTE``.

On the command line a candidate is its module's name, then options: ``tfdata_expert:noshuffle,graph``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

from loaderd import Derived, Schema, Shuffle

CHESS = "harness.reference:chess"


class Step(NamedTuple):
    """Batches that arrived: how many ``examples``, and the last batch: name -> array.

    ``batch`` is None where no array reaches Python: the consumer is a ``tf.function``, or there is no content.
    The arrays may be of any type that ``numpy.asarray`` takes; they are read before the next step is asked for.
    """

    examples: int
    batch: Mapping[str, Any] | None


@dataclass(frozen=True)
class Config:
    """One configuration.

    ``epochs=None``: for ever. ``graph``: consume inside a ``tf.function``. ``schema``: the ``module:attribute`` of a
    ``loaderd.Schema``, or of a function that returns one. If the function has parameters of these names, it is given
    ``dtype``, what bits become if no float32, and ``record_size``, the bytes of bits in a synthetic record.
    ``packed``: deliver the stored features instead of the fields. ``window_records``: for candidates that shuffle in
    windows; None: they choose. ``compiled``: loaderd may unpack with compiled code, if llvmlite is installed.
    ``one_in``: deliver only the chess records whose stored score is a multiple of it; loaderd and the tf.data
    candidates can.
    """

    shards: tuple[str, ...]
    compression: str = ""
    batch_size: int = 512
    epochs: int | None = None
    shuffle: bool = True
    graph: bool = False
    workers: int = 2
    schema: str = CHESS
    dtype: str = "float32"
    record_size: int | None = None
    packed: bool = False
    window_records: int | None = None
    compiled: bool = True
    one_in: int | None = None

    def delivered(self) -> Schema:
        """The schema whose fields a batch has. Raises ImportError, AttributeError or TypeError if there is none."""
        found = self._named()
        schema: Any = found
        if not isinstance(found, Schema):
            given = {"dtype": self.dtype, "record_size": self.record_size}
            if self.dtype == Config.dtype:
                del given["dtype"]  # indices of pieces are no floats: a function's own default
            schema = found(**{name: given[name] for name in _parameters(found) if name in given})
        if not isinstance(schema, Schema):
            raise TypeError(f"{self.schema} must be a loaderd.Schema or a function that returns one, got {schema!r}")
        if schema.needs_record_key:
            raise TypeError(f"{self.schema} must draw no random numbers: only loaderd could draw the same ones")
        return Schema.of_stored(schema.features) if self.packed else schema

    def has_dtype(self) -> bool:
        """Whether ``dtype`` makes a difference: the schema is a function of it."""
        found = self._named()
        return not isinstance(found, Schema) and "dtype" in _parameters(found)

    def loader_options(self) -> dict[str, Any]:
        """The arguments of ``loaderd.Loader`` and of ``loaderd_tf.make_dataset``."""
        shuffle = Shuffle(window_records=self.window_records) if self.window_records else True
        one_in = self.one_in
        where = None if one_in is None else Derived(lambda score: score % one_in == 0, "s")
        return {
            **({} if where is None else {"where": where}),
            "shards": list(self.shards),
            "schema": self.delivered(),
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "shuffle": self.shuffle and shuffle,
            "workers": self.workers,
        }

    def _named(self) -> Any:
        module, _, attribute = self.schema.partition(":")
        return getattr(importlib.import_module(module), attribute)


def _parameters(function: Any) -> Iterable[str]:
    if not callable(function):
        raise TypeError(f"a schema must be a loaderd.Schema or a function that returns one, got {function!r}")
    return inspect.signature(function).parameters


_OPTIONS: dict[str, dict[str, Any]] = {
    "noshuffle": {"shuffle": False},
    "graph": {"graph": True},
    "int8": {"dtype": "int8"},
    "packed": {"packed": True},
    "numpy": {"compiled": False},
    "1worker": {"workers": 1},
    "4workers": {"workers": 4},
}


def configure(spec: str, base: Config) -> tuple[str, Config]:
    """(module's name, its config) of ``spec``, which is ``name`` or ``name:option,option``.

    Raises ValueError for an unknown option.
    """
    name, _, options = spec.partition(":")
    for option in filter(None, options.split(",")):
        if option not in _OPTIONS:
            raise ValueError(f"{spec}: option must be one of {sorted(_OPTIONS)}, got {option!r}")
        base = replace(base, **_OPTIONS[option])
    return name, base


def why_not(module: ModuleType, config: Config) -> str | None:
    """Why a candidate's module cannot deliver what ``config`` says, or None if it can."""
    if config.dtype != Config.dtype and not config.has_dtype():
        return f"{config.schema} is no function of a dtype"
    if not config.compiled and find_spec("llvmlite") is None:
        return "nothing is compiled anyway: llvmlite is not installed"
    reason: str | None = module.cannot(config) if hasattr(module, "cannot") else None
    return reason


def only_chess(config: Config) -> str | None:
    """``cannot`` of a candidate that is written for the chess record."""
    if config.schema != CHESS or config.packed:
        return "it is written for the fields of the chess record"
    return None


def load(name: str) -> ModuleType:
    """The module of candidate ``name``, imported with what it is built on. Raises ImportError if that is missing."""
    return importlib.import_module(f"candidates.{name}")


def is_known(name: str) -> bool:
    """Whether there is a candidate ``name``; imports none, as they import TensorFlow."""
    return find_spec(f"candidates.{name}") is not None

"""The batches of a loader as elements of another library's arrays: what the bindings have in common.

A binding says how an array becomes an array of its library; this module says what an element looks like, and where in
the data a consumer stands.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from loaderd.client.loader import Loader
from loaderd.errors import OptionError
from loaderd.options import as_count, require
from loaderd.plan.positions import Position
from loaderd.schema import Schema

_Result = TypeVar("_Result")

Structure = Any
"""Nested tuples, lists and dicts of field names; None: a dict of all fields."""


class Elements(Iterable[Any]):
    """The batches of ``loader``, packed in a structure. Each iteration is an iteration of the loader."""

    def __init__(self, loader: Loader, structure: Structure, prefetch: int) -> None:
        """``prefetch``: of :func:`checked_prefetch`. Raises OptionError."""
        check_loader(loader)
        structure = checked_structure(structure, loader._unpacked_schema)
        self.loader = loader
        self._prefetch = prefetch
        self._pack = packer(structure)
        self._names = field_names(structure)

    def __repr__(self) -> str:
        return f"<batches of {self.loader!r}>"

    def __len__(self) -> int:
        """Batches of a whole iteration, as ``len(loader)``; TypeError if it has no end."""
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # also of a loader without a length

    def state_dict(self) -> dict[str, Any]:
        """As ``loader.state_dict()``. What was read or copied ahead does not count."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | Position) -> None:
        """As ``loader.load_state_dict()``: have the next iteration begin with exactly the next batch."""
        self.loader.load_state_dict(state_dict)


class DeviceCopyTimer:
    """Counts how long a consumer of ``loader`` waits for copies to a device, up to ``ahead`` of them begun early.

    A device copies after it has done what it was given before, so a loop that waits for a copy may in truth wait for
    its model. A copy by itself takes about as long as the fastest one so far. So of each wait, at most that time (for
    each record) counts as waiting for the copy; the rest is the model's.

    To be used where ``Loader._iterate`` calls: one thread at a time.
    """

    def __init__(self, loader: Loader, ahead: int) -> None:
        self._stream = loader._stream
        self._ahead = ahead
        self._fastest_ns = math.inf  # per record
        self.copies_timed = 0
        """Copies whose time was measured."""

    def took(self, copy_ns: int, num_records: int) -> None:
        """Take in that a copy of ``num_records`` records took ``copy_ns``, whether it was waited for or not."""
        self._fastest_ns = min(self._fastest_ns, copy_ns / max(1, num_records))
        self.copies_timed += 1

    def wait(self, num_records: int, result: Callable[[], _Result]) -> _Result:
        """Return what ``result()`` returns, and count its time as a wait for a copy of ``num_records`` records."""
        began_ns = time.perf_counter_ns()
        value = result()
        self.waited(time.perf_counter_ns() - began_ns, num_records)
        return value

    def waited(self, waited_ns: float, num_records: int) -> None:
        """Count that the loop waited ``waited_ns`` for a copy of ``num_records`` records."""
        self._stream.count_device_wait(int(min(waited_ns, self._fastest_ns * num_records)), self._ahead)


def check_loader(loader: Any) -> None:
    """Raise OptionError for what is no loader."""
    must = "a loaderd.Loader, or what loaderd.connect returned"
    hint = "Loader(shards, schema, batch_size=…) makes one of paths; Loader(dataset, batch_size=…) of a Dataset."
    require(isinstance(loader, Loader), "loader", must, loader, hint)


def checked_prefetch(prefetch: int | None, device: Any) -> int:
    """How many batches are copied to ``device`` ahead: two, unless it is said. Raises OptionError."""
    if prefetch is None:
        return 2
    count = as_count(prefetch, "prefetch", "a number of batches, 0 or more", 0)
    hint = "It is how many batches to copy to a device ahead: give device=, too. On the host, the workers are ahead."
    require(device is not None or not count, "prefetch", "left out where there is no device=", prefetch, hint)
    return count


def checked_structure(structure: Structure, schema: Schema) -> Structure:
    """``structure``, made of plain dicts, lists, tuples, and named tuples of the same types. Raises OptionError."""
    if structure is None:
        return {name: name for name in schema.fields}
    checked = _checked(structure, schema)
    if not field_names(checked):
        raise _no_structure(structure, schema)
    return checked


def _checked(part: Structure, schema: Schema) -> Structure:
    if isinstance(part, Mapping):
        return {key: _checked(inner, schema) for key, inner in part.items()}
    if isinstance(part, (list, tuple)):
        return _maker(part)([_checked(inner, schema) for inner in part])
    if not isinstance(part, str) or part not in schema.fields:
        raise _no_structure(part, schema)
    return part


def _no_structure(got: Any, schema: Schema) -> OptionError:
    return OptionError(
        f"structure must be made of the fields {list(schema.fields)}, got {got!r:.300}",
        hint='Tuples, lists and dicts of their names, such as (("board", "flags"), "score").',
    )


def field_names(structure: Structure) -> tuple[str, ...]:
    """The fields in a structure that was checked, each of them once."""
    if isinstance(structure, str):
        return (structure,)
    parts = structure.values() if isinstance(structure, dict) else structure
    return tuple(dict.fromkeys(name for part in parts for name in field_names(part)))


def packer(structure: Structure) -> Callable[[Mapping[str, Any]], Any]:
    """A function that packs arrays, given by name, in a checked ``structure``. 1 µs, where ``tf.nest`` takes 20."""
    if isinstance(structure, str):
        return operator.itemgetter(structure)
    if isinstance(structure, dict):
        parts = {key: packer(inner) for key, inner in structure.items()}
        return lambda arrays: {key: pack(arrays) for key, pack in parts.items()}
    packers = [packer(inner) for inner in structure]
    make = _maker(structure)
    return lambda arrays: make([pack(arrays) for pack in packers])


def _maker(part: Any) -> Callable[[list[Any]], Any]:
    """A function that makes a sequence of the type of ``part`` of a list."""
    return getattr(type(part), "_make", list if isinstance(part, list) else tuple)

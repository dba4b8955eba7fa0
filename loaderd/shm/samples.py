"""What a page tells processes that only read it: counts up to now, and in the last seconds.

::

    words of the stream │ sample 0 │ sample 1 │ … │ sample 15 │ facts (JSON, as long as FACTS_BYTES says)
                          the daemon writes one or two a second, to the place of the oldest

Besides the consumer, any process of the same user can read a page: it is a memfd that the daemon has open, found in
/proc/PID/fd. So the page says itself how it is laid out (LAYOUT, NUM_SLOTS, NUM_SEATS, NUM_MEMBERS). A sample holds
the sums of what the workers count, and what only the daemon measures (:class:`Gauge`). A reader copies all samples,
then looks how many have been written since, and leaves out those that were overwritten meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import numpy.typing as npt

from loaderd.errors import DaemonError
from loaderd.shm.page import (
    CONSUMER,
    CONSUMER_PID,
    CONSUMER_WAITED_NS,
    COPIES_AHEAD,
    COPY_NS,
    DEVICE_WAIT_NS,
    FACTS_BYTES,
    LAYOUT,
    MAX_FIELDS,
    NUM_COUNTERS,
    NUM_MEMBERS,
    NUM_SAMPLES,
    NUM_SEATS,
    NUM_SLOTS,
    NUM_WAITS,
    POSITION,
    SAMPLES,
    TAKEN_BATCHES,
    TAKEN_RECORDS,
    TAKES_AHEAD,
    WAITS,
    Counter,
    Page,
    barrier,
    words_of,
)
from loaderd.snapshots import Facts, Outage, Snapshot
from loaderd.stages import Stage

PAGE_NAME = "page"
"""The name of a page's memory: /proc/PID/fd and /proc/PID/maps show "memfd:loaderd-" and this."""
_LAYOUT = 0x10ADE4D0007
"""Change it whenever the layout of the words changes: another version may read the page."""
_KINDS = get_type_hints(Facts)
_NUM_CONSUMER = CONSUMER.stop - CONSUMER.start
_COUNTED, _SEEN = 1 + _NUM_CONSUMER, 1 + _NUM_CONSUMER + NUM_COUNTERS


class Gauge(IntEnum):
    """What the daemon measures: X_NS is the field ``x_s`` of a Snapshot, and the others have their fields' names."""

    CONSUMER_CPU_NS = 0
    THREAD_CPU_NS = 1
    WORKER_CPU_NS = 2
    DELAY_NS = 3
    THROTTLED_NS = 4
    MEMORY_STALL_NS = 5
    ASKED_BYTES = 6
    FETCHED_BYTES = 7
    EPOCH = 8
    BATCH = 9
    SLOTS_FULL = 10
    WINDOWS_READY = 11
    WORKERS_RESTARTED = 12
    DAMAGED = 13
    THREAD_DELAY_NS = 14
    IDLE_NS = 15
    STOPPED_NS = 16
    CORES = 17
    NICE = 18
    IS_COMPILED = 19
    """This and what follows are no fields by themselves."""
    USES_ACCELERATOR = 20
    OUTAGE_NS = 21
    """For how long storage has not answered; 0: it answers."""
    OUTAGE_FAILURES = 22


def wait_class(waited_ns: int) -> int:
    """The bin of WAITS in which a wait is counted."""
    return min((waited_ns >> 12).bit_length(), NUM_WAITS - 1)


def encode_facts(facts: Facts) -> bytes:
    """The bytes that stand behind the words."""
    return json.dumps(facts._asdict()).encode()


def begin(page: Page, memory: npt.NDArray[np.uint8], facts: bytes) -> None:
    """Daemon: write how the page is laid out. ``memory``: uint8, the words, and room for ``facts`` behind them."""
    words = page.words
    start = 8 * words_of(page.num_slots, page.num_seats, page.num_members)
    memory[start : start + len(facts)] = np.frombuffer(facts, np.uint8)
    words[NUM_SLOTS], words[NUM_SEATS], words[NUM_MEMBERS] = page.num_slots, page.num_seats, page.num_members
    words[FACTS_BYTES] = len(facts)
    barrier()
    words[LAYOUT] = _LAYOUT


def write_sample(page: Page, seen: Mapping[Gauge, int]) -> None:
    """Daemon: write a sample of all counts. Takes 100 µs."""
    counts = [*page.words[CONSUMER].tolist(), *page.totals()]
    page.add_sample([time.monotonic_ns(), *counts, *[seen.get(what, 0) for what in Gauge]])


class PageView(NamedTuple):
    """A page and the facts of its stream, for processes that only watch: the memory may be mapped read-only."""

    page: Page
    facts: Facts

    @classmethod
    def of(cls, memory: npt.NDArray[np.uint8]) -> PageView:
        """Of a page, from its memory alone. Raises DaemonError where that is another version's, or makes no sense."""
        if len(memory) < 8 * POSITION:
            raise DaemonError(f"a page of {8 * POSITION} bytes or more is expected, got {len(memory)}")
        head = memory[: 8 * POSITION].view(np.int64)
        if head[LAYOUT] != _LAYOUT:
            raise DaemonError(
                f"this stream belongs to another version of loaderd: its page has layout {int(head[LAYOUT]):#x}, and "
                f"this version's have {_LAYOUT:#x}",
                hint="Use the other version's command.",
            )
        num_slots, num_seats, num_members = (int(head[word]) for word in (NUM_SLOTS, NUM_SEATS, NUM_MEMBERS))
        start, num_bytes = 8 * words_of(num_slots, num_seats, num_members), int(head[FACTS_BYTES])
        if min(num_slots, num_seats, num_members, num_bytes) < 0 or start + num_bytes != len(memory):
            raise DaemonError(f"a page of {start + num_bytes:,} bytes is expected, got {len(memory):,}")
        try:
            found: dict[str, Any] = json.loads(memory[start : start + num_bytes].tobytes())
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
            facts = Facts(**values)
            if wrong := [name for name, kind in _KINDS.items() if not _is_a(kind, getattr(facts, name))]:
                raise ValueError(f"{wrong[0]} has another type")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DaemonError(f"the facts behind a page are expected, got what cannot be read: {error}") from None
        return cls(Page(memory, num_slots, num_seats, num_members), facts)

    def now(self) -> Snapshot:
        """What has been counted up to now; what only the daemon measures is 0."""
        words = [time.monotonic_ns(), *self.page.words[CONSUMER].tolist(), *self.page.totals(), *[0] * len(Gauge)]
        return _snapshot(words, self.facts.fields)

    def samples(self) -> list[Snapshot]:
        """What the daemon has counted and measured in the last seconds, one or two samples a second, oldest first."""
        page = self.page
        number = page.words[SAMPLES]
        barrier()
        first = max(0, number - NUM_SAMPLES + 1)
        found = [(one, page.sample(one).tolist()) for one in range(first, number)]
        barrier()
        overwritten = page.words[SAMPLES] - NUM_SAMPLES
        error = page.error()
        snapshots = ((one, _snapshot(words, self.facts.fields, error)) for one, words in found)
        return [snapshot._replace(number=one) for one, snapshot in snapshots if one > overwritten]


def _is_a(kind: Any, value: Any) -> bool:
    if kind not in (int, bool):
        return isinstance(value, tuple) and all(isinstance(each, str) for each in value)
    return type(value) is kind and 0 <= value < 1 << 53


def _snapshot(words: Sequence[int], fields: Sequence[str], error: str = "") -> Snapshot:
    consumer = {word: words[1 + word - CONSUMER.start] for word in range(CONSUMER.start, CONSUMER.stop)}
    seen = {what: words[_SEEN + what] for what in Gauge}
    stage_s, field_s = spent_of(words[_COUNTED:_SEEN], fields)
    outage_s = seen[Gauge.OUTAGE_NS] / 1e9
    measured: dict[str, Any] = {}
    for what in tuple(Gauge)[: Gauge.IS_COMPILED]:
        name, _, unit = what.name.lower().rpartition("_")
        measured |= {f"{name}_s": seen[what] / 1e9} if unit == "ns" else {what.name.lower(): seen[what]}
    return Snapshot(
        time_s=words[0] / 1e9,
        batches=consumer[TAKEN_BATCHES],
        records=consumer[TAKEN_RECORDS],
        wait_s=consumer[CONSUMER_WAITED_NS] / 1e9,
        waits=tuple(consumer[WAITS + number] for number in range(NUM_WAITS)),
        copy_s=consumer[COPY_NS] / 1e9,
        takes_ahead=bool(consumer[TAKES_AHEAD]),
        device_wait_s=consumer[DEVICE_WAIT_NS] / 1e9,
        copies_ahead=consumer[COPIES_AHEAD],
        stage_s=stage_s,
        field_s=field_s,
        consumer_pid=consumer[CONSUMER_PID],
        uses_accelerator=bool(seen[Gauge.USES_ACCELERATOR]),
        kernels="compiled" if seen[Gauge.IS_COMPILED] else "numpy",
        outage=Outage(outage_s, seen[Gauge.OUTAGE_FAILURES], error) if outage_s else None,
        **measured,
    )


def spent_of(counted: Sequence[int], fields: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by stage and by field, from ``Page.totals``. No time is counted twice."""
    by_stage = counted[len(Counter) : len(Counter) + len(Stage)]
    by_field = counted[len(Counter) + len(Stage) :]
    stage_ns = {stage.name.lower(): by_stage[stage] for stage in Stage}
    stage_ns["order"] = counted[Counter.LOAD_NS] - sum(by_stage)
    stage_ns["fill"] = counted[Counter.FILL_NS] - sum(by_field)
    stage_ns |= {"slot": counted[Counter.SLOT_WAIT_NS], "window": counted[Counter.WINDOW_WAIT_NS]}
    names = list(fields[:MAX_FIELDS])
    if len(fields) > MAX_FIELDS:
        names[-1] = f"{names[-1]} and {len(fields) - MAX_FIELDS} more"
    return (
        {name: max(0, ns) / 1e9 for name, ns in stage_ns.items()},  # a worker counts the parts before the whole
        {name: by_field[number] / 1e9 for number, name in enumerate(names)},
    )

"""The memory of one stream: its windows, its slots, its page and its members' columns; and its consumers' bells.

Workers write windows and slots, consumers read slots. The daemon itself reads and writes only the page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from loaderd.daemon.indexing.local_data import LocalData
from loaderd.dataset import StreamDescription
from loaderd.errors import DaemonError, ServerError
from loaderd.machine import available_memory, filesystem_kind, in_mib, remedy, usable_cores
from loaderd.schema import Bits
from loaderd.schema.fields import derived_in, parts_of
from loaderd.shm.anonymous import SharedMemory
from loaderd.shm.layout import SlotLayout, WindowLayout
from loaderd.shm.page import Page, column_words_of, new_bell, words_of
from loaderd.shm.samples import PAGE_NAME, PageView, begin, encode_facts
from loaderd.snapshots import Facts
from loaderd.storage.access import objects_bytes
from loaderd.storage.shard_file import PLAIN, ShardFile

if TYPE_CHECKING:
    from loaderd.daemon.indexing.remote_data import RemoteData

# An interpreter with numpy, and the records of a task; measured in a cgroup. What a schema imports comes on top.
_WORKER_BYTES = 40 << 20


class StreamMemory:
    """The memories of a stream with ``num_arenas`` windows of up to ``max_rows`` rows.

    Raises DaemonError where there is not enough memory, ServerError where the consumer may not have that much.
    ``num_running``: how many workers run already. ``num_members`` as of the page.
    """

    def __init__(
        self,
        description: StreamDescription,
        data: LocalData | RemoteData,
        steps_per_epoch: int,
        num_arenas: int,
        max_rows: int,
        num_running: int,
        num_members: int,
    ) -> None:
        options, schema = description.options, description.schema
        self.windows_bytes = num_arenas * WindowLayout(schema.row_bytes, max_rows).arena_bytes
        self.slot_bytes = SlotLayout(schema.specs, options.batch_size, description.several_readers).slot_bytes
        slots_bytes = options.num_slots * self.slot_bytes
        self.num_bytes = self.windows_bytes + slots_bytes
        """Bytes of windows and slots."""
        if description.max_memory is not None and self.num_bytes > description.max_memory:
            may_take = in_mib(description.max_memory)
            raise ServerError(
                f"this would take {in_mib(self.num_bytes)} of windows and batches, and may take {may_take}",
                hint="Choose a smaller batch_size, or fewer held_batches. The server was started with that limit: "
                "--max-memory.",
            )
        worker_bytes = _WORKER_BYTES + objects_bytes(data.files)
        _check_free(
            {
                f"{num_arenas} shuffle windows of {max_rows:,} records": self.windows_bytes,
                f"{options.num_slots} batches of {options.batch_size:,} records": slots_bytes,
                f"{options.num_workers} workers": (options.num_workers - num_running) * worker_bytes,
            }
        )
        self._windows = SharedMemory.create("windows", self.windows_bytes)
        self._slots = SharedMemory.create("slots", slots_bytes)
        facts = encode_facts(_facts_of(description, data, steps_per_epoch, num_arenas))
        num_seats = max(options.num_workers, num_running)
        num_bytes = 8 * words_of(options.num_slots, num_seats, num_members) + len(facts)
        self._words = SharedMemory.create(PAGE_NAME, num_bytes)
        self._columns = [_new_column(options.num_slots) for _ in range(num_members)]
        columns = [column.bytes for column in self._columns]
        self.page = Page(self._words.bytes, options.num_slots, num_seats, num_members, columns)
        begin(self.page, self._words.bytes, facts)
        self.watched = PageView.of(self._words.bytes)
        self.bells: list[int] = []
        """Of each consumer; it is rung when the batch that the consumer sleeps for is there."""
        self._read_only: list[int] = []
        try:
            for _ in range(max(1, num_members)):
                self.bells.append(new_bell())
            for memory in (self._slots, self._words) if num_members else ():
                self._read_only.append(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            self._close_fds()
            raise DaemonError(f"cannot share the batches' memory: {error.strerror}", hint=remedy(error)) from None

    def consumer_fds(self, column: int) -> tuple[int, ...]:
        """What goes to a consumer with ``Opened``: slots, page, its own column if it is a member, its bell."""
        if not self._read_only:
            return self._slots.fd, self._words.fd, *self.bells
        return *self._read_only, self._columns[column].fd, self.bells[column]

    def renew_column(self, column: int) -> int:
        """Give a member's column new memory, and return its descriptor. Raises DaemonError where there is none."""
        memory = _new_column(self.page.num_slots)
        self.page.use_column(column, memory.bytes)
        self._columns[column].close_fd()
        self._columns[column] = memory
        return memory.fd

    @property
    def worker_fds(self) -> tuple[int, ...]:
        """What goes to a worker with ``Attach``."""
        columns = [column.fd for column in self._columns]
        return self._windows.fd, self._slots.fd, self._words.fd, *columns, *self.bells

    def _close_fds(self) -> None:
        for memory in (self._windows, self._slots, self._words, *self._columns):
            memory.close_fd()
        for fd in (*self._read_only, *self.bells):
            os.close(fd)

    def close(self) -> None:
        """Give the memories back now, and not when garbage is collected.

        A mapping keeps all pages of its memory, even if nobody reads it here.
        """
        self._close_fds()
        for page in (self.page, self.watched.page):
            page.close()
        del self._windows, self._slots, self._words, self._columns


def _new_column(num_slots: int) -> SharedMemory:
    return SharedMemory.create("column", 8 * column_words_of(num_slots))


def _check_free(needs: Mapping[str, int]) -> None:
    """Raise DaemonError where there is less memory than ``needs``, bytes by what they are for.

    Otherwise the kernel would kill a process sooner or later. Smaller windows are the user's choice: if the default
    depended on the memory, the order of the records would depend on the machine.
    """
    memory = available_memory()
    if sum(needs.values()) > memory.free_bytes:
        parts = ", ".join(f"{in_mib(num_bytes)} for {what}" for what, num_bytes in needs.items() if num_bytes)
        raise DaemonError(
            f"not enough memory: {in_mib(sum(needs.values()))} are needed ({parts}), "
            f"{in_mib(memory.free_bytes)} are free ({memory.limit})",
            hint="Choose a smaller batch_size, fewer held_batches or workers, or shuffle=Shuffle(window_records=…) "
            "with smaller windows.",
        )


def _facts_of(
    description: StreamDescription, data: LocalData | RemoteData, steps_per_epoch: int, num_windows: int
) -> Facts:
    """What the page says of the stream, besides the numbers that change."""
    schema, options = description.schema, description.options
    made = {name: schema.definition_of(name) for name in schema.made_fields}
    return Facts(
        fields=tuple(made),
        derived=tuple(name for name, definition in made.items() if derived_in(definition)),
        workers=options.num_workers,
        cores=usable_cores(),
        batch_size=options.batch_size,
        held_batches=options.held_batches,
        slots=options.num_slots,
        steps_per_epoch=steps_per_epoch,
        windows=num_windows,
        shards=data.num_shards,
        compressed=sum(compression not in PLAIN for compression in data.compressions),
        storage=_storage_of(data.files) or ("servers",),
        has_bits=any(isinstance(part, Bits) for definition in made.values() for part in parts_of(definition)),
        batch_bytes=options.batch_size * schema.record_bytes,
        packed_bytes=options.batch_size * schema.row_bytes,
        of_server=description.of_server,
    )


def _storage_of(files: Sequence[ShardFile]) -> tuple[str, ...]:
    schemes = {urlsplit(file.uri).scheme for file in files if "://" in file.uri}
    folders = {os.path.dirname(file.uri) for file in files if "://" not in file.uri}
    return tuple(sorted(schemes | {filesystem_kind(folder) for folder in folders}))

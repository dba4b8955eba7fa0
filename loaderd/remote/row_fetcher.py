"""Loading a window from servers, which read, check and pack its rows.

A load sends several requests at a time, spread over the servers (``remote.servers``), receives the rows, and writes
them to their places in the window.
"""

from __future__ import annotations

import concurrent.futures as futures
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from loaderd.errors import (
    LoaderdError,
    OptionError,
    RecordMismatchError,
    SchemaError,
    ServerError,
    ShardError,
    ShardReadError,
    StorageError,
    WorkerError,
    from_wire,
)
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS, CheckTask, LoadTask
from loaderd.plan.epoch import Slice
from loaderd.remote.ask_once import wait_telling
from loaderd.remote.calls import Calls, OtherData, OutOfReach, PackedRows, ProcessDied, TooMuchAtATime
from loaderd.remote.servers import Lacking, Servers
from loaderd.remote.source import RemoteRows
from loaderd.remote.tickets import RowFault, RowsTicket
from loaderd.snapshots import Outage
from loaderd.stages import Stage, StageTimes

# A request costs both sides together some 600 µs, however little it asks for.
_MOST_ROWS_A_REQUEST = 8192
_MOST_RANGES_A_REQUEST = 4096
_REQUESTS_AT_A_TIME = 4
_MOST_AHEAD = 4
_QUICK_S = 3.0
"""A server makes rows for ten times as long: twice as many may be asked for."""

Places = npt.NDArray[np.intp]
Faults = list[tuple[list[int], LoaderdError]]
Answered = tuple[PackedRows, list[RowFault]]
Answer = futures.Future[Answered]


Asked = list[tuple[int, int, int, int]]
"""What is asked for at a time: ranges as in a RowsTicket."""


def num_rows_of(asked: Asked) -> int:
    """How many rows an answer has."""
    return sum(stop - first for _, _, first, stop in asked)


def requests_of(ranges: Iterable[tuple[int, int, int, int]], most_rows: int) -> Iterator[Asked]:
    """Requests for ``ranges``, in order, each of at most ``most_rows`` rows.

    A range is cut only if it is too large for one request: the server reads its block again for each part.
    """
    asked: Asked = []
    num_rows = 0
    for epoch, block, first, stop in ranges:
        for begin in range(first, stop, most_rows):
            end = min(stop, begin + most_rows)
            if num_rows + end - begin > most_rows or len(asked) == _MOST_RANGES_A_REQUEST:
                yield asked
                asked, num_rows = [], 0
            asked.append((epoch, block, begin, end))
            num_rows += end - begin
    if asked:
        yield asked


def completed(answer: Answered, other: Answered) -> Answered:
    """``answer`` to a ticket, with the rows that it lacks and ``other``, another server's answer, has."""
    rows, faults = answer[0].copy(), answer[1]
    nowhere = {number for fault in other[1] for number in fault.rows}
    for fault in faults:
        found = [number for number in fault.rows if number not in nowhere]
        rows[found] = other[0][found]
    left = [RowFault([number for number in fault.rows if number in nowhere], fault.error) for fault in faults]
    return rows, [fault for fault in left if fault.rows]


class RowFetcher:
    """Loads windows from servers.

    ``tell`` is called now and then during the wait for an answer, ``wake`` when an answer has come (in another
    thread), ``say`` with what the user should hear. ``spent``: where the ns of the waits are added up, as READ.
    """

    def __init__(
        self,
        data: RemoteRows,
        tell: Callable[[int], None],
        say: Callable[[str], None],
        wake: Callable[[], None],
        spent: StageTimes,
    ) -> None:
        self._data = data
        self._tell = tell
        self._wake = wake
        self._spent = spent
        self._servers = Servers(data.of.addresses, data.of.settings, say, has_begun=True)
        self._pool = futures.ThreadPoolExecutor(_REQUESTS_AT_A_TIME, thread_name_prefix="rows")
        self._most_rows = self._limit_rows = min(_MOST_ROWS_A_REQUEST, data.most_rows)
        """Fewer after a request that took the server too long, more again after quick answers."""
        self._ahead: OrderedDict[int, list[tuple[int, Answer]]] = OrderedDict()

    @property
    def outage(self) -> Outage | None:
        """Servers that do not answer; None: at least one does."""
        return self._servers.outages.outage

    def close(self) -> None:
        """Ask for nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def use_servers(self, addresses: tuple[str, ...]) -> None:
        """Ask these from now on."""
        self._servers.use(addresses)

    def begin(self, task: LoadTask) -> None:
        """Ask for the rows of a load ahead of time, so that they are there when :meth:`load` is called."""
        while len(self._ahead) >= _MOST_AHEAD:  # loads that were called off
            self._ahead.popitem(last=False)
        self._ahead[task.task] = self._ask(task.slices)

    def is_there(self, task: LoadTask) -> bool:
        """Whether all answers that :meth:`begin` asked for have come."""
        return all(answer.done() for _, answer in self._ahead.get(task.task, ()))

    def load(self, task: LoadTask, places: Places, window: PackedRows) -> Faults:
        """Write the rows of the task's slices to ``window``, uint8 (max_rows, row_bytes), at ``places``.

        Returns the places that could not be written, and why. Raises ServerError where no server answers.
        """
        faults: Faults = []
        for first, answer in self._ahead.pop(task.task, None) or self._ask(task.slices):
            began_ns = time.monotonic_ns()
            rows, bad = wait_telling(answer, self._tell)
            self._spent[Stage.READ] += time.monotonic_ns() - began_ns
            of_rows = places[first : first + len(rows)]
            lost = [(of_rows[numbers], error) for numbers, error in bad]
            faults += [(at[at >= 0].tolist(), from_wire(error)) for at, error in lost]
            wanted = of_rows >= 0
            if not wanted.all():  # other hosts have delivered the others
                of_rows, rows = of_rows[wanted], rows[wanted]
            window[of_rows] = rows
        return faults

    def check_fits(self, task: CheckTask, most: int) -> list[str]:
        """Raise RecordMismatchError where none of the first ``most`` records of a block fit the server's schema.

        Returns no feature lists: only the server sees them.
        """
        count = min(task.num_records, most)
        asked = self._ask([Slice(task.block, 0, count, 0, 0)])
        faults = [fault for _, answer in asked for fault in wait_telling(answer, self._tell)[1]]
        errors = [from_wire(error) for _, error in faults]
        mismatches = [error for error in errors if isinstance(error, RecordMismatchError)]
        if mismatches and sum(len(numbers) for numbers, _ in faults) == count:
            raise mismatches[0]
        return []

    def _ask(self, slices: Sequence[Slice]) -> list[tuple[int, Answer]]:
        """Send the requests for ``slices``; returns of each (number of its first row in the slices, answer)."""
        asked: list[tuple[int, Answer]] = []
        first_row = 0
        ranges = [(epoch, block, first, stop) for block, first, stop, _, epoch in slices]
        for request in requests_of(ranges, self._most_rows):
            answer = self._pool.submit(self._rows, request)
            answer.add_done_callback(lambda _: self._wake())
            asked.append((first_row, answer))
            first_row += num_rows_of(request)
        return asked

    def _rows(self, request: Asked) -> Answered:
        data = self._data
        ticket = RowsTicket(data.data, np.array(request), data.listing)
        before: list[Answered] = []

        def call(calls: Calls, timeout_s: float) -> Answered | TooMuchAtATime:
            began_s = time.monotonic()
            try:
                try:
                    answered = calls.rows(data.of.name, ticket, data.row_bytes, timeout_s)
                except OtherData:  # more shards were added, perhaps
                    calls.add_shards(data.of.name, data.data, data.shards, timeout_s)
                    began_s = time.monotonic()
                    answered = calls.rows(data.of.name, ticket, data.row_bytes, timeout_s)
            except TooMuchAtATime as error:
                if ticket.num_rows == 1:
                    raise OutOfReach(f"the server at {calls.address}: {error.message}") from None
                return error
            if time.monotonic() - began_s < _QUICK_S:
                self._most_rows = max(self._most_rows, min(self._limit_rows, 2 * ticket.num_rows))
            answered = completed(before.pop(), answered) if before else answered
            if any(fault.error["class"] == ShardReadError.__name__ for fault in answered[1]):
                before.append(answered)
                raise Lacking(answered)  # another server may have these shards
            return answered

        try:
            answered = self._servers.ask(call, data.of.limit_s)
        except (OptionError, SchemaError, ShardError) as error:
            if isinstance(error, StorageError):
                raise
            # It is about a server, not about these rows, which must not be taken for lost.
            raise ServerError(error.message, hint=error.hint) from None
        return self._halved(request, answered) if isinstance(answered, TooMuchAtATime) else answered

    def _halved(self, request: Asked, error: TooMuchAtATime) -> Answered:
        """The rows of a request that was too much for a server. Raises WorkerError where too many kill processes."""
        half_rows = -(-num_rows_of(request) // 2)
        if not isinstance(error, ProcessDied):
            self._most_rows = min(self._most_rows, half_rows)
        rows, faults = np.empty((0, self._data.row_bytes), np.uint8), []
        for half in requests_of(request, half_rows):
            more, of_half = self._rows(half)
            faults += [RowFault([len(rows) + number for number in fault.rows], fault.error) for fault in of_half]
            rows = np.concatenate([rows, more])
            num_deadly = sum(fault.error["class"] == WorkerError.__name__ for fault in faults)
            if isinstance(error, ProcessDied) and num_deadly > MOST_ROW_FAULTS:
                raise WorkerError(f"processes of the servers die of more than {MOST_ROW_FAULTS} of these rows")
        return rows, faults

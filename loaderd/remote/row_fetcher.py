"""Loading a window from servers, which read, check and pack its rows.

A load sends several requests at a time, spread over the servers (``remote.servers``), receives the rows, and writes
them to their places in the window.
"""

from __future__ import annotations

import concurrent.futures as futures
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

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
    from_wire,
)
from loaderd.ipc.worker_messages import CheckTask, LoadTask
from loaderd.plan.epoch import Slice
from loaderd.remote.ask_once import wait_telling
from loaderd.remote.calls import Calls, OtherData, OutOfReach, PackedRows, TooMuchAtATime
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


@dataclass
class Request:
    """What is asked for at a time. ``ranges``: as the rows of a RowsTicket."""

    ranges: list[tuple[int, int, int, int]] = field(default_factory=list)
    num_rows: int = 0

    def halves(self) -> Iterator[Request]:
        """The same rows in two requests."""
        slices = [Slice(block, first, stop, 0, epoch) for epoch, block, first, stop in self.ranges]
        return requests_of(slices, -(-self.num_rows // 2))


def requests_of(slices: Sequence[Slice], most_rows: int) -> Iterator[Request]:
    """Requests for ``slices``, in order, each of at most ``most_rows`` rows.

    A slice is cut only if it is too large for one request: the server reads its block again for each part.
    """
    request = Request()
    for block, first, stop, _, epoch in slices:
        for begin in range(first, stop, most_rows):
            end = min(stop, begin + most_rows)
            too_many = request.num_rows + end - begin > most_rows
            if too_many or len(request.ranges) == _MOST_RANGES_A_REQUEST:
                yield request
                request = Request()
            request.ranges.append((epoch, block, begin, end))
            request.num_rows += end - begin
    if request.num_rows:
        yield request


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
        for request in requests_of(slices, self._most_rows):
            answer = self._pool.submit(self._rows, request)
            answer.add_done_callback(lambda _: self._wake())
            asked.append((first_row, answer))
            first_row += request.num_rows
        return asked

    def _rows(self, request: Request) -> Answered:
        data = self._data
        name = data.of.name
        ticket = RowsTicket(data.data, np.array(request.ranges), data.listing)
        before: list[Answered] = []

        def rows_of(calls: Calls, timeout_s: float) -> Answered | None:
            try:
                return calls.rows(name, ticket, data.row_bytes, timeout_s)
            except TooMuchAtATime as error:
                if request.num_rows == 1:
                    raise OutOfReach(f"the server at {calls.address}: {error.message}") from None
                return None

        def call(calls: Calls, timeout_s: float) -> Answered | None:
            began_s = time.monotonic()
            try:
                answered = rows_of(calls, timeout_s)
            except OtherData:  # more shards were added, perhaps
                calls.add_shards(name, data.data, data.shards, timeout_s)
                began_s = time.monotonic()
                answered = rows_of(calls, timeout_s)
            if answered is None:
                return None
            if time.monotonic() - began_s < _QUICK_S:
                self._most_rows = max(self._most_rows, min(self._limit_rows, 2 * request.num_rows))
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
        if answered is not None:
            return answered
        self._most_rows = min(self._most_rows, -(-request.num_rows // 2))
        rows, faults = np.empty((0, data.row_bytes), np.uint8), []
        for half in request.halves():
            more, of_half = self._rows(half)
            faults += [RowFault([len(rows) + number for number in fault.rows], fault.error) for fault in of_half]
            rows = np.concatenate([rows, more])
        return rows, faults

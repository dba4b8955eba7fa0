"""Which rows are asked for in one request, and whether the first ones fit."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import msgpack
import numpy as np
import pytest

from loaderd.errors import RecordMismatchError, ShardReadError, WorkerError, to_wire
from loaderd.ipc.worker_messages import CheckTask, LoadTask
from loaderd.plan.epoch import Slice
from loaderd.remote import row_fetcher
from loaderd.remote.calls import Calls, ProcessDied
from loaderd.remote.row_fetcher import Answered, RowFetcher, num_rows_of, requests_of
from loaderd.remote.source import RemoteRows, RemoteSet, Settings
from loaderd.remote.tickets import RowFault, RowsTicket, encode_faults, most_rows
from loaderd.stages import Stage
from tests.remote.evil_server import EvilServer, answer

EPOCH = 7


def ranges(slices: list[tuple[int, int, int]], most_rows: int) -> list[list[tuple[int, int, int]]]:
    """Of each request; ``slices``: (block, first, stop)."""
    found = list(requests_of([(EPOCH, *each) for each in slices], most_rows))
    for request in found:
        assert num_rows_of(request) <= most_rows
        assert {epoch for epoch, *_ in request} == {EPOCH}
    return [[(block, first, stop) for _, block, first, stop in request] for request in found]


def test_blocks_are_not_cut_where_they_fit():
    blocks = [(number, 0, 1000) for number in range(8)]
    assert ranges(blocks, 3500) == [blocks[:3], blocks[3:6], blocks[6:]]
    assert ranges(blocks, 1000) == [[block] for block in blocks]
    assert ranges(blocks, 8000) == [blocks]


def test_what_is_too_large_is_cut():
    assert ranges([(4, 10, 60), (5, 0, 30), (6, 0, 5)], 20) == [
        [(4, 10, 30)],
        [(4, 30, 50)],
        [(4, 50, 60)],
        [(5, 0, 20)],
        [(5, 20, 30), (6, 0, 5)],
    ]


def test_nothing_is_asked_for_nothing():
    assert ranges([], 10) == ranges([(1, 5, 5)], 10) == []


def test_a_request_has_not_too_many_ranges(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(row_fetcher, "_MOST_RANGES_A_REQUEST", 2)
    single = [(number, 0, 1) for number in range(5)]
    assert ranges(single, 100) == [single[:2], single[2:4], single[4:]]


def test_a_request_is_bounded_by_what_a_server_unpacks_for_it():
    assert most_rows(8, 1 << 20) == 64
    assert most_rows(200, 208) == (2 << 20) // 200
    assert most_rows(1, 1) == 1 << 16
    assert most_rows(1 << 30, 1 << 30) == 1


ROW_BYTES = 200_000  # ten a request


class RowsServer(EvilServer):
    """Answers each ticket with what ``answer_to`` says of its ranges: rows, and faults; no rows: too many."""

    def __init__(self, answer_to: Callable[[list[list[int]]], tuple[bytes, int, list[RowFault]]]) -> None:
        self._answer_to = answer_to
        super().__init__(())

    def _answer(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as file, contextlib.suppress(ConnectionError):
            while file.readline():
                headers = http.client.parse_headers(file)
                ticket = msgpack.unpackb(file.read(int(headers["content-length"])))
                rows, num_rows, faults = self._answer_to(ticket["rows"])
                behind = encode_faults(faults)
                if not num_rows:
                    sock.sendall(answer("content-length: 0", status="413 Content Too Large"))
                    continue
                sock.sendall(
                    answer(
                        f"loaderd-rows: {num_rows} x {len(rows) // num_rows}",
                        f"loaderd-fault-bytes: {len(behind)}",
                        f"content-length: {len(rows) + len(behind)}",
                        body=rows + behind,
                    )
                )


def fetcher_of(servers: Sequence[EvilServer], row_bytes: int) -> RowFetcher:
    of = RemoteSet(tuple(each.address for each in servers), Settings(), "train", 10.0)
    rows = RemoteRows(of, "digest", row_bytes, most_rows(row_bytes, row_bytes), bytes(8))
    return RowFetcher(rows, lambda _: None, print, lambda: None, [0] * len(Stage))


@pytest.mark.parametrize("fit_from", [3, 45, 10**9])
def test_a_probe_of_records_that_come_in_several_requests(fit_from: int):
    """Records before number ``fit_from`` fit no schema."""

    def misfits(ranges: list[list[int]]) -> tuple[bytes, int, list[RowFault]]:
        ((_, _, first, stop),) = ranges
        wrong = list(range(max(0, min(stop, fit_from) - first)))
        faults = [RowFault(wrong, to_wire(RecordMismatchError("they do not fit")))] if wrong else []
        return bytes((stop - first) * ROW_BYTES), stop - first, faults

    with contextlib.closing(RowsServer(misfits)) as server:
        fetcher = fetcher_of([server], ROW_BYTES)
        task = CheckTask(0, 0, 50, None, True)
        if fit_from < 50:
            fetcher.check_fits(task, 1000)
        else:
            with pytest.raises(RecordMismatchError, match="they do not fit"):
                fetcher.check_fits(task, 1000)
        fetcher.close()


@pytest.mark.parametrize("both", [[], [3]])
def test_rows_that_one_server_cannot_read_come_from_another(both: list[int]):
    """Each lacks a block of a request; only what no server can read is a fault, in its place."""

    def half(gone: dict[int, list[int]]) -> RowsServer:
        def rows_of(ranges: list[list[int]]) -> tuple[bytes, int, list[RowFault]]:
            asked = [(block, record) for _, block, first, stop in ranges for record in range(first, stop)]
            is_gone = [record in gone.get(block, []) for block, record in asked]
            rows = b"".join(bytes([0 if each else 7]) * 8 for each in is_gone)
            error = to_wire(ShardReadError("it is gone"))
            return rows, len(asked), [RowFault([number], error) for number, each in enumerate(is_gone) if each]

        return RowsServer(rows_of)

    with contextlib.ExitStack() as stack:
        servers = [half({4: list(range(5))}), half({5: list(range(4)), 4: both})]
        for server in servers:
            stack.callback(server.close)
        fetcher = fetcher_of(servers, 8)
        stack.callback(fetcher.close)
        for number in range(8):  # whichever is asked first
            window = np.zeros((9, 8), np.uint8)
            task = SimpleNamespace(task=number, slices=[Slice(4, 0, 5, 0, 0), Slice(5, 0, 4, 5, 0)])
            faults = fetcher.load(cast(LoadTask, task), np.arange(9)[::-1].copy(), window)
            lost = [8 - place for place in both]
            assert [places for places, _ in faults] == ([lost] if lost else [])
            assert [place for place in range(9) if (window[place] != 7).any()] == lost


def test_requests_that_took_too_long_grow_again():
    """After quick answers, to what they were; and a record that is lost keeps its place."""
    asked: list[int] = []

    def rows_of(ranges: list[list[int]]) -> tuple[bytes, int, list[RowFault]]:
        ((_, _, first, stop),) = ranges
        asked.append(stop - first)
        error = to_wire(RecordMismatchError("it does not fit"))
        lost = [RowFault([7 - first], error)] if first <= 7 < stop else []
        return bytes(asked[-1] * ROW_BYTES), 0 if len(asked) <= 2 else asked[-1], lost

    with contextlib.closing(RowsServer(rows_of)) as server:
        fetcher = fetcher_of([server], ROW_BYTES)
        for number in range(4):
            task = SimpleNamespace(task=number, slices=[Slice(4, 0, 10, 0, 0)])
            faults = fetcher.load(cast(LoadTask, task), np.arange(10), np.zeros((10, ROW_BYTES), np.uint8))
            assert [places for places, _ in faults] == [[7]]
        fetcher.close()
    assert asked[:4] == [10, 5, 3, 2] and asked[-1] == 10


def test_processes_may_die_of_so_many_records_of_a_request(monkeypatch: pytest.MonkeyPatch):
    """They die of each."""

    def rows(_: Calls, dataset: str, ticket: RowsTicket, row_bytes: int, timeout_s: float) -> Answered:
        if ticket.num_rows > 1:
            raise ProcessDied("it died")
        return np.zeros((1, row_bytes), np.uint8), [RowFault([0], to_wire(WorkerError("deadly")))]

    monkeypatch.setattr(Calls, "rows", rows)
    with contextlib.closing(EvilServer(())) as server:
        fetcher = fetcher_of([server], 8)

        def load(num_rows: int) -> row_fetcher.Faults:
            task = SimpleNamespace(task=1, slices=[Slice(4, 0, num_rows, 0, 0)])
            return fetcher.load(cast(LoadTask, task), np.arange(num_rows), np.zeros((num_rows, 8), np.uint8))

        assert [places for places, _ in load(32)] == [[number] for number in range(32)]
        with pytest.raises(WorkerError, match="die of more than 32 of these rows"):
            load(33)
        fetcher.close()

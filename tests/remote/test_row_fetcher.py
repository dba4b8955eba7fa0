"""Which rows are asked for in one request, and whether the first ones fit."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from loaderd.errors import RecordMismatchError, ShardReadError, to_wire
from loaderd.ipc.worker_messages import CheckTask, LoadTask
from loaderd.plan.epoch import Slice
from loaderd.remote import row_fetcher
from loaderd.remote.row_fetcher import RowFetcher, requests_of
from loaderd.remote.source import RemoteRows, RemoteSet, Settings
from loaderd.remote.tickets import COLUMN, Fault, faults_to_wire
from loaderd.stages import Stage

EPOCH = 7


def ranges(slices: list[tuple[int, int, int]], most_rows: int) -> list[list[tuple[int, int, int]]]:
    """Of each request; ``slices``: (block, first, stop)."""
    wanted = [Slice(block, first, stop, 0, EPOCH) for block, first, stop in slices]
    found = list(requests_of(wanted, most_rows))
    for request in found:
        assert request.num_rows == sum(stop - first for _, _, first, stop in request.ranges) <= most_rows
        assert {epoch for epoch, *_ in request.ranges} == {EPOCH}
    return [[(block, first, stop) for _, block, first, stop in request.ranges] for request in found]


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


ROW_BYTES = 100_000  # ten a request


class Misfits(flight.FlightServerBase):
    """Serves blocks whose records fit no schema, but for those from number ``fit_from`` on."""

    fit_from = 10**9

    def do_get(self, _: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        ((_, _, first, stop),) = json.loads(ticket.ticket)["rows"]
        wrong = list(range(max(0, min(stop, self.fit_from) - first)))
        rows = np.zeros((stop - first, ROW_BYTES), np.uint8)
        column = pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(ROW_BYTES), len(rows), [None, pa.py_buffer(rows.tobytes())]
        )
        batch = pa.record_batch([column], names=[COLUMN])
        faults = faults_to_wire([Fault(wrong, to_wire(RecordMismatchError("they do not fit")))] if wrong else [])
        return flight.GeneratorStream(batch.schema, iter([(batch, faults)]))


@pytest.mark.parametrize("fit_from", [3, 45, 10**9])
def test_a_probe_of_records_that_come_in_several_requests(fit_from: int):
    with Misfits("grpc://127.0.0.1:0") as server:
        server.fit_from = fit_from
        of = RemoteSet((f"grpc://127.0.0.1:{server.port}",), Settings(), "train", 10.0)
        spent = [0] * len(Stage)
        rows = RowFetcher(RemoteRows(of, "digest", ROW_BYTES), lambda _: None, print, lambda: None, spent)
        task = CheckTask(0, 0, 50, None, True)
        if fit_from < 50:
            rows.check_fits(task, 1000)
        else:
            with pytest.raises(RecordMismatchError, match="they do not fit"):
                rows.check_fits(task, 1000)
        rows.close()


class Half(flight.FlightServerBase):
    """Serves rows filled with 7; of block b it cannot read records that are in ``gone[b]``."""

    gone: dict[int, list[int]]

    def do_get(self, _: Any, ticket: flight.Ticket) -> flight.GeneratorStream:
        rows, lost = [], []
        for _, block, first, stop in json.loads(ticket.ticket)["rows"]:
            for number in range(first, stop):
                is_gone = number in self.gone.get(block, [])
                lost += [len(rows)] if is_gone else []
                rows.append(bytes([0 if is_gone else 7]) * 8)
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(8), len(rows), [None, pa.py_buffer(b"".join(rows))])
        batch = pa.record_batch([column], names=[COLUMN])
        faults = faults_to_wire([Fault([number], to_wire(ShardReadError("it is gone"))) for number in lost])
        return flight.GeneratorStream(batch.schema, iter([(batch, faults)]))


@pytest.mark.parametrize("both", [[], [3]])
def test_rows_that_one_server_cannot_read_come_from_another(both: list[int]):
    """Each lacks a block of a request; only what no server can read is a fault, in its place."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Half("grpc://127.0.0.1:0")) for _ in range(2)]
        servers[0].gone, servers[1].gone = {4: list(range(5))}, {5: list(range(4)), 4: both}
        of = RemoteSet(tuple(f"grpc://127.0.0.1:{each.port}" for each in servers), Settings(), "train", 10.0)
        fetcher = RowFetcher(RemoteRows(of, "digest", 8), lambda _: None, print, lambda: None, [0] * len(Stage))
        stack.callback(fetcher.close)
        for number in range(8):  # whichever is asked first
            window = np.zeros((9, 8), np.uint8)
            task = SimpleNamespace(task=number, slices=[Slice(4, 0, 5, 0, 0), Slice(5, 0, 4, 5, 0)])
            faults = fetcher.load(cast(LoadTask, task), np.arange(9)[::-1].copy(), window)
            lost = [8 - place for place in both]
            assert [places for places, _ in faults] == ([lost] if lost else [])
            assert [place for place in range(9) if (window[place] != 7).any()] == lost

"""The data sets that a process serves, each with the listings of its shards that consumers read.

::

    listing  ──being opened (a thread lists and indexes)──► open ──more than 4 are, and for 60 s nobody asks──► closed
                └─ failed: kept for some seconds, so that those who ask again get the reason

A consumer goes on with the shards that it began with, though more have been added, and though this process has never
seen the consumer: its tickets name them by the digest of their table. A digest that is not open is found by the
manifests that servers keep in their state folder (``daemon.indexing.shard_manifest``); or the consumer says which
shards of the table they are, and the digest proves it. So consumers can choose among shards, and cannot name others.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from loaderd.daemon.indexing.local_data import digest_names
from loaderd.daemon.indexing.shard_manifest import Manifest, Manifests
from loaderd.dataset import AnyDataset
from loaderd.errors import LoaderdError, OptionError, ServerError, WorkerError
from loaderd.ipc.worker_messages import MOST_ROW_FAULTS
from loaderd.plan.passes import Listing
from loaderd.remote.tables import shard_hash, table_to_wire
from loaderd.remote.tickets import SHARD_BYTES, RowFault, RowsTicket, most_rows
from loaderd.schema.packed import unpacking_schema
from loaderd.serve.deaths import MAX_DEATHS, NO_ROW, Deaths
from loaderd.serve.opening import IndexedShards
from loaderd.serve.row_maker import HINT_OF_DEATHS, RowMaker, Rows
from loaderd.snapshots import Progress
from loaderd.storage.shard_file import ShardFile

_MOST_IDLE_LISTINGS, _MOST_LISTINGS = 4, 16
_IDLE_S = 60.0
_LISTED_ANEW_S = 2.0
_FAILED_FOR_S = 5.0
_WAIT_S = 5.0


class NotReady(Exception):
    """The answer cannot be had now: ask later, or ask another server."""


class Check(Protocol):
    """Called now and then while rows are made. Raises where nobody waits for them any more, or they take too long."""

    def __call__(self, waited_s: float = 0.0) -> None:
        """``waited_s``: for how long no row could be made, as storage does not answer, or others come first."""


class ServedListing:
    """A data set with the shards of one listing. :meth:`make` may be called in several threads."""

    def __init__(self, dataset: AnyDataset, opened: IndexedShards) -> None:
        self.opened = opened
        self._dataset = dataset
        data = opened.data
        self.table, self.digest = table_to_wire(
            dataset,
            data.counts,
            num_shards=data.num_shards,
            of=data.of,
            listing=data.listing,
            damages=data.damages,
            left_out=data.left_out,
            files=dict.fromkeys(data.files),
        )
        self.opened_s = time.monotonic()
        self.row_bytes = unpacking_schema(dataset.leaves()[0].schema).row_bytes
        self._counts = np.concatenate(data.counts)
        self._idle: list[RowMaker] = []
        self._is_closed = False
        self._of_thread = threading.local()
        opened.access.on_wait = self._on_wait

    def check(self, ticket: RowsTicket) -> None:
        """Raise OptionError for a ticket of records that do not exist, or of more than an answer may hold."""
        blocks, stops = ticket.rows[:, 1], ticket.rows[:, 3]
        missing = np.flatnonzero(stops > self._counts[np.minimum(blocks, len(self._counts) - 1)])
        missing = np.append(np.flatnonzero(blocks >= len(self._counts)), missing)
        if len(missing):
            block, stop = int(blocks[missing[0]]), int(stops[missing[0]])
            raise OptionError(f"a ticket asks for record {stop - 1} of block {block}, which is not in the data")
        most = most_rows(self.row_bytes, self._dataset.schema.row_bytes)
        if ticket.num_rows > most:
            raise OptionError(
                f"a ticket must ask for at most {most} records of {self.row_bytes} bytes, got {ticket.num_rows}"
            )

    def make(self, ticket: RowsTicket, check: Check, deaths: Deaths) -> tuple[Rows, list[RowFault]]:
        """As ``RowMaker.make``. Raises WorkerError for a ticket of which processes die before its first row."""
        began_s = time.monotonic()
        try:
            maker = self._idle.pop()
        except IndexError:
            maker = RowMaker(self._dataset, self.opened.data, self.opened.access)
        self._of_thread.check = check
        try:
            with deaths.watching(ticket.encode(), lambda: check(time.monotonic() - began_s)) as (died, begin_row):
                killers = [row for row, number in died.items() if number >= MAX_DEATHS]
                if NO_ROW in killers or len(killers) > MOST_ROW_FAULTS:
                    text = f"{died.total()} processes of the server died while they made these rows"
                    raise WorkerError(text, hint=HINT_OF_DEATHS)
                return maker.make(ticket.rows, check, killers, begin_row if died else None)
        finally:
            del self._of_thread.check
            self._idle.append(maker)
            if self._is_closed:
                self.close()

    def _on_wait(self) -> None:
        """Storage does not answer yet: called now and then, in the thread that waits."""
        check: Check | None = getattr(self._of_thread, "check", None)
        if check is not None:
            outage = self.opened.access.outages.outage
            check(0.0 if outage is None else outage.for_s)

    def close(self) -> None:
        """Close the files of those who make no rows at this moment, those of the others when they have made them."""
        self._is_closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
        self.opened.access.abandon()


@dataclass
class _Opening:
    """A listing that is open, is being opened, or has failed. Times as of ``time.monotonic``."""

    task: asyncio.Task[ServedListing]
    used_s: float
    failed_s: float | None = None

    @property
    def served(self) -> ServedListing | None:
        return self.task.result() if self.task.done() and self.task.exception() is None else None


class ServedDataset:
    """For use in one event loop. ``openers``: threads that list and index. ``manifests``: None: none are kept."""

    def __init__(
        self, name: str, target: str, dataset: AnyDataset, openers: ThreadPoolExecutor, manifests: Manifests | None
    ) -> None:
        self.name = name
        self.dataset = dataset
        self.error: LoaderdError | None = None
        """Why the shards that there are now cannot be served."""
        self.progress: Progress | None = None
        self.current: ServedListing | None = None
        self._target = target
        self._openers = openers
        self._manifests = manifests
        self._listings: OrderedDict[Hashable, _Opening] = OrderedDict()
        """The one that was used last is the last."""

    async def open_current(self) -> None:
        """List and index the shards that there are now. Raises LoaderdError."""
        try:
            opened = await self._open(None, None)
        except LoaderdError as error:
            self.error = error
            raise
        finally:
            self.progress = None
        self.current, self.error = opened, None
        digests = opened.opened.data.digests
        if self._manifests is not None and digests:
            sets = zip(self.dataset.leaves(), opened.opened.sets, strict=True)
            manifest = Manifest.of(self._target, digests, [None if leaf.grows else files for leaf, files in sets])
            if unkept := await self._in_thread(lambda: self._manifests and self._manifests.add(manifest)):
                raise ServerError(f"the list of the shards of {self.name} cannot be kept: {unkept}")

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._openers, function)

    async def _open(
        self, listing: Listing | None, choose: Callable[[list[list[ShardFile]]], list[list[ShardFile]]] | None
    ) -> ServedListing:
        known = None if self.current is None else self.current.opened.indexes

        def show(progress: Progress) -> None:
            self.progress = progress

        def work() -> ServedListing:
            chosen = choose or (lambda listed: listed)
            opened = IndexedShards(self.dataset, self.name, listing=listing, choose=chosen, known=known, show=show)
            return ServedListing(self.dataset, opened)

        found: ServedListing = await self._in_thread(work)
        return found

    # --------------------------------------------------------------------------------------- which listing

    async def of_ticket(self, ticket: RowsTicket) -> ServedListing:
        """The listing that a ticket is for. Raises NotReady, and LoaderdError; OtherData if it is not known."""
        if ticket.listing is not None:
            served = await self._wait(ticket.listing, lambda: self._open(ticket.listing, None))
            if served.digest != ticket.data:
                raise OtherData(self.name, ticket.data, served.digest)
            return served
        if (present := self._present(ticket.data)) is not None:
            return present
        opening = self._listings.get(("digest", ticket.data))
        if opening is None or opening.failed_s is not None:
            raise OtherData(self.name, ticket.data, "none" if self.current is None else self.current.digest)
        return await self._opened(("digest", ticket.data), opening)

    async def of_position(self, listing: Listing | None, belongs_to: Mapping[str, Any]) -> ServedListing:
        """The listing that a consumer begins with, whose position has this ``listing`` and ``of``."""
        current = self._ready()
        if self.dataset.grows:
            if listing is not None:
                return await self._wait(listing, lambda: self._open(listing, None))
            now = self._listings.get("now")
            latest = current if now is None or now.served is None else now.served
            if time.monotonic() - latest.opened_s <= _LISTED_ANEW_S:
                return latest
            if now is not None and now.served is not None:
                del self._listings["now"]
            return await self._wait("now", self._open_now)
        digests = {name: str(belongs_to.get(name)) for name in digest_names(self.dataset)}
        if not belongs_to or digests == current.opened.data.digests or self._manifests is None:
            return current
        manifests = self._manifests
        key = ("position", *digests.values())
        if key not in self._listings and await self._in_thread(lambda: manifests.find(self._target, digests)) is None:
            return current  # the consumer says what differs

        async def open_earlier() -> ServedListing:
            found = await self._in_thread(lambda: manifests.find(self._target, digests))
            served = await self._open(None, None if found is None else found.choose)
            self._add(("digest", served.digest), served)
            return served

        return await self._wait(key, open_earlier)

    async def _open_now(self) -> ServedListing:
        served = await self._open(None, None)
        self._add(served.opened.data.listing, served)  # for the tickets that follow
        return served

    async def add(self, digest: str, shards: bytes) -> None:
        """Have tickets for ``digest`` answered, whose shards are those with these hashes. Raises as of_ticket."""
        if self._present(digest) is not None:
            return
        wanted = {shards[at : at + SHARD_BYTES] for at in range(0, len(shards), SHARD_BYTES)}

        async def open_these() -> ServedListing:
            found: set[bytes] = set()

            def choose(listed: list[list[ShardFile]]) -> list[list[ShardFile]]:
                chosen = [[file for file in files if shard_hash(file) in wanted] for files in listed]
                found.update(shard_hash(file) for files in chosen for file in files)
                if found != wanted:
                    raise ServerError(
                        f"{len(wanted - found)} of the {len(wanted)} shards that the consumer began with are gone, "
                        "or have another size",
                        hint="Bring them back as they were, or begin anew without the position.",
                    )
                return chosen

            served = await self._open(None, choose)
            if served.digest != digest:
                raise OtherData(self.name, digest, served.digest)
            return served

        await self._wait(("digest", digest), open_these)

    def _present(self, digest: str) -> ServedListing | None:
        """The present shards, if that is their digest. If they cannot be served, others may nevertheless be."""
        current = self._ready() if self.error is None else self.current
        return current if current is not None and current.digest == digest else None

    def _ready(self) -> ServedListing:
        if self.current is not None:
            return self.current
        if self.error is not None:
            raise self.error.with_traceback(None)  # that of the last time would be kept, and grow
        raise NotReady(f"data set {self.name} is being prepared")

    async def _wait(self, key: Hashable, begin: Callable[[], Any]) -> ServedListing:
        """The listing of ``key``, which is opened if it is not open. Raises as :meth:`_opened`; NotReady where too
        many are in use."""
        now_s = time.monotonic()
        opening = self._listings.get(key)
        if opening is None:
            self._close_unused(now_s)
            if len(self._listings) >= _MOST_LISTINGS:
                raise NotReady(f"data set {self.name} is read with too many earlier lists of its shards at a time")
        if opening is None or (opening.failed_s is not None and now_s - opening.failed_s > _FAILED_FOR_S):
            opening = self._listings[key] = _Opening(asyncio.ensure_future(begin()), now_s)
        return await self._opened(key, opening)

    async def _opened(self, key: Hashable, opening: _Opening) -> ServedListing:
        """The listing that is being opened. Raises NotReady where that takes long, and LoaderdError."""
        opening.used_s = time.monotonic()
        self._listings.move_to_end(key)
        await asyncio.wait({opening.task}, timeout=_WAIT_S)
        if not opening.task.done():
            raise NotReady(f"shards of data set {self.name} are being listed and indexed")
        if opening.task.exception() is not None and opening.failed_s is None:
            opening.failed_s = time.monotonic()
        return opening.task.result()

    def _add(self, key: Hashable, served: ServedListing) -> None:
        if key not in self._listings:
            self._listings[key] = _Opening(asyncio.ensure_future(_done(served)), time.monotonic())

    def _close_unused(self, now_s: float) -> None:
        """Close what has not been used for a while: those that are in use are kept, as opening them takes long."""
        done = [key for key, opening in self._listings.items() if opening.task.done()]
        for key in done[: max(0, len(done) - _MOST_IDLE_LISTINGS)]:
            if now_s - self._listings[key].used_s < _IDLE_S and self._listings[key].served is not None:
                continue
            closed = self._listings.pop(key).served
            if closed is not None and all(closed is not opening.served for opening in self._listings.values()):
                closed.close()

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows of the data set: plain values."""
        state, data = "ready", None if self.current is None else self.current.opened.data
        if self.error is not None:
            state = f"failed: {self.error}"
        elif data is None:
            progress = self.progress
            has_share = progress is not None and progress.num_bytes
            state = (
                f"indexing {100 * progress.done_bytes // progress.num_bytes} %"
                if progress is not None and has_share
                else "listing its shards"
            )
        specs = self.dataset.leaves()[0].schema.specs
        return {
            "name": self.name,
            "state": state,
            "num_shards": 0 if data is None else data.num_shards,
            "num_records": 0 if data is None else data.rows.num_records,
            "fields": {name: f"{spec.dtype} {spec.shape}" for name, spec in specs.items()},
        }


class OtherData(ServerError):
    """A ticket is for data that this server does not have open."""

    def __init__(self, name: str, wanted: str, found: str) -> None:
        super().__init__(
            f"this server has other data {name!r} than are asked for: digest {found}, expected {wanted:.40}",
            hint="Servers of one data set need the same shards, schema, seed and shuffle. Connect anew to use what "
            "this one has.",
        )


async def _done(served: ServedListing) -> ServedListing:
    return served

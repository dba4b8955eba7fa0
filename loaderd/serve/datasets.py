"""The data sets that a process serves, each with the listings of its shards that consumers read.

::

    listing  ──being opened (a thread lists and indexes)──► open ──16 others were asked for since──► closed
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
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from loaderd.daemon.indexing.local_data import digest_names
from loaderd.daemon.indexing.shard_manifest import Manifest, Manifests
from loaderd.dataset import AnyDataset
from loaderd.errors import LoaderdError, OptionError, ServerError
from loaderd.plan.passes import Listing
from loaderd.remote.tables import shard_hash, table_to_wire
from loaderd.remote.tickets import SHARD_BYTES, RowFault, RowsTicket, most_rows
from loaderd.schema.packed import unpacking_schema
from loaderd.serve.opening import Choose, IndexedShards
from loaderd.serve.row_maker import RowMaker, Rows
from loaderd.snapshots import Progress
from loaderd.storage.shard_file import ShardFile

_MOST_LISTINGS = 16
_LISTED_ANEW_S = 2.0
_FAILED_FOR_S = 5.0
_WAIT_S = 5.0


class NotReady(Exception):
    """The answer cannot be had now: ask later, or ask another server."""


class OtherData(ServerError):
    """What is asked for is not among the data that this server has."""


def _other_data(name: str, wanted: str, found: str) -> OtherData:
    return OtherData(
        f"this server has other data {name!r} than are asked for: digest {found}, expected {wanted:.40}",
        hint="Servers of one data set need the same shards, schema, seed and shuffle. Connect anew to use what "
        "this one has.",
    )


class ServedListing:
    """A data set with the shards of one listing. :meth:`make` may be called in several threads."""

    def __init__(self, dataset: AnyDataset, opened: IndexedShards) -> None:
        self.opened = opened
        self._dataset = dataset
        data = opened.data
        self.table, self.digest = table_to_wire(
            dataset,
            data.counts,
            data.drawings,
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

    def check_size(self, ticket: RowsTicket) -> None:
        """Raise OptionError for a ticket of more records than an answer may hold."""
        most = most_rows(self.row_bytes, self._dataset.schema.row_bytes)
        if ticket.num_rows > most:
            raise OptionError(
                f"a ticket must ask for at most {most} records of {self.row_bytes} bytes, got {ticket.num_rows}"
            )

    def _check_records(self, ticket: RowsTicket, check: Callable[[], None]) -> None:
        """Raise OptionError for a ticket of records that do not exist, and what ``check`` raises.

        What an epoch draws takes 0.4 µs for each block of the data, and a ticket may name many epochs.
        """
        blocks, stops = ticket.rows[:, 1], ticket.rows[:, 3]
        counts = np.append(self._counts, 0)[np.minimum(blocks, len(self._counts))]
        if any(drawing is not None for drawing in self.opened.data.drawings):
            for number, (epoch, block) in enumerate(ticket.rows[:, :2].tolist()):
                check()
                if counts[number]:
                    counts[number] = self.opened.data.count(block, epoch)
        missing = np.flatnonzero(stops > counts)
        if len(missing):
            block, stop = int(blocks[missing[0]]), int(stops[missing[0]])
            raise OptionError(f"a ticket asks for record {stop - 1} of block {block}, which is not in the data")

    def make(
        self, ticket: RowsTicket, check: Callable[[], None], is_lost: bool = False
    ) -> tuple[Rows, list[RowFault]]:
        """As ``RowMaker.make``. Raises OptionError also for records that do not exist."""
        self._check_records(ticket, check)
        try:
            maker = self._idle.pop()
        except IndexError:
            maker = RowMaker(self._dataset, self.opened.data, self.opened.access)
        self._of_thread.check = check
        try:
            return maker.make(ticket.rows, check, is_lost)
        finally:
            del self._of_thread.check
            self._idle.append(maker)
            if self._is_closed:
                self.close()

    def _on_wait(self) -> None:
        """Storage does not answer yet: called now and then, in the thread that waits."""
        check: Callable[[], None] | None = getattr(self._of_thread, "check", None)
        if check is not None:
            check()

    def close(self) -> None:
        """Close the files of those who make no rows at this moment, those of the others when they have made them."""
        self._is_closed = True
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()
        self.opened.access.abandon()


@dataclass
class _Opening:
    """A listing that is open, is being opened, or has failed, at ``failed_s`` (monotonic)."""

    task: asyncio.Future[ServedListing]
    failed_s: float | None = None


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
        self._listings: dict[Hashable, _Opening] = {}
        """By what they are asked for; the one that was used last is the last."""

    async def open_current(self) -> None:
        """List and index the shards that there are now. Raises LoaderdError."""
        try:
            opened = await self._open()
        except LoaderdError as error:
            self.error = error
            raise
        finally:
            self.progress = None
        self.current, self.error = opened, None
        if self.dataset.grows:
            self._keep(opened.opened.data.listing, opened)
        digests = opened.opened.data.digests
        if self._manifests is not None and digests:
            sets = zip(self.dataset.leaves(), opened.opened.sets, strict=True)
            manifest = Manifest.of(self._target, digests, [None if leaf.grows else files for leaf, files in sets])
            if unkept := await self._in_thread(self._manifests.add, manifest):
                raise ServerError(f"the list of the shards of {self.name} cannot be kept: {unkept}")

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._openers, function, *arguments)

    async def _open(self, listing: Listing | None = None, choose: Choose = lambda listed: listed) -> ServedListing:
        known = None if self.current is None else self.current.opened.indexes

        def show(progress: Progress) -> None:
            self.progress = progress

        def work() -> ServedListing:
            opened = IndexedShards(self.dataset, self.name, listing=listing, choose=choose, known=known, show=show)
            return ServedListing(self.dataset, opened)

        found: ServedListing = await self._in_thread(work)
        return found

    # --------------------------------------------------------------------------------------- which listing

    async def of_ticket(self, ticket: RowsTicket) -> ServedListing:
        """The listing that a ticket is for. Raises NotReady, and LoaderdError; OtherData if it is not known."""
        if ticket.listing is not None:
            served = await self._wait(ticket.listing, partial(self._open, ticket.listing))
            if served.digest != ticket.data:
                raise _other_data(self.name, ticket.data, served.digest)
            return served
        if (present := self._present(ticket.data)) is not None:
            return present
        opening = self._listings.get(("digest", ticket.data))
        if opening is None or opening.failed_s is not None:
            raise _other_data(self.name, ticket.data, "none" if self.current is None else self.current.digest)
        return await self._opened(("digest", ticket.data), opening)

    async def of_position(self, listing: Listing | None, belongs_to: Mapping[str, Any]) -> ServedListing:
        """The listing that a consumer begins with, whose position has this ``listing`` and ``of``."""
        current = self._ready()
        if self.dataset.grows and listing is not None:
            return await self._wait(listing, partial(self._open, listing))
        if self.dataset.grows and time.monotonic() - current.opened_s > _LISTED_ANEW_S:
            return await self._wait("now", self._open_now)
        digests = {name: str(belongs_to.get(name)) for name in digest_names(self.dataset)}
        manifests = self._manifests
        if self.dataset.grows or not belongs_to or digests == current.opened.data.digests or manifests is None:
            return current
        key = ("position", *digests.values())
        found: Manifest | None = await self._in_thread(manifests.find, self._target, digests)
        if found is None:
            return current  # the consumer says what differs

        async def open_earlier() -> ServedListing:
            served = await self._open(choose=found.choose)
            self._keep(("digest", served.digest), served)
            return served

        return await self._wait(key, open_earlier)

    async def _open_now(self) -> ServedListing:
        """List a data set that grows anew."""
        self.current = await self._open()
        self._listings.pop("now", None)
        self._keep(self.current.opened.data.listing, self.current)  # for the tickets that follow
        return self.current

    async def add(self, digest: str, shards: bytes) -> None:
        """Have tickets for ``digest`` answered, whose shards are those with these hashes. Raises as of_ticket."""
        if self._present(digest) is not None:
            return
        wanted = {shards[at : at + SHARD_BYTES] for at in range(0, len(shards), SHARD_BYTES)}

        def choose(listed: list[list[ShardFile]]) -> list[list[ShardFile]]:
            chosen = [[file for file in files if shard_hash(file) in wanted] for files in listed]
            found = {shard_hash(file) for files in chosen for file in files}
            if found != wanted:
                raise OtherData(
                    f"{len(wanted - found)} of the {len(wanted)} shards that the consumer began with are gone, "
                    "or have another size",
                    hint="Bring them back as they were, or begin anew without the position.",
                )
            return chosen

        async def open_these() -> ServedListing:
            served = await self._open(choose=choose)
            if served.digest != digest:
                raise _other_data(self.name, digest, served.digest)
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

    async def _wait(self, key: Hashable, begin: Callable[[], Awaitable[ServedListing]]) -> ServedListing:
        """The listing of ``key``, which is opened if it is not open. Raises as :meth:`_opened`."""
        opening = self._listings.get(key)
        if opening is None or (opening.failed_s is not None and time.monotonic() - opening.failed_s > _FAILED_FOR_S):
            opening = self._add(key, asyncio.ensure_future(begin()))
        return await self._opened(key, opening)

    async def _opened(self, key: Hashable, opening: _Opening) -> ServedListing:
        """The listing that is being opened. Raises NotReady where that takes long, and LoaderdError."""
        self._listings[key] = self._listings.pop(key)
        await asyncio.wait({opening.task}, timeout=_WAIT_S)
        if not opening.task.done():
            raise NotReady(f"shards of data set {self.name} are being listed and indexed")
        if opening.task.exception() is not None and opening.failed_s is None:
            opening.failed_s = time.monotonic()
        return opening.task.result()

    def _keep(self, key: Hashable, served: ServedListing) -> None:
        """Have it for those who will ask by another key."""
        opened: asyncio.Future[ServedListing] = asyncio.get_running_loop().create_future()
        opened.set_result(served)
        before = self._listings.get(key)
        self._add(key, opened)
        if before is not None and before.task.done() and before.task.exception() is None:
            self._close(before.task.result())

    def _add(self, key: Hashable, task: asyncio.Future[ServedListing]) -> _Opening:
        """Of too many, close one that failed, or the one that was asked for longest ago. Raises NotReady."""
        done = [key for key, opening in self._listings.items() if opening.task.done()]
        done.sort(key=lambda key: self._listings[key].task.exception() is None)
        if len(self._listings) >= _MOST_LISTINGS and not done:
            task.cancel()
            raise NotReady(f"too many earlier lists of the shards of data set {self.name} are being opened")
        if len(self._listings) >= _MOST_LISTINGS:
            closed = self._listings.pop(done[0]).task
            if closed.exception() is None:
                self._close(closed.result())
        self._listings[key] = _Opening(task)
        return self._listings[key]

    def _close(self, served: ServedListing) -> None:
        """Unless others use it."""
        tasks = [opening.task for opening in self._listings.values()]
        others = [task.result() for task in tasks if task.done() and task.exception() is None]
        if served is not self.current and served not in others:
            served.close()

    def report(self) -> dict[str, Any]:
        """What ``loaderd status`` shows of the data set: plain values."""
        state, data, progress = "ready", None if self.current is None else self.current.opened.data, self.progress
        if self.error is not None:
            state = f"failed: {self.error}"
        elif data is None and progress is not None and progress.num_bytes:
            state = f"indexing {100 * progress.done_bytes // progress.num_bytes} %"
        elif data is None:
            state = "listing its shards"
        specs = self.dataset.leaves()[0].schema.specs
        return {
            "name": self.name,
            "state": state,
            "num_shards": 0 if data is None else data.num_shards,
            "num_records": 0 if data is None else data.rows.num_records,
            "fields": {name: f"{spec.dtype} {spec.shape}" for name, spec in specs.items()},
        }

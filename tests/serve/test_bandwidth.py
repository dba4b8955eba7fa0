"""Answers wait for their bytes before they are made."""

from __future__ import annotations

import asyncio

import pytest

from loaderd.serve.bandwidth import Bandwidth
from loaderd.serve.datasets import NotReady


def test_who_would_wait_for_long_is_sent_away():
    async def wait() -> None:
        bandwidth = Bandwidth(1000)
        for num_bytes in (1000, 6000):  # those of one second are there, and an answer is not cut
            await asyncio.wait_for(bandwidth.wait(num_bytes), 1.0)
        with pytest.raises(NotReady, match="the bandwidth is used up"):
            await bandwidth.wait(1)

    asyncio.run(wait())


def test_who_goes_gives_its_bytes_back():
    async def wait() -> None:
        bandwidth = Bandwidth(1000)
        for num_bytes in (1000, 4000):
            await bandwidth.wait(num_bytes)
        gone = asyncio.ensure_future(bandwidth.wait(10_000))
        await asyncio.sleep(0)
        with pytest.raises(NotReady):
            await bandwidth.wait(1)
        gone.cancel()
        await asyncio.wait({gone})
        after = asyncio.ensure_future(bandwidth.wait(1))
        await asyncio.sleep(0)
        assert not after.done()
        after.cancel()

    asyncio.run(wait())

"""Answers wait for their bytes before they are made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from loaderd.serve.app import RowsApp
from loaderd.serve.datasets import NotReady


def test_who_would_wait_for_long_is_sent_away():
    nothing: Any = None
    app = RowsApp({}, [], nothing, nothing, 1000.0, None)

    async def wait() -> None:
        for num_bytes in (1000, 6000):  # those of one second are there, and an answer is not cut
            await asyncio.wait_for(app._wait_for_bandwidth(num_bytes), 1.0)
        with pytest.raises(NotReady, match="the bandwidth is used up"):
            await app._wait_for_bandwidth(1)

    asyncio.run(wait())

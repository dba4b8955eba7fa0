"""Consumers on the network: a real daemon, a real gateway, the relay that connect() starts."""

from __future__ import annotations

import numpy as np
import pytest

import loaderd


def numbers_of(loader):
    numbers = []
    for batch in loader:
        assert np.array_equal(batch["bits"] @ 2.0 ** np.arange(31, -1, -1), batch["id"])
        assert np.array_equal(batch["twice"], 2 * batch["id"])
        numbers.append(batch["id"].tolist())
    return numbers


@pytest.fixture
def embedded(start_server, tmp_path):
    """What the server's data set is, batch by batch, without a server."""
    import sys

    def read(**options):
        module = __import__(f"served_{tmp_path.name.replace('-', '_')}")
        try:
            with loaderd.Loader(module.train, batch_size=64, workers=1, **options) as loader:
                return numbers_of(loader)
        finally:
            del sys.modules[module.__name__]

    return read


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_batches_are_those_of_an_embedded_loader(start_server, embedded, packed, compression):
    server = start_server()
    with loaderd.connect(
        server.address, dataset="train", batch_size=64, epochs=2, packed=packed, compression=compression
    ) as loader:
        found = numbers_of(loader)
        assert found == embedded(epochs=2)
        assert sorted(number for numbers in found[:16] for number in numbers) == list(range(1000))
        assert loader.statistics().num_records == 1000

"""Over the network: records that are larger than what else is sent at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.errors import OptionError
from tests.remote import network_server
from tests.remote.network_server import NetworkServer

MODULE = """
import pathlib
import numpy as np
import loaderd

record = np.dtype([("id", "<i4"), ("bytes", "u1", (SIZE,))])
schema = loaderd.Schema(loaderd.FixedRecords(record), {name: loaderd.Array(name) for name in ("id", "bytes")})
train = loaderd.Dataset(str(pathlib.Path(__file__).with_name("large.bin")), schema)
"""


@pytest.fixture
def serve(tmp_path: Path, start_server: Callable[..., NetworkServer], monkeypatch: pytest.MonkeyPatch):
    """Serves so many records of so many bytes, numbered, with 32 MiB for answers."""

    def start(number: int, size: int) -> NetworkServer:
        records = np.zeros(number, np.dtype([("id", "<i4"), ("bytes", "u1", (size,))]))
        records["id"] = np.arange(number)
        records["bytes"] = records["id"][:, None]
        (tmp_path / "large.bin").write_bytes(records.tobytes())
        monkeypatch.setattr(network_server, "MODULE", MODULE.replace("SIZE", str(size)))
        return start_server(cache=0)

    return start


@pytest.mark.slow
def test_records_of_several_mib(serve: Callable[..., NetworkServer]):
    server = serve(30, (5 << 20) + 7)
    with loaderd.connect([server.address], "train", batch_size=4, workers=2) as loader:
        found = []
        for batch in loader:
            assert (batch["bytes"] == batch["id"][:, None]).all()
            found += batch["id"].tolist()
    assert sorted(found) == list(range(30))


def test_a_record_that_is_larger_than_all_memory_for_answers(serve: Callable[..., NetworkServer]):
    server = serve(2, 33 << 20)
    words = r"a record of 34,603,0\d\d bytes is larger than the server's memory .*\n.*--cache 34MiB or more"
    with pytest.raises(OptionError, match=words):
        loaderd.connect([server.address], "train", batch_size=1, workers=1)

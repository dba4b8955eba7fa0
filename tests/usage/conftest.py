"""The records that the programs read, and a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from harness.synthetic import write_shards

import loaderd
from tests.helpers.serving import Server
from tests.usage.usage_runner import Programs

HERE = Path(__file__).parent

_SHUFFLED_EPOCHS = 8


@pytest.fixture(scope="session")
def usage_folder(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[[Path, Sequence[int]], list[Path]]
) -> Iterator[Path]:
    """Shards, and what the programs in memory are made of: the orders of epochs, and the chess records' fields."""
    folder = tmp_path_factory.mktemp("usage")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("USAGE_FOLDER", str(folder))
        from tests.usage import usage_schema as data

        write_numbered_to(folder / "numbered", [50, 50, data.RECORDS - 100])
        write_shards(folder / "chess", data.CHESS_RECORDS, num_shards=2)
        with loaderd.Loader(
            data.NUMBERED, data.schema, batch_size=data.RECORDS, epochs=_SHUFFLED_EPOCHS, workers=1
        ) as loader:
            np.save(folder / "orders.npy", [np.array(batch["id"]) for batch in loader])
        with loaderd.Loader(
            data.CHESS, data.chess_schema, batch_size=data.CHESS_RECORDS, shuffle=False, workers=1
        ) as loader:
            np.savez(folder / "chess.npz", **next(iter(loader)))
        yield folder


@pytest.fixture(scope="session")
def usage_server(usage_folder: Path) -> Iterator[str]:
    """The path of the socket of a server of the numbered records."""
    served = [f"usage_schema:{name}" for name in ("numbered", "shuffled", "chess")]
    server = Server(usage_folder, *served, "--workers", "1", PYTHONPATH=":".join([str(HERE), *sys.path]))
    server.wait_line("memory: ")
    yield server.path
    server.close()


@pytest.fixture(scope="session")
def programs(usage_folder: Path) -> Programs:
    """Runs them."""
    return Programs({"USAGE_FOLDER": str(usage_folder), "USAGE_SERVER": str(usage_folder / "x.sock")})

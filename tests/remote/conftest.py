"""Servers on the network, as users start them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loaderd
from tests.remote.certificates import Certificates, make_certificates
from tests.remote.network_server import NetworkServer

StartServer = Callable[..., NetworkServer]


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of a CA, of a server "localhost", of a consumer, and one that has expired."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def start_server(tmp_path: Path, write_numbered_to: Callable[..., list[Path]]) -> Iterator[StartServer]:
    """Starts a server of 1,000 numbered records; the arguments are those of ``loaderd serve``."""
    yield from _starter(tmp_path, write_numbered_to)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[..., list[Path]]
) -> Iterator[NetworkServer]:
    """One of these, for all tests of a module: they leave it as it was."""
    for start in _starter(tmp_path_factory.mktemp("server"), write_numbered_to):
        yield start()


@pytest.fixture(scope="module")
def embedded(server: NetworkServer) -> list[list[int]]:
    """The ids that an embedded loader makes of its data set, in ten epochs of batches of 64."""
    with loaderd.Loader(server.dataset(), batch_size=64, epochs=10, workers=1) as loader:
        return [batch["id"].tolist() for batch in loader]


def _starter(folder: Path, write: Callable[..., list[Path]]) -> Iterator[StartServer]:
    write(folder / "shards", [300, 400, 300])
    servers: list[NetworkServer] = []

    def start(*arguments: str, **others: str) -> NetworkServer:
        servers.append(NetworkServer(folder, *arguments, **others))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

"""A server on the network as the supervisor starts it: a daemon and a gateway, real processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from certificates import Certificates, make_certificates
from network_server import NetworkServer


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of a CA, of a server "localhost", of a consumer, and one that has expired."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


StartServer = Callable[..., NetworkServer]


@pytest.fixture
def start_server(tmp_path: Path, write_numbered_to: Callable[..., list[Path]]) -> Iterator[StartServer]:
    """Starts a server of the data set "train", 1,000 numbered records; the settings are the gateway's."""
    yield from _starter(tmp_path, write_numbered_to)


@pytest.fixture(scope="module")
def start_shared_server(
    tmp_path_factory: pytest.TempPathFactory, write_numbered_to: Callable[..., list[Path]]
) -> Iterator[StartServer]:
    """The same, for tests that do no harm to it."""
    yield from _starter(tmp_path_factory.mktemp("server"), write_numbered_to)


def _starter(folder: Path, write: Callable[..., list[Path]]) -> Iterator[StartServer]:
    write(folder / "shards", [300, 400, 300])
    servers: list[NetworkServer] = []

    def start(**settings: object) -> NetworkServer:
        servers.append(NetworkServer(folder, settings, f"server-{len(servers)}"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

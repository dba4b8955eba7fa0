"""A server on the network as the supervisor starts it: a daemon and a gateway, real processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.remote.certificates import Certificates, make_certificates
from tests.remote.network_server import NetworkServer


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


@pytest.fixture
def borrow_server(start_shared_server: StartServer, lent_before: list[NetworkServer]) -> Iterator[StartServer]:
    """A server without settings, which a test may harm. If it is whole afterwards, the next test gets it."""
    borrowed: list[NetworkServer] = []

    def borrow() -> NetworkServer:
        borrowed.append(lent_before.pop() if lent_before else start_shared_server())
        return borrowed[-1]

    yield borrow
    for server in borrowed:
        if server.is_whole():
            lent_before.append(server)
        else:
            server.close()


@pytest.fixture(scope="module")
def lent_before() -> list[NetworkServer]:
    """The servers that no test has at the moment."""
    return []


def _starter(folder: Path, write: Callable[..., list[Path]]) -> Iterator[StartServer]:
    write(folder / "shards", [300, 400, 300])
    servers: list[NetworkServer] = []

    def start(**settings: object) -> NetworkServer:
        servers.append(NetworkServer(folder, settings, f"server-{len(servers)}"))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

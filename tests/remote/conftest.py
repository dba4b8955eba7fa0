"""A server on the network as the supervisor starts it: a daemon and a gateway, real processes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from certificates import Certificates, make_certificates  # noqa: E402  # of this folder
from network_server import NetworkServer  # noqa: E402

DATASETS = """
import loaderd

schema = loaderd.Schema(
    features={{"bits": loaderd.PackedBits(32), "id": loaderd.Int64()}},
    fields={{
        "bits": loaderd.Bits("bits", shape=(32,)),
        "id": loaderd.Array("id"),
        "twice": loaderd.Derived(lambda id: 2 * id, inputs=("id",), dtype="int64"),
    }},
)
train = loaderd.Dataset({shards!r}, schema, loaderd.Shuffle(window_records=200, block_records=16))
"""


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Of a CA, of a server "localhost", of a consumer, and one that has expired."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def start_server(
    tmp_path: Path, write_numbered: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., NetworkServer]]:
    """Starts a server of the data set "train", 1,000 numbered records; the settings are the gateway's."""
    write_numbered([300, 400, 300])
    module = f"served_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(DATASETS.format(shards=str(tmp_path / "shards" / "*.tfrecord")))
    monkeypatch.syspath_prepend(str(tmp_path))
    servers = []

    def start(**settings: object) -> NetworkServer:
        servers.append(NetworkServer(tmp_path / "server.sock", f"{module}:train", settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()

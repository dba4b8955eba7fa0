"""Shards, tokens and certificates that change while trainings run: an epoch ends as it began."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import loaderd
from loaderd.client.connect import ask_status
from loaderd.errors import CorruptRecordError, NoShardsError, ServerError
from loaderd.remote.calls import Calls, OutOfReach
from loaderd.remote.source import Settings
from loaderd.remote.tables import table_from_wire
from loaderd.remote.tickets import RowsTicket
from tests.helpers.serving import wait_until
from tests.remote.network_server import NetworkServer


def connect(server, **options):
    return loaderd.connect(server.address, "train", **{"batch_size": 64, "workers": 1, **options})


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


@pytest.fixture
def add_shard(tmp_path, write_numbered_to):
    def add() -> None:
        (path,) = write_numbered_to(tmp_path / "new", [100])
        path.rename(tmp_path / "shards" / "added.tfrecord")

    return add


def test_a_damaged_shard_that_is_added_ends_no_training(start_server, tmp_path, embedded):
    """The server that is started again cannot serve it, but those from before."""
    server = start_server()
    with connect(server, epochs=10) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        server.close()
        (tmp_path / "shards" / "added.tfrecord").write_bytes(b"no TFRecord, as all see\0")
        server.start(is_ready=False)
        server.server.wait_line("data set train: ")
        found += [batch["id"].tolist() for batch in batches]
    assert found == embedded
    with pytest.raises(CorruptRecordError, match="added"):
        connect(server)


def test_shards_that_are_not_there_yet(start_server, tmp_path, embedded):
    """A training waits for a server that was started anew before its storage was mounted; a new one is told."""
    server = start_server()
    with connect(server, epochs=10) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        server.close()
        (tmp_path / "shards").rename(tmp_path / "away")
        server.start(is_ready=False)
        server.server.wait_line("data set train: ")
        rest: list[list[int]] = []
        taking = threading.Thread(target=lambda: rest.extend(batch["id"].tolist() for batch in batches))
        taking.start()
        wait_until(lambda: "matches no file" in loader.diagnose().last_error)
        with pytest.raises(NoShardsError, match="matches no file"):
            connect(server)
        (tmp_path / "away").rename(tmp_path / "shards")
        taking.join()
    assert found + rest == embedded


@pytest.mark.one_variant
@pytest.mark.parametrize("how", ["reload", "restart", "restart without its state"])
def test_a_training_goes_on_with_its_shards(start_server, add_shard, tmp_path, how):
    """And a consumer that comes afterwards has all of them."""
    server = start_server()
    with connect(server, epochs=4) as loader:
        expected = ids(loader)
    with connect(server, epochs=4) as loader:
        batches, found = iter(loader), []
        for _ in range(5):
            found.append(next(batches)["id"].tolist())
        position = loader.position
        add_shard()
        if how == "reload":
            server.reload()
        else:
            server.close()
            if how.endswith("state"):
                for path in (tmp_path / "state" / "manifests").iterdir():
                    path.unlink()
            server.start()
        found += [batch["id"].tolist() for batch in batches]
    assert found == expected
    with connect(server) as loader:
        assert sum(map(len, ids(loader))) == 1100
    if not how.endswith("state"):  # it began before, and nobody else knows its shards
        with connect(server, epochs=4, start=position) as loader:
            assert ids(loader) == expected[5:]


def test_a_reload_under_load_costs_no_request(start_server, embedded):
    server = start_server()
    refused = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            try:
                ask_status(server.address)
            except ServerError as error:
                refused.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    with connect(server, epochs=10) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        server.reload()
        found += [batch["id"].tolist() for batch in batches]
    over.set()
    asking.join()
    assert found == embedded
    # A connection that was idle may end while the next request is on its way: consumers ask again.
    assert not [text for text in refused if "ended the connection" not in text]


def test_what_processes_count_that_are_replaced_is_not_lost(start_server):
    """Nor what they count last, after the last question of the supervisor."""
    server = start_server()
    calls = Calls(server.address, Settings())
    table = table_from_wire(calls.table("train", None, {}, 10.0), "here")
    ticket = RowsTicket(table.digest, np.array([[0, 0, 0, 10]]))
    reloaded, had = threading.Event(), 0

    def ask() -> None:
        nonlocal had
        while not reloaded.is_set():
            with contextlib.suppress(OutOfReach):
                had += len(calls.rows("train", ticket, table.schema.row_bytes, 10.0)[0])

    asking = threading.Thread(target=ask)
    asking.start()
    server.reload()
    reloaded.set()
    asking.join()
    wait_until(lambda: server.records_sent() >= had, 10)


@pytest.mark.parametrize("kind", ["a file", "a function"])
def test_a_token_is_rotated_under_a_training(start_server, tmp_path, kind, embedded):
    """The server takes both for a while; the consumer reads its own again when the old one is refused."""
    own, servers = tmp_path / "own", tmp_path / "servers"
    for path in (own, servers):
        path.write_text("the-old-token-of-all")
        path.chmod(0o600)
    server = start_server("--token-file", str(servers))
    token = own if kind == "a file" else lambda: Path(own).read_text()
    with connect(server, epochs=10, token=token) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        for own_text, servers_text in (
            ("the-old-token-of-all", "the-old-token-of-all\nthe-new-token-of-all"),
            ("the-new-token-of-all", "the-new-token-of-all"),
        ):
            own.write_text(own_text)
            servers.write_text(servers_text)
            server.reload()
            found.append(next(batches)["id"].tolist())
        found += [batch["id"].tolist() for batch in batches]
    assert found == embedded
    with pytest.raises(ServerError, match="refuses the token"):
        connect(server, token="the-old-token-of-all")


def test_a_process_that_is_replaced_takes_the_tokens_of_the_last_reload(start_server, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("the-old-token-of-all")
    server = start_server("--token-file", str(tokens))
    tokens.write_text("the-new-token-of-all")
    server.reload()
    tokens.write_text("the-next-token-of-all")
    server.kill_processes()
    for _ in range(2):
        server.server.wait_line("serves now")
    for _ in range(4):  # either process may answer
        assert ask_status(server.address, token="the-new-token-of-all")["pid"]
        for wrong in ("the-old-token-of-all", "the-next-token-of-all"):
            with pytest.raises(ServerError, match="refuses the token"):
                ask_status(server.address, token=wrong)


@pytest.mark.slow
def test_a_certificate_is_renewed_under_a_training(tmp_path, start_server, certificates, embedded):
    paths = {name: tmp_path / f"{name}.pem" for name in ("cert", "key")}
    paths["cert"].write_bytes(Path(certificates.server_cert).read_bytes())
    paths["key"].write_bytes(Path(certificates.server_key).read_bytes())
    server: NetworkServer = start_server("--tls-cert", str(paths["cert"]), "--tls-key", str(paths["key"]))
    with connect(server, epochs=10, tls=loaderd.TLS(ca=certificates.ca)) as loader:
        batches = iter(loader)
        found = [next(batches)["id"].tolist()]
        paths["cert"].write_bytes(Path(certificates.expired).read_bytes())
        server.server.process.send_signal(signal.SIGHUP)
        server.server.wait_line("the certificate")
        server.server.wait_line("reloaded")
        paths["cert"].write_bytes(Path(certificates.server_cert).read_bytes())
        server.reload()
        found += [batch["id"].tolist() for batch in batches]
    assert found == embedded


SCRIPT = """
import sys, threading
import loaderd

address, path, how = sys.argv[1:]
lock = threading.Lock()
token = (lambda: open(path).read()) if how == "a lambda" else (lambda: lock and open(path).read())
with loaderd.connect(address, "train", batch_size=100, workers=1, token=token) as loader:
    print(sum(batch.num_records for batch in loader))
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [("a lambda", ""), ("with a lock", "token must be a function that can be pickled, for the worker processes")],
)
def test_a_token_of_a_function_of_the_users_script(start_server, tmp_path, how, words):
    (tmp_path / "token").write_text("the-token-of-everybody")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "script.py").write_text(SCRIPT)
    server = start_server("--token-file", str(tmp_path / "token"))
    done = subprocess.run(
        [sys.executable, "script.py", server.address, str(tmp_path / "token"), how],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout.strip(), words in done.stderr) == ("" if words else "1000", True), done.stderr
